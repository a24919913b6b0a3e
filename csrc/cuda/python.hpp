/// Binds the CUDA device and its links.
#pragma once

#include <pybind11/pybind11.h>

namespace zb::cuda {

/// A received payload in device memory, as Python sees it.
pybind11::object as_slot(char* data, size_t bytes);

void bind(pybind11::module_& m);

}  // namespace zb::cuda
