// Products of the formats that are taken apart first, in plain C++.
#pragma once

#include <cstdint>

#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/unpacked_blocks.h"
#include "vec16.h"

namespace qtensor {
namespace {

template <class F>
inline void matmul_unpacked_256(const MatmulTask& t) {
  for_each_output(t, [&](int64_t row, int64_t b, const BlockQ8K& x) {
    Unpacked256 w;
    unpack(block_at<typename F::Block>(t, row, b), w);
    int32_t products = 0, mins = 0;
    for (int j = 0; j < 16; j++) {
      int32_t sum = 0;
      for (int l = 0; l < 16; l++) sum += w.q[16 * j + l] * x.q[16 * j + l];
      products += sum * w.scales[j];
      if (F::kHasMins) mins += w.mins[j] * x.sums16[j];
    }
    const float f = float(products) * (half_to_float(w.d) * F::kStep);
    return F::kHasMins ? __builtin_fmaf(-float(mins), half_to_float(w.dmin), f) : f;
  });
}

template <class F>
inline void matmul_unpacked_32(const MatmulTask& t) {
  for_each_output(t, [&](int64_t row, int64_t b, const BlockQ8K& x) {
    float f = 0.0f;
    for (int64_t j = 0; j < sub_blocks(t, b); j++) {
      Unpacked32 w;
      unpack(block_at<typename F::Block>(t, row, 8 * b + j), w, half_to_float);
      f = __builtin_fmaf(float(sub_dot(w.q, x.q + 32 * j)), w.d, f);
      if (F::kHasMins) f = __builtin_fmaf(float(x.sums32[j]), w.m, f);
    }
    return f;
  });
}

MatmulKernel unpacked_kernel(Format format) {
  return with_unpacked_format(
      format,
      []<class F>(F) -> MatmulKernel {
        if constexpr (F::kIs256)
          return matmul_unpacked_256<F>;
        else
          return matmul_unpacked_32<F>;
      },
      [] { return MatmulKernel(nullptr); });
}

}  // namespace
}  // namespace qtensor
