// The kernels' machine code, if this build has it: made by nvcc, for all architectures in one file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace qtensor {
namespace cuda {

struct MachineCode {
  const uint8_t* data;  // null: this build has none
  size_t bytes;
  int oldest_driver;          // that can load it, as drivers number themselves: 1000 * major + 10 * minor
  std::string architectures;  // "80 86 89": those it holds; later ones take what is left to the driver to compile
};
MachineCode machine_code();

}  // namespace cuda
}  // namespace qtensor
