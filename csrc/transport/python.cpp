#include "transport/python.hpp"

#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "transport/relay.hpp"

namespace py = pybind11;

namespace zb {
namespace {

int64_t as_ns(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

std::optional<Parcel> take(Outlet& outlet, double seconds) {
  py::gil_scoped_release release;
  return outlet.take(as_ns(seconds));
}

std::optional<Parcel> room(Inlet& inlet, int slot, size_t header, size_t payload, size_t carried,
                           double seconds) {
  py::gil_scoped_release release;
  return inlet.room(slot, header, payload, carried, as_ns(seconds));
}

}  // namespace

void bind_relay(py::module_& m) {
  py::class_<Parcel>(m, "Parcel")
      .def_readonly("slot", &Parcel::slot)
      .def_readonly("header", &Parcel::header)
      .def_readonly("payload", &Parcel::payload)
      .def_readonly("carried", &Parcel::carried)
      .def_readonly("nbytes", &Parcel::bytes)
      .def_property_readonly(
          "memory",
          [](const Parcel& p) {
            return py::memoryview::from_memory(p.data, static_cast<py::ssize_t>(p.bytes));
          },
          "Where the message lies. Not to be used after done or commit.");
  py::class_<Outlet, std::shared_ptr<Outlet>>(m, "Outlet")
      .def(py::init<std::shared_ptr<Board>, int, std::shared_ptr<Sender>, uint64_t>(),
           py::arg("board"), py::arg("rank"), py::arg("sender"), py::arg("first") = 0)
      .def_property_readonly("rank", &Outlet::rank)
      .def("take", &take, py::arg("seconds"))
      .def("done", &Outlet::done, py::arg("slot"))
      .def("finish", &Outlet::finish)
      .def_property_readonly("finished", &Outlet::finished);
  py::class_<Inlet, std::shared_ptr<Inlet>>(m, "Inlet")
      .def(py::init<std::shared_ptr<Board>, int, int, uint32_t>(), py::arg("board"),
           py::arg("rank"), py::arg("slots"), py::arg("first") = 0)
      .def_property_readonly("rank", &Inlet::rank)
      .def_property_readonly("fd", &Inlet::fd)
      .def("room", &room, py::arg("slot"), py::arg("header"), py::arg("payload"),
           py::arg("carried"), py::arg("seconds"))
      .def("commit", &Inlet::commit, py::arg("parcel"))
      .def("finish", &Inlet::finish);
}

}  // namespace zb
