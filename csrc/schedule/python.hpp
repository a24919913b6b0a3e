/// The scheduler's part of the binder.
#pragma once

#include <pybind11/pybind11.h>

namespace zb::schedule {

void bind(pybind11::module_& m);

}  // namespace zb::schedule
