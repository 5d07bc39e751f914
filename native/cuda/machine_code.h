// The machine code of the kernels, if the build has it: compiled by nvcc, for all architectures in one file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace qtensor {
namespace cuda {

struct MachineCode {
  const uint8_t* data;  // null if this build has none
  size_t bytes;
  int oldest_driver;          // oldest driver that can load it, numbered 1000 * major + 10 * minor
  std::string architectures;  // those included, such as "80 86 89"; for later ones, the driver compiles the kernels
};
MachineCode machine_code();

}  // namespace cuda
}  // namespace qtensor
