// Formats in blocks of 32, one block of four rows at a time, with any number of blocks and rows. For AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "integer_kernels.h"
#include "kernel_table.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/unpacked_blocks.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

inline __m256i nibbles_of_16(const uint8_t* qs) {
  const __m128i raw = _mm_loadu_si128((const __m128i*)qs);
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(raw, 4), raw), _mm256_set1_epi8(15));
}
// The fifth bits of 32 values, 16 where they are set.
inline __m256i fifth_bits(const uint8_t* qh) {
  uint32_t bits;
  __builtin_memcpy(&bits, qh, 4);
  const __m256i spread =
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), spread), each);
  return _mm256_and_si256(_mm256_cmpeq_epi8(bytes, each), _mm256_set1_epi8(16));
}
inline __m256i levels_of(const int8_t (&table)[16], __m256i nibbles) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), nibbles);
}

// A format: its values, the position of its min, and the scales of four blocks. If `largest` is 0, values are signed
// bytes. Otherwise they are unsigned bytes up to `largest`, and `offset` must be subtracted.
template <class Block>
struct SubBlock;

template <class Block, int LARGEST, int OFFSET = 0, int64_t MIN_AT = 0>
struct HalfInFront {
  static constexpr int64_t bytes = sizeof(Block), min_at = MIN_AT;
  static constexpr int largest = LARGEST, offset = OFFSET;
  static constexpr bool has_min = MIN_AT > 0;
  static __m128 scales(const uint8_t* const* places) { return load_halves(places); }
};
template <>
struct SubBlock<BlockQ8_0> : HalfInFront<BlockQ8_0, 0> {
  static __m256i values(const uint8_t* block) { return _mm256_loadu_si256((const __m256i*)(block + 2)); }
};
template <>
struct SubBlock<BlockQ4_0> : HalfInFront<BlockQ4_0, 15, 8> {
  static __m256i values(const uint8_t* block) { return nibbles_of_16(block + 2); }
};
template <>
struct SubBlock<BlockQ4_1> : HalfInFront<BlockQ4_1, 15, 0, 2> {
  static __m256i values(const uint8_t* block) { return nibbles_of_16(block + 4); }
};
template <>
struct SubBlock<BlockQ5_0> : HalfInFront<BlockQ5_0, 31, 16> {
  static __m256i values(const uint8_t* block) {
    return _mm256_or_si256(nibbles_of_16(block + 6), fifth_bits(block + 2));
  }
};
template <>
struct SubBlock<BlockQ5_1> : HalfInFront<BlockQ5_1, 31, 0, 2> {
  static __m256i values(const uint8_t* block) {
    return _mm256_or_si256(nibbles_of_16(block + 8), fifth_bits(block + 4));
  }
};
template <>
struct SubBlock<BlockIQ4_NL> : HalfInFront<BlockIQ4_NL, 0> {
  static __m256i values(const uint8_t* block) { return levels_of(kLevelsIQ4, nibbles_of_16(block + 2)); }
};
template <>
struct SubBlock<BlockMXFP4> : HalfInFront<BlockMXFP4, 0> {
  static __m256i values(const uint8_t* block) { return levels_of(kLevelsMXFP4, nibbles_of_16(block + 1)); }
  static __m128 scales(const uint8_t* const* places) {
    return _mm_setr_ps(power_of_two(*places[0]), power_of_two(*places[1]), power_of_two(*places[2]),
                       power_of_two(*places[3]));
  }
};

// The products of a block with 32 activations, as partial sums in lanes.
template <class Sub>
QTENSOR_INLINE __m256i block_dot(const uint8_t* block, __m256i x) {
  const __m256i q = Sub::values(block);
  return Sub::largest == 0 ? dot_u8_s8(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q)) : dot_u8_s8(q, x);
}

template <class Block, int ROWS>
inline void sub_block_rows(const MatmulTask& t, int64_t row, int64_t batch_row) {
  using Sub = SubBlock<Block>;
  const BlockQ8x32* x = t.blocks_32 + batch_row * t.blocks_per_row;
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
        dot[r] = block_dot<Sub>(place[r], xq);
      }
      __m128i sum = reduce_four(dot[0], dot[1], dot[2], dot[3]);
      if (Sub::offset) sum = _mm_sub_epi32(sum, _mm_set1_epi32(Sub::offset * x[b].sums[j]));
      f = _mm_fmadd_ps(_mm_cvtepi32_ps(sum), _mm_mul_ps(Sub::scales(place), _mm_set1_ps(x[b].d[j])), f);
      if (Sub::has_min)
        f = _mm_fmadd_ps(_mm_set1_ps(float(x[b].sums[j]) * x[b].d[j]), load_halves(place, Sub::min_at), f);
    }
    acc = _mm_add_ps(acc, f);
  }
  store_rows(t.y + batch_row * t.y_stride + row, acc, ROWS);
}

template <class Block>
inline void matmul_sub_blocks(const MatmulTask& t) {
  int64_t row = t.row_begin;
  for (; row + 4 <= t.row_end; row += 4)
    for (int64_t j = 0; j < t.m; j++) sub_block_rows<Block, 4>(t, row, j);
  for (; row < t.row_end; row++)
    for (int64_t j = 0; j < t.m; j++) sub_block_rows<Block, 1>(t, row, j);
}

}  // namespace
}  // namespace qtensor
