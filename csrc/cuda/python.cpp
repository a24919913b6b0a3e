#include "cuda/python.hpp"

#include <pybind11/stl.h>
#include <string.h>

#include <memory>
#include <string>

#include "cuda/cuda_device.hpp"
#include "cuda/ipc_link.hpp"
#include "cuda/nccl_link.hpp"
#include "cuda/staged_link.hpp"

namespace py = pybind11;

namespace zb::cuda {
namespace {

/// A received payload in device memory, for torch.as_tensor or as plain numbers.
struct DeviceSlot {
  uintptr_t data;
  size_t bytes;

  /// The CUDA array interface, version 3: raw bytes, ordered by the executor's events alone.
  py::dict interface() const {
    py::dict out;
    out["shape"] = py::make_tuple(bytes);
    out["typestr"] = "|u1";
    out["data"] = py::make_tuple(data, false);
    out["version"] = 3;
    out["stream"] = py::none();
    return out;
  }
};

// cudaDeviceAttr of driver_types.h, the same in CUDA 12 and 13.
constexpr int kAsyncEngineCount = 40, kMultiProcessorCount = 16;
constexpr int kMajor = 75, kMinor = 76;

int attribute(const Runtime& runtime, int attribute, int device) {
  int value = 0;
  ZB_CUDA(runtime, cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

py::dict describe(const Runtime& runtime, int device, int count) {
  char bus[32] = {};
  ZB_CUDA(runtime, cudaDeviceGetPCIBusId(bus, sizeof(bus), device));
  py::dict out;
  out["bus"] = std::string(bus);
  out["capability"] =
      py::make_tuple(attribute(runtime, kMajor, device), attribute(runtime, kMinor, device));
  out["multiprocessors"] = attribute(runtime, kMultiProcessorCount, device);
  out["copy_engines"] = attribute(runtime, kAsyncEngineCount, device);
  py::list peers;
  for (int other = 0; other < count; ++other) {
    int access = 0;
    if (other != device) ZB_CUDA(runtime, cudaDeviceCanAccessPeer(&access, device, other));
    if (access != 0) peers.append(other);
  }
  out["peers"] = peers;
  return out;
}

std::shared_ptr<NcclIn> nccl_in(int device, int peer, int slots, const std::string& id,
                                bool poison) {
  NcclId raw;
  ZB_CHECK(id.size() == sizeof(raw), "a NCCL id has 128 bytes");
  memcpy(&raw, id.data(), sizeof(raw));
  return std::make_shared<NcclIn>(Runtime::load(), device, peer, slots, raw, poison);
}

/// What `zbpipe doctor` reports of NCCL. Raises RuntimeError where none can be loaded.
py::dict probe_nccl() {
  auto nccl = Nccl::load();
  py::dict out;
  out["library"] = nccl->library();
  out["version"] = nccl->version();
  return out;
}

void bind_nccl(py::module_& cuda) {
  cuda.def("probe_nccl", &probe_nccl);
  py::class_<NcclOut, OutLink, std::shared_ptr<NcclOut>>(cuda, "NcclOut")
      .def(py::init([](int device, int peer, int slots) {
             return std::make_shared<NcclOut>(Runtime::load(), device, peer, slots);
           }),
           py::arg("device"), py::arg("peer"), py::arg("slots"))
      .def_property_readonly(
          "id", [](const NcclOut& link) { return py::bytes(link.id().reserved, sizeof(NcclId)); })
      .def("advance", &NcclOut::advance, py::call_guard<py::gil_scoped_release>());
  py::class_<NcclIn, InLink, std::shared_ptr<NcclIn>>(cuda, "NcclIn")
      .def(py::init(&nccl_in), py::arg("device"), py::arg("peer"), py::arg("slots"), py::arg("id"),
           py::arg("poison") = false)
      .def("advance", &NcclIn::advance, py::call_guard<py::gil_scoped_release>());
}

std::optional<Parcel> take(Departures& departures, double seconds) {
  return departures.take(static_cast<int64_t>(seconds * 1e9));
}

std::optional<Parcel> room(Arrivals& arrivals, int slot, size_t header, size_t payload,
                           size_t carried, double seconds) {
  return arrivals.room(slot, header, payload, carried, static_cast<int64_t>(seconds * 1e9));
}

/// For Python to hold: lets go without the interpreter's lock, since to give memory back may be to
/// wait for the device, whose streams may wait for a thread that needs the lock.
template <class Held>
std::shared_ptr<Held> held(std::shared_ptr<Held> owner) {
  Held* raw = owner.get();
  return std::shared_ptr<Held>(raw, [owner = std::move(owner)](Held*) mutable {
    if (PyGILState_Check() == 0) return;
    py::gil_scoped_release release;
    owner = nullptr;
  });
}

/// `Departures` and `Arrivals` have the faces of Outlet and Inlet (transport/python.cpp).
void bind_staged(py::module_& cuda) {
  py::class_<Departures, std::shared_ptr<Departures>>(cuda, "Departures")
      .def_property_readonly("rank", &Departures::rank)
      .def("take", &take, py::arg("seconds"), py::call_guard<py::gil_scoped_release>())
      .def("done", &Departures::done, py::arg("slot"))
      .def("finish", &Departures::finish)
      .def_property_readonly("finished", &Departures::finished);
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(cuda, "Arrivals")
      .def_property_readonly("rank", &Arrivals::rank)
      .def("room", &room, py::arg("slot"), py::arg("header"), py::arg("payload"),
           py::arg("carried"), py::arg("seconds"), py::call_guard<py::gil_scoped_release>())
      .def("commit", &Arrivals::commit, py::arg("parcel"))
      .def("finish", &Arrivals::finish);
  py::class_<StagedOut, OutLink, std::shared_ptr<StagedOut>>(cuda, "StagedOut")
      .def(py::init([](std::shared_ptr<Board> board, int rank, int device, int peer, int slots,
                       size_t ahead) {
             return std::make_shared<StagedOut>(Runtime::load(), std::move(board), rank, device,
                                                peer, slots, ahead);
           }),
           py::arg("board"), py::arg("rank"), py::arg("device"), py::arg("peer"), py::arg("slots"),
           py::arg("ahead"))
      .def_property_readonly("departures",
                             [](const StagedOut& link) { return held(link.departures()); });
  py::class_<StagedIn, InLink, std::shared_ptr<StagedIn>>(cuda, "StagedIn")
      .def(py::init([](std::shared_ptr<Board> board, int rank, int device, int peer, int slots,
                       bool poison) {
             auto runtime = Runtime::load();
             OnDevice scope(*runtime, device);
             return std::make_shared<StagedIn>(runtime, std::move(board), rank, device, peer, slots,
                                               poison);
           }),
           py::arg("board"), py::arg("rank"), py::arg("device"), py::arg("peer"), py::arg("slots"),
           py::arg("poison") = false)
      .def_property_readonly("arrivals",
                             [](const StagedIn& link) { return held(link.arrivals()); });
}

/// What `zbpipe doctor` reports. Raises RuntimeError where no runtime can be loaded.
py::dict probe() {
  auto runtime = Runtime::load();
  py::dict out;
  int version = 0, driver = 0, count = 0;
  ZB_CUDA(*runtime, cudaRuntimeGetVersion(&version));
  out["library"] = runtime->library();
  out["runtime"] = version;
  // 0 where no driver is installed.
  ZB_CUDA(*runtime, cudaDriverGetVersion(&driver));
  out["driver"] = driver;
  out["stream_memory_operations"] = runtime->cuStreamWaitValue32 != nullptr;
  py::list devices;
  out["devices"] = devices;
  out["error"] = py::none();
  try {
    ZB_CUDA(*runtime, cudaGetDeviceCount(&count));
    for (int device = 0; device < count; ++device)
      devices.append(describe(*runtime, device, count));
  } catch (const std::runtime_error& error) {
    out["error"] = error.what();
  }
  return out;
}

std::shared_ptr<IpcIn> open(std::shared_ptr<Board> board, int device, int peer, int pid, int fd,
                            int slots, bool poison) {
  auto runtime = Runtime::load();
  OnDevice scope(*runtime, device);
  auto words = std::make_shared<LinkWords>(runtime, File::open(pid, fd), slots);
  return std::make_shared<IpcIn>(runtime, std::move(board), device, peer, std::move(words), poison);
}

std::shared_ptr<IpcIn> beside(IpcOut& out, std::shared_ptr<Board> board, int device, int peer,
                              bool poison) {
  out.words()->make_local();
  out.reach(device);
  return std::make_shared<IpcIn>(Runtime::load(), std::move(board), device, peer, out.words(),
                                 poison);
}

}  // namespace

py::object as_slot(char* data, size_t bytes) {
  return py::cast(DeviceSlot{reinterpret_cast<uintptr_t>(data), bytes});
}

void bind(py::module_& m) {
  py::module_ cuda = m.def_submodule("cuda", "The executor on CUDA");
  cuda.def("probe", &probe);
  py::class_<DeviceSlot>(cuda, "DeviceSlot")
      .def_readonly("data", &DeviceSlot::data)
      .def_readonly("nbytes", &DeviceSlot::bytes)
      .def_property_readonly("__cuda_array_interface__", &DeviceSlot::interface);
  py::class_<OutLink, std::shared_ptr<OutLink>>(cuda, "OutLink");
  py::class_<InLink, std::shared_ptr<InLink>>(cuda, "InLink");
  py::class_<IpcOut, OutLink, std::shared_ptr<IpcOut>>(cuda, "IpcOut")
      .def(py::init([](std::shared_ptr<Board> board, int device, int peer, int slots) {
             return std::make_shared<IpcOut>(Runtime::load(), std::move(board), device, peer,
                                             slots);
           }),
           py::arg("board"), py::arg("device"), py::arg("peer"), py::arg("slots"))
      .def_property_readonly("fd", [](const IpcOut& link) { return link.words()->fd(); });
  py::class_<IpcIn, InLink, std::shared_ptr<IpcIn>>(cuda, "IpcIn")
      .def_static("open", &open, py::arg("board"), py::arg("device"), py::arg("peer"),
                  py::arg("pid"), py::arg("fd"), py::arg("slots"), py::arg("poison") = false)
      .def_static("beside", &beside, py::arg("out"), py::arg("board"), py::arg("device"),
                  py::arg("peer"), py::arg("poison") = false);
  bind_nccl(cuda);
  bind_staged(cuda);
  py::class_<CudaDevice, std::shared_ptr<CudaDevice>>(cuda, "Device")
      .def(py::init<std::shared_ptr<Board>, int, int>(), py::arg("board"), py::arg("rank"),
           py::arg("ordinal"))
      .def("add_out", [](CudaDevice& d, std::shared_ptr<OutLink> l) { d.add(std::move(l)); })
      .def("add_in", [](CudaDevice& d, std::shared_ptr<InLink> l) { d.add(std::move(l)); })
      .def(
          "stream",
          [](CudaDevice& d, uint32_t lane) { return reinterpret_cast<uintptr_t>(d.stream(lane)); },
          py::arg("lane"))
      .def(
          "after",
          [](CudaDevice& d, uintptr_t stream) { d.after(reinterpret_cast<Stream>(stream)); },
          py::arg("stream"));
}

}  // namespace zb::cuda
