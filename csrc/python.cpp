/// The binder: zbpipe._native. Pointers travel as integers; no torch header is needed.
#include "schedule/python.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/cuda_device.hpp"
#include "cuda/python.hpp"
#include "executor.hpp"
#include "transport/python.hpp"

namespace py = pybind11;
using zb::Board, zb::Executor, zb::Failure, zb::File, zb::Instruction, zb::Program, zb::Receiver,
    zb::Sender, zb::Tag, zb::Work;

namespace {

/// The one Python thread state of a lane's thread, while it does not hold the GIL.
thread_local PyThreadState* lane_state = nullptr;

/// The lanes' threads of one executor that have a Python thread state; guarded by the GIL.
using Threads = std::set<unsigned long>;

zb::ThreadHook lane_hook(std::shared_ptr<Threads> threads) {
  return [threads = std::move(threads)](bool starting) {
    if (starting) {
      PyGILState_Ensure();
      threads->insert(PyThread_get_thread_ident());
      lane_state = PyEval_SaveThread();
    } else if (Py_IsInitialized()) {
      PyEval_RestoreThread(lane_state);
      threads->erase(PyThread_get_thread_ident());
      PyGILState_Release(PyGILState_UNLOCKED);
      lane_state = nullptr;
    }
  };
}

/// What the Python error that is set says; clears it. Needs the GIL, and keeps it: throws nothing.
std::string take_error() {
  try {
    return py::error_already_set().what();
  } catch (const std::exception&) {
    PyErr_Clear();
    return "an exception that cannot be printed";
  }
}

/// A Python callable for lanes; may be dropped by a thread without the GIL.
class Callable {
 public:
  explicit Callable(py::object function) : function_(function.release().ptr()) {}
  Callable(const Callable&) = delete;
  Callable& operator=(const Callable&) = delete;
  ~Callable() {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(function_);
  }

  /// On a lane's thread. If the interpreter ends while user code is under way, CPython ends the
  /// thread by unwinding it (PEP 311): no destructor from here to the lane's root may need the GIL.
  bool operator()(uint32_t index) const {
    std::string error;
    PyEval_RestoreThread(lane_state);
    PyObject* result = PyObject_CallFunction(function_, "I", index);
    int ok = result == nullptr ? -1 : PyObject_IsTrue(result);
    Py_XDECREF(result);
    if (ok < 0) error = take_error();
    lane_state = PyEval_SaveThread();
    if (ok < 0) throw std::runtime_error(error);
    return ok == 1;
  }

 private:
  PyObject* function_;
};

/// A message's payload in its slot; keeps the memory mapped.
struct Slot {
  std::shared_ptr<zb::Mapping> mapping;
  char* data;
  size_t bytes;
};

/// An Executor whose lanes may run Python.
class PyExecutor : public Executor {
 public:
  PyExecutor(std::shared_ptr<Board> board, int rank, double timeout,
             std::shared_ptr<zb::cuda::CudaDevice> cuda)
      : PyExecutor(std::move(board), rank, timeout, std::move(cuda), std::make_shared<Threads>()) {}
  /// Whoever drops the last reference holds the GIL, which lanes may need to end.
  ~PyExecutor() { stop(); }

  /// Needs the GIL. A callback that does not return is told to by an exception, else it would meet
  /// the interpreter's end; one that sits in native code is left behind.
  void stop() {
    if (halted(zb::kHaltNs)) return;
    for (unsigned long thread : *threads_) PyThreadState_SetAsyncExc(thread, PyExc_SystemExit);
    if (!halted(zb::kHaltNs)) abandon();
  }

  /// Header and payload of the message in a slot.
  py::tuple message(int channel, int slot) const {
    const Receiver& r = receiver(channel);
    py::bytes header(r.header(slot));
    if (cuda_ != nullptr)
      return py::make_tuple(
          header, zb::cuda::as_slot(cuda_->payload(channel, slot), r.payload_bytes(slot)));
    return py::make_tuple(header, Slot{r.mapping(slot), r.payload(slot), r.payload_bytes(slot)});
  }

  /// The stream of a lane, as an integer.
  uintptr_t stream(uint32_t lane) const {
    ZB_CHECK(cuda_ != nullptr, "an executor on the CPU has no streams");
    return reinterpret_cast<uintptr_t>(cuda_->stream(lane));
  }

 private:
  PyExecutor(std::shared_ptr<Board> board, int rank, double timeout,
             std::shared_ptr<zb::cuda::CudaDevice> cuda, std::shared_ptr<Threads> threads)
      : Executor(std::move(board), rank, static_cast<int64_t>(timeout * 1e9), lane_hook(threads),
                 cuda),
        cuda_(std::move(cuda)),
        threads_(std::move(threads)) {}

  bool halted(int64_t ns) {
    py::gil_scoped_release release;
    return halt(ns);
  }

  std::shared_ptr<zb::cuda::CudaDevice> cuda_;
  std::shared_ptr<Threads> threads_;
};

using InstructionTuple = std::tuple<uint32_t, int, int, int, uint64_t, int, std::string, int,
                                    std::vector<uint32_t>, bool>;

std::shared_ptr<Program> make_program(uint32_t lanes, const std::vector<InstructionTuple>& rows) {
  std::vector<Instruction> list;
  list.reserve(rows.size());
  for (const auto& [lane, work, channel, slot, amount, stage, kind, microbatch, waits, signals] :
       rows) {
    ZB_CHECK(work >= 0 && work <= static_cast<int>(Work::kGraph), "unknown kind of work");
    ZB_CHECK(kind.size() == 1, "an action's kind is one letter");
    list.push_back({lane, static_cast<Work>(work), channel, slot, amount,
                    Tag{stage, microbatch, kind[0]}, waits, signals});
  }
  return std::make_shared<Program>(lanes, std::move(list));
}

using Job = std::tuple<PyExecutor*, std::shared_ptr<Program>, py::object>;

zb::Callback as_callback(const py::object& function) {
  if (function.is_none())
    return [](uint32_t) -> bool { throw std::runtime_error("this run has no callback"); };
  return [held = std::make_shared<Callable>(function)](uint32_t index) { return (*held)(index); };
}

/// Starts every job, or says why one cannot start; then the board is aborted.
std::exception_ptr start_all(Board& board, int rank, const std::vector<Job>& jobs) {
  try {
    for (const auto& [executor, program, callback] : jobs) {
      zb::Callback call = as_callback(callback);
      // A device may be waited for, whose streams wait for who needs the lock.
      py::gil_scoped_release release;
      executor->start(program, std::move(call));
    }
  } catch (const std::exception& error) {
    board.abort({rank, Tag{}, 'r', error.what()});
    return std::current_exception();
  }
  return nullptr;
}

bool all_joined(const std::vector<Job>& jobs, int64_t ns) {
  py::gil_scoped_release release;
  int64_t end = zb::now_ns() + ns;
  bool all = true;
  for (const auto& job : jobs) all = std::get<0>(job)->join(end - zb::now_ns()) && all;
  return all;
}

// Every fourth slice looks for dead and stalled ranks: a few system calls a rank.
constexpr int kSlicesPerLook = 4;

/// Runs each executor's program at once and returns when all are over; true when none was aborted.
/// Handles signals meanwhile. After an abort, waits `grace` ns for callbacks to return, no longer.
bool run(Board& board, int rank, const std::vector<Job>& jobs, int64_t grace) {
  std::exception_ptr error = start_all(board, rank, jobs);
  int64_t deadline = 0;
  for (int slice = 1; !all_joined(jobs, zb::kSliceNs); ++slice) {
    if (slice % kSlicesPerLook == 0) {
      py::gil_scoped_release release;
      for (const auto& job : jobs) std::get<0>(job)->supervise();
    }
    if (!error && PyErr_CheckSignals() != 0) {
      error = std::make_exception_ptr(py::error_already_set());
      board.abort({rank, Tag{}, 'i', "interrupted in step()"});
    }
    if (!board.aborted()) continue;
    if (deadline == 0) deadline = zb::now_ns() + grace;
    if (zb::now_ns() > deadline) break;
  }
  if (error) std::rethrow_exception(error);
  return !board.aborted();
}

py::object failure(const Board& board) {
  if (!board.aborted()) return py::none();
  Failure f = board.failure();
  return py::make_tuple(
      f.rank, f.tag.stage, std::string(1, f.tag.kind), f.tag.microbatch, std::string(1, f.cause),
      py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
          f.message.data(), static_cast<Py_ssize_t>(f.message.size()), "replace")));
}

void post(PyExecutor& executor, uint32_t instruction, const py::bytes& header,
          const std::vector<std::tuple<uintptr_t, size_t, size_t>>& pieces, size_t payload) {
  zb::Message message{header, {}, payload};
  message.pieces.reserve(pieces.size());
  for (const auto& [data, bytes, offset] : pieces) {
    ZB_CHECK(offset <= payload && bytes <= payload - offset, "a piece lies outside its message");
    message.pieces.push_back({reinterpret_cast<const void*>(data), bytes, offset});
  }
  executor.post(instruction, std::move(message));
}

std::vector<std::pair<int64_t, int64_t>> times(const PyExecutor& executor) {
  std::vector<std::pair<int64_t, int64_t>> out;
  out.reserve(executor.times().size());
  for (const zb::Times& t : executor.times()) out.emplace_back(t.start, t.end);
  return out;
}

void bind_channels(py::module_& m) {
  py::class_<Sender, std::shared_ptr<Sender>>(m, "Sender")
      .def(py::init<int, uint32_t>(), py::arg("slots"), py::arg("first") = 0)
      .def_property_readonly("fd", &Sender::fd)
      .def("announce", &Sender::announce, py::arg("slot"), py::arg("header"), py::arg("payload"))
      .def_property_readonly("slots", &Sender::slots);
  py::class_<Receiver, std::shared_ptr<Receiver>>(m, "Receiver")
      .def(py::init([](int pid, int fd, int slots, bool poison) {
             return std::make_shared<Receiver>(File::open(pid, fd), slots, poison);
           }),
           py::arg("pid"), py::arg("fd"), py::arg("slots"), py::arg("poison") = false)
      .def_property_readonly("slots", &Receiver::slots);
  py::class_<Slot>(m, "Slot", py::buffer_protocol()).def_buffer([](Slot& slot) {
    return py::buffer_info(reinterpret_cast<uint8_t*>(slot.data),
                           static_cast<py::ssize_t>(slot.bytes), false);
  });
}

// Both look into /proc or wait for other processes of the host.
py::bytes report(const Board& board) {
  std::string said;
  {
    py::gil_scoped_release release;
    said = board.report();
  }
  return py::bytes(said);
}

void adopt(Board& board, const py::bytes& report) {
  std::string said = report;
  py::gil_scoped_release release;
  board.adopt(said);
}

void bind_board(py::module_& m) {
  py::class_<Board, std::shared_ptr<Board>>(m, "Board")
      .def_static("create", &Board::create, py::arg("ranks"))
      .def_static("open", &Board::open, py::arg("pid"), py::arg("fd"), py::arg("ranks"))
      .def_property_readonly("fd", &Board::fd)
      .def("seal", &Board::seal)
      .def("steps", &Board::steps)
      .def("place_elsewhere", &Board::place_elsewhere, py::arg("rank"))
      .def("report", &report)
      .def("adopt", &adopt, py::arg("report"))
      .def("changes", &Board::changes, py::arg("rank"))
      .def("lose", &Board::lose, py::arg("rank"), py::call_guard<py::gil_scoped_release>())
      .def_property("clock", &Board::clock, &Board::set_clock)
      .def(
          "watch",
          [](const Board& board, double seconds) {
            return board.watch(static_cast<int64_t>(seconds * 1e9));
          },
          py::arg("seconds"), py::call_guard<py::gil_scoped_release>())
      .def(
          "abort",
          [](Board& board, int rank, int stage, const std::string& kind, int microbatch,
             const std::string& cause, const std::string& message) {
            board.abort({rank, Tag{stage, microbatch, kind.at(0)}, cause.at(0), message});
          },
          py::arg("rank"), py::arg("stage") = -1, py::arg("kind") = "-", py::arg("microbatch") = -1,
          py::arg("cause") = "r", py::arg("message") = "")
      .def("failure", &failure, "None, or (rank, stage, kind, microbatch, cause, message).");
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "zbpipe's native executor";
  bind_board(m);
  zb::schedule::bind(m);
  zb::cuda::bind(m);
  bind_channels(m);
  zb::bind_relay(m);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init(&make_program), py::arg("lanes"), py::arg("instructions"));
  py::class_<PyExecutor>(m, "Executor")
      .def(py::init<std::shared_ptr<Board>, int, double, std::shared_ptr<zb::cuda::CudaDevice>>(),
           py::arg("board"), py::arg("rank"), py::arg("timeout"), py::arg("cuda") = nullptr)
      .def("add_sender",
           [](PyExecutor& e, std::shared_ptr<Sender> s) { return e.add(std::move(s)); })
      .def("add_receiver",
           [](PyExecutor& e, std::shared_ptr<Receiver> r) { return e.add(std::move(r)); })
      .def("post", &post, py::arg("instruction"), py::arg("header"), py::arg("pieces"),
           py::arg("payload"))
      .def("finished", [](const PyExecutor& e, uint32_t index) { return e.finished(index); })
      .def("times", &times, "Start and end of each instruction, ns of CLOCK_MONOTONIC.")
      .def("message", &PyExecutor::message)
      .def("stream", &PyExecutor::stream, py::arg("lane"))
      .def("stop", &PyExecutor::stop);
  m.def("run", &run, py::arg("board"), py::arg("rank"), py::arg("jobs"), py::arg("grace_ns"));
}
