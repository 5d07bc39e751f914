// Products of K-quants by the AVX2 and AVX-512 kernels: the loops over weight rows, batch rows and blocks, and the
// float step per block, around the dot products of each instruction set.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "four_rows.h"
#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/x86/rows.h"
#include "tuning.h"

namespace qtensor {
namespace {

// Rows that do not fill a group of four; the instruction set provides k_quant_four_rows for the others.

template <class Quant>
inline void k_quant_row(const MatmulTask& t, int64_t row, int64_t batch_row) {
  const int64_t blocks = t.blocks_per_row;
  __m128 acc = _mm_setzero_ps();
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t* block = t.weight + row * t.row_bytes + b * Quant::bytes;
    const typename Quant::Unpacked w = Quant::unpack(block);
    const BlockQ8K& x = t.blocks[batch_row * blocks + b];
    const RowScales scale = Quant::row_scales(block);
    const typename Quant::Sum sum = Quant::dot(w, x);
    __m128 f = _mm_mul_ps(_mm_cvtepi32_ps(reduce_four(sum, sum, sum, sum)), scale.d);
    if (Quant::has_min) {
      const __m128i min = _mm_madd_epi16(w.min, _mm_load_si128((const __m128i*)x.sums32));
      f = _mm_fnmadd_ps(_mm_cvtepi32_ps(reduce_four(min, min, min, min)), scale.dmin, f);
    }
    acc = _mm_fmadd_ps(f, _mm_set1_ps(x.d), acc);
  }
  _mm_store_ss(t.y + batch_row * t.y_stride + row, acc);
}

template <class Quant>
inline void matmul_k_quant(const MatmulTask& t) {
  const MatmulTask left = by_four_rows<kBatchGroup>(
      t, [&]<int M>(Together<M>, FourRows rows, int64_t j) { k_quant_four_rows<Quant, M>(t, rows, j); });
  for (int64_t row = left.row_begin; row < left.row_end; row++)
    for (int64_t j = 0; j < t.m; j++) k_quant_row<Quant>(t, row, j);
}

}  // namespace
}  // namespace qtensor
