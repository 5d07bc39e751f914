// Matrix products of the AVX2 and AVX-512 kernels: the loops over weight rows, batch rows and blocks, and the float
// step per block, around the dot products of each instruction set.
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

// ---- formats with one scale per 32 values ----

inline __m256i nibbles_of_16(const uint8_t* qs) {
  const __m128i raw = _mm_loadu_si128((const __m128i*)qs);
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(raw, 4), raw), _mm256_set1_epi8(15));
}

// What most of these formats have: a half in front.
struct HalfInFront {
  static __m128 scales(const uint8_t* const* places) { return load_halves(places); }
};
inline __m256i dot_signed(__m256i q, __m256i x) { return dot_u8_s8(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q)); }

struct SubBlockQ8_0 : HalfInFront {
  static constexpr int64_t bytes = sizeof(BlockQ8_0), min_at = 0;
  static constexpr int offset = 0;
  static constexpr bool has_min = false;
  static __m256i dot(const uint8_t* block, __m256i x) {
    return dot_signed(_mm256_loadu_si256((const __m256i*)(block + 2)), x);
  }
};
struct SubBlockQ4_0 : HalfInFront {
  static constexpr int64_t bytes = sizeof(BlockQ4_0), min_at = 0;
  static constexpr int offset = 8;
  static constexpr bool has_min = false;
  static __m256i dot(const uint8_t* block, __m256i x) { return dot_u8_s8(nibbles_of_16(block + 2), x); }
};
struct SubBlockQ4_1 : HalfInFront {
  static constexpr int64_t bytes = sizeof(BlockQ4_1), min_at = 2;
  static constexpr int offset = 0;
  static constexpr bool has_min = true;
  static __m256i dot(const uint8_t* block, __m256i x) { return dot_u8_s8(nibbles_of_16(block + 4), x); }
};

template <class Sub, int ROWS>
inline void sub_block_rows(const MatmulTask& t, int64_t row, int64_t batch_row) {
  const BlockQ8K* x = t.blocks + batch_row * t.blocks_per_row;
  const int64_t total = t.k / kSubBlock;
  __m128 acc = _mm_setzero_ps();
  for (int64_t b = 0; b < t.blocks_per_row; b++) {
    __m128 f = _mm_setzero_ps();
    const int64_t count = total - 8 * b < 8 ? total - 8 * b : 8;
    for (int64_t j = 0; j < count; j++) {
      const __m256i xq = _mm256_load_si256((const __m256i*)(x[b].q + 32 * j));
      const uint8_t* place[4];
      __m256i dot[4];
      for (int r = 0; r < 4; r++) {
        place[r] = t.weight + (row + (r < ROWS ? r : 0)) * t.row_bytes + (8 * b + j) * Sub::bytes;
        dot[r] = Sub::dot(place[r], xq);
      }
      __m128i sum = reduce_four(dot[0], dot[1], dot[2], dot[3]);
      if (Sub::offset) sum = _mm_sub_epi32(sum, _mm_set1_epi32(Sub::offset * x[b].sums32[j]));
      f = _mm_fmadd_ps(_mm_cvtepi32_ps(sum), Sub::scales(place), f);
      if (Sub::has_min) f = _mm_fmadd_ps(_mm_set1_ps(float(x[b].sums32[j])), load_halves(place, Sub::min_at), f);
    }
    acc = _mm_fmadd_ps(f, _mm_set1_ps(x[b].d), acc);
  }
  store_rows(t.y + batch_row * t.y_stride + row, acc, ROWS);
}

template <class Sub>
inline void matmul_sub_blocks(const MatmulTask& t) {
  int64_t row = t.row_begin;
  for (; row + 4 <= t.row_end; row += 4)
    for (int64_t j = 0; j < t.m; j++) sub_block_rows<Sub, 4>(t, row, j);
  for (; row < t.row_end; row++)
    for (int64_t j = 0; j < t.m; j++) sub_block_rows<Sub, 1>(t, row, j);
}
void matmul_q8_0(const MatmulTask& t) { matmul_sub_blocks<SubBlockQ8_0>(t); }
void matmul_q4_0(const MatmulTask& t) { matmul_sub_blocks<SubBlockQ4_0>(t); }
void matmul_q4_1(const MatmulTask& t) { matmul_sub_blocks<SubBlockQ4_1>(t); }

// ---- K-quants: k_quant_four_rows of the instruction set, and the rows that are left ----

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
  const int64_t groups = (t.row_end - t.row_begin) / 4;
  const bool quarters = reads_quarters();
  for (int64_t group = 0; group < groups; group++) {
    const FourRows rows = four_rows(t, group, quarters);
    int64_t j = 0;
    for (; j + kBatchGroup <= t.m; j += kBatchGroup) k_quant_four_rows<Quant, kBatchGroup>(t, rows, j);
    if (j + 3 == t.m) {  // read once for all three
      k_quant_four_rows<Quant, 3>(t, rows, j);
      continue;
    }
    for (; j + 2 <= t.m; j += 2) k_quant_four_rows<Quant, 2>(t, rows, j);
    for (; j < t.m; j++) k_quant_four_rows<Quant, 1>(t, rows, j);
  }
  for (int64_t row = t.row_begin + 4 * groups; row < t.row_end; row++)
    for (int64_t j = 0; j < t.m; j++) k_quant_row<Quant>(t, row, j);
}

}  // namespace
}  // namespace qtensor
