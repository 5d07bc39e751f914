// Products of the formats that are unpacked first, in plain C++.
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

// A row's last super-block may hold fewer than eight blocks of 32.
template <class F>
inline void matmul_unpacked_32(const MatmulTask& t) {
  const int64_t total = t.k / kSubBlock;
  for (int64_t row = t.row_begin; row < t.row_end; row++)
    for (int64_t j = 0; j < t.m; j++) {
      const BlockQ8x32* x = t.blocks_32 + j * t.blocks_per_row;
      float acc = 0.0f;
      for (int64_t b = 0; b < t.blocks_per_row; b++, x++) {
        float f = 0.0f;
        for (int64_t i = 0; i < 8 && 8 * b + i < total; i++) {
          Unpacked32 w;
          unpack(block_at<typename F::Block>(t, row, 8 * b + i), w, half_to_float);
          int32_t sum = 0;
          for (int l = 0; l < 32; l++) sum += w.q[l] * x->q[32 * i + l];
          f = __builtin_fmaf(float(sum), w.d * x->d[i], f);
          if (F::kHasMins) f = __builtin_fmaf(float(x->sums[i]) * x->d[i], w.m, f);
        }
        acc += f;
      }
      t.y[j * t.y_stride + row] = acc;
    }
}

MatmulKernel kernel_32(Format format) {
  return with_format_32(
      format, []<class F>(F) -> MatmulKernel { return matmul_unpacked_32<F>; }, [] { return MatmulKernel(nullptr); });
}
MatmulKernel unpacked_kernel(Format format) {
  return with_format_256(
      format, []<class F>(F) -> MatmulKernel { return matmul_unpacked_256<F>; }, [] { return MatmulKernel(nullptr); });
}

}  // namespace
}  // namespace qtensor
