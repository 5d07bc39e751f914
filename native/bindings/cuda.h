// The part of the native module for GPUs.
#pragma once

#include <nanobind/nanobind.h>

void bind_cuda(nanobind::module_& m);
