/// The binder: zbpipe._native. Pointers travel as integers; no torch header is needed.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>

#include "executor.hpp"

namespace py = pybind11;
using zb::Board, zb::Executor, zb::Failure, zb::File, zb::Instruction, zb::Program, zb::Receiver,
    zb::Sender, zb::Tag, zb::Work;

namespace {

/// The one Python thread state of a lane's thread, while it does not hold the GIL.
thread_local PyThreadState* lane_state = nullptr;

void lane_hook(bool starting) {
  if (starting) {
    PyGILState_Ensure();
    lane_state = PyEval_SaveThread();
  } else if (Py_IsInitialized()) {
    PyEval_RestoreThread(lane_state);
    PyGILState_Release(PyGILState_UNLOCKED);
    lane_state = nullptr;
  }
}

/// Holds the GIL on a lane's thread.
struct LaneGil {
  LaneGil() { PyEval_RestoreThread(lane_state); }
  ~LaneGil() { lane_state = PyEval_SaveThread(); }
};

/// A Python callable that may be dropped by a thread without the GIL.
std::shared_ptr<py::object> hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            if (!Py_IsInitialized()) return;
            py::gil_scoped_acquire gil;
            delete held;
          }};
}

/// A message's payload in its slot; keeps the memory mapped.
struct Slot {
  std::shared_ptr<zb::Mapping> mapping;
  char* data;
  size_t bytes;
};

using InstructionTuple = std::tuple<uint32_t, int, int, int, uint64_t, int, std::string, int,
                                    std::vector<uint32_t>, bool>;

std::shared_ptr<Program> make_program(uint32_t lanes, const std::vector<InstructionTuple>& rows) {
  std::vector<Instruction> list;
  list.reserve(rows.size());
  for (const auto& [lane, work, channel, slot, amount, stage, kind, microbatch, waits, signals] :
       rows) {
    ZB_CHECK(work >= 0 && work <= static_cast<int>(Work::kReceive), "unknown kind of work");
    ZB_CHECK(kind.size() == 1, "an action's kind is one letter");
    list.push_back({lane, static_cast<Work>(work), channel, slot, amount,
                    Tag{stage, microbatch, kind[0]}, waits, signals});
  }
  return std::make_shared<Program>(lanes, std::move(list));
}

struct Job {
  Executor* executor;
  std::shared_ptr<Program> program;
  py::object callback;
};

void start(Job& job) {
  zb::Callback callback;
  if (!job.callback.is_none()) {
    auto held = hold(job.callback);
    callback = [held](uint32_t index) {
      LaneGil gil;
      try {
        return (*held)(index).cast<bool>();
      } catch (py::error_already_set& error) {
        // As a plain exception, since the interpreter's must die while the GIL is held.
        throw std::runtime_error(error.what());
      }
    };
  } else {
    callback = [](uint32_t) -> bool { throw std::runtime_error("this run has no callback"); };
  }
  job.executor->start(job.program, std::move(callback));
}

bool all_joined(const std::vector<Job>& jobs, int64_t ns) {
  py::gil_scoped_release release;
  bool all = true;
  for (const Job& job : jobs) all = job.executor->join(ns) && all;
  return all;
}

/// Runs each executor's program at once and returns when all are over; true when none was aborted.
/// Handles signals meanwhile. After an abort, waits `grace` ns for callbacks to return, no longer.
bool run(Board& board, int rank,
         const std::vector<std::tuple<Executor*, std::shared_ptr<Program>, py::object>>& list,
         int64_t grace) {
  std::vector<Job> jobs;
  for (const auto& [executor, program, callback] : list) {
    jobs.push_back({executor, program, callback});
    start(jobs.back());
  }
  int64_t deadline = 0;
  bool interrupted = false;
  while (!all_joined(jobs, zb::kSliceNs)) {
    if (!interrupted && PyErr_CheckSignals() != 0) {
      interrupted = true;
      board.abort({rank, Tag{}, 'i', "interrupted in step()"});
    }
    if (!board.aborted()) continue;
    if (deadline == 0) deadline = zb::now_ns() + grace;
    if (zb::now_ns() > deadline) break;
  }
  if (interrupted) throw py::error_already_set();
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

void post(Executor& executor, uint32_t instruction, const py::bytes& header,
          const std::vector<std::tuple<uintptr_t, size_t, size_t>>& pieces, size_t payload) {
  zb::Message message{header, {}, payload};
  message.pieces.reserve(pieces.size());
  for (const auto& [data, bytes, offset] : pieces) {
    ZB_CHECK(offset + bytes <= payload, "a piece lies outside its message");
    message.pieces.push_back({reinterpret_cast<const void*>(data), bytes, offset});
  }
  executor.post(instruction, std::move(message));
}

std::vector<std::pair<int64_t, int64_t>> times(const Executor& executor) {
  std::vector<std::pair<int64_t, int64_t>> out;
  out.reserve(executor.times().size());
  for (const zb::Times& t : executor.times()) out.emplace_back(t.start, t.end);
  return out;
}

void bind_channels(py::module_& m) {
  py::class_<Sender, std::shared_ptr<Sender>>(m, "Sender")
      .def(py::init<int>(), py::arg("slots"))
      .def_property_readonly("fd", &Sender::fd)
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

void bind_board(py::module_& m) {
  py::class_<Board, std::shared_ptr<Board>>(m, "Board")
      .def_static("create", &Board::create, py::arg("ranks"))
      .def_static("open", &Board::open, py::arg("pid"), py::arg("fd"), py::arg("ranks"))
      .def_property_readonly("fd", &Board::fd)
      .def("steps", &Board::steps)
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
  bind_channels(m);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init(&make_program), py::arg("lanes"), py::arg("instructions"));
  py::class_<Executor>(m, "Executor")
      .def(py::init([](std::shared_ptr<Board> board, int rank, double timeout) {
             return std::make_unique<Executor>(std::move(board), rank,
                                               static_cast<int64_t>(timeout * 1e9), lane_hook);
           }),
           py::arg("board"), py::arg("rank"), py::arg("timeout"))
      .def("add_sender", [](Executor& e, std::shared_ptr<Sender> s) { return e.add(std::move(s)); })
      .def("add_receiver",
           [](Executor& e, std::shared_ptr<Receiver> r) { return e.add(std::move(r)); })
      .def("post", &post, py::arg("instruction"), py::arg("header"), py::arg("pieces"),
           py::arg("payload"))
      .def("finished", &Executor::finished)
      .def("times", &times, "Start and end of each instruction, ns of CLOCK_MONOTONIC.")
      .def("message",
           [](const Executor& e, int channel, int slot) {
             const Receiver& r = e.receiver(channel);
             return py::make_tuple(py::bytes(r.header(slot)),
                                   Slot{r.mapping(slot), r.payload(slot), r.payload_bytes(slot)});
           })
      .def("stop", &Executor::stop, py::call_guard<py::gil_scoped_release>());
  m.def("run", &run, py::arg("board"), py::arg("rank"), py::arg("jobs"), py::arg("grace_ns"));
}
