// Instruction sets that the CPU has and the operating system allows.
#pragma once

#include <string>
#include <vector>

namespace qtensor {

struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C, and the OS saving ymm registers
  bool avx_vnni = false;     // also byte and word products of ymm registers
  bool avx512_vnni = false;  // F, BW, DQ, VL and VNNI, and the OS saving zmm and mask registers
  bool amx_int8 = false;     // also VBMI, tiles, int8 and bf16 products, and the OS saving tile data on request
  bool dotprod = false;      // Armv8.2: sdot and udot
  bool i8mm = false;         // also smmla

  std::vector<std::string> names() const;
};

CpuFeatures detect_cpu_features();

}  // namespace qtensor
