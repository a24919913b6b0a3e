/// Binds what carries messages between hosts: zbpipe._native.Outlet and Inlet.
#pragma once

#include <pybind11/pybind11.h>

namespace zb {
void bind_relay(pybind11::module_& m);
}  // namespace zb
