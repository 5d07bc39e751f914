// What the native module offers of GPUs.
#pragma once

#include <nanobind/nanobind.h>

void bind_cuda(nanobind::module_& m);
