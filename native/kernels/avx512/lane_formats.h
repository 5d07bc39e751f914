// K-quants with sixteen rows of the weight in the lanes, for row_lanes.h: unpacking headers and values of a block, and
// packing a batch row for them.
//
// A dword of a row is expanded to two adjacent lanes, for two groups of values that have one scale each: A and B, the
// lower and the upper nibbles of the same bytes. In Q4_K and Q5_K, these are two consecutive sub-blocks of 32, and in
// Q6_K two groups of 16, 64 values apart. So one shuffle of the loaded bytes produces both.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/avx512/transpose.h"
#include "kernels/portable/always_inline.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

// Sixteen rows of one block. A vector of values holds [row][A, B][4 bytes] of eight rows: 0, 1, 4, 5, 8, 9, 12 and 13,
// or the others. vpackssdw of two sums restores the order of the rows.
struct alignas(64) LaneRows {
  uint8_t q[64][64];
  int16_t scale[8][16][2], min[4][16][2];  // [pair of groups][row][A, B]
  float d[16], dmin[16];
};

// One block of a batch row, with values as [pair][four of a group][A, B][4]. `largest` is the largest sum of magnitudes
// in a group, among up to sixteen batch rows that were packed together. For weights with mins, the magnitude of the
// group's sum is added.
struct alignas(64) LaneBatchSums {
  int8_t q[256];
  int16_t sums32[8];
  float d;
  int32_t largest;
};
struct alignas(64) LaneBatchOffsets {
  int8_t q[256];
  int32_t start[8][2];  // -32 * (sum of a group): [pair][A, B]
  float d;
  int32_t largest;
};
static_assert(sizeof(LaneBatchSums) == 320 && sizeof(LaneBatchOffsets) == 384);

// Sixteen bytes of rows 0, 4, 8 and 12; `first` is their address in row 0.
QTENSOR_INLINE __m512i every_fourth_row(const uint8_t* first, int64_t row_bytes) {
  const auto at = [&](int lane) { return _mm_loadu_si128((const __m128i*)(first + 4 * lane * row_bytes)); };
  __m512i all = _mm512_zextsi128_si512(at(0));
  all = _mm512_mask_broadcast_i32x4(all, 0x00f0, at(1));
  all = _mm512_mask_broadcast_i32x4(all, 0x0f00, at(2));
  return _mm512_mask_broadcast_i32x4(all, 0xf000, at(3));
}
template <int I>
QTENSOR_INLINE __m512i twice(__m512i a, __m512i b) {  // dword I of each lane of a, two times, then of b
  return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), I * 0x55));
}
// Shift counts for A and for B.
QTENSOR_INLINE __m512i bits_of_both(int a, int b) {
  return _mm512_set1_epi64((long long)(uint32_t(a) | uint64_t(uint32_t(b)) << 32));
}
QTENSOR_INLINE __m512i nibbles_of_both(__m512i raw) {
  return _mm512_and_si512(_mm512_srlv_epi32(raw, bits_of_both(0, 4)), _mm512_set1_epi8(15));
}
// Inserts bits `mask` of each byte from `high`, whose dwords are rotated by `turn`.
QTENSOR_INLINE __m512i with_high_bits(__m512i nibbles, __m512i high, __m512i turn, char mask) {
  return _mm512_ternarylogic_epi32(nibbles, _mm512_rolv_epi32(high, turn), _mm512_set1_epi8(mask), 0xf8);
}

// A block is processed in chunks of sixteen bytes of each row.
constexpr int kLaneChunks = 8;

// A kind of formats: the type of a packed batch row, the number of pairs of groups in a block, and the cache lines of a
// block, without those that it shares with the next block. pack() returns magnitudes, whose maximum becomes `largest`.
struct LanesWithMins {
  using Kind = LanesWithMins;
  using BatchRow = LaneBatchSums;
  static constexpr bool has_min = true;
  static constexpr int pairs = 4, lines = 3;
  static bool fits(int32_t largest, int most) { return largest * most <= 2 * 32767; }

  static QTENSOR_INLINE __m512i pack(const BlockQ8K& x, BatchRow& to) {
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const __m512i zero = _mm512_setzero_si512(), ones = _mm512_set1_epi8(1);
    __m512i size[4];
    for (int p = 0; p < 4; p++) {
      const __m512i v = _mm512_load_si512(x.q + 64 * p);
      _mm512_store_si512(to.q + 64 * p, _mm512_permutexvar_epi32(order, v));
      size[p] = _mm512_dpbusd_epi32(zero, _mm512_abs_epi8(v), ones);
    }
    __builtin_memcpy(to.sums32, x.sums32, sizeof to.sums32);
    to.d = x.d;
    transpose_fours(size);  // [a quarter of A, of A, of B, of B][pair]
    __m512i all = _mm512_add_epi32(_mm512_add_epi32(size[0], size[1]), _mm512_add_epi32(size[2], size[3]));
    all = _mm512_add_epi32(all, _mm512_shuffle_i32x4(all, all, 0xb1));
    const __m512i sums = _mm512_castsi256_si512(_mm256_cvtepi16_epi32(_mm_load_si128((const __m128i*)x.sums32)));
    const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7);
    return _mm512_add_epi32(all, _mm512_abs_epi32(_mm512_permutexvar_epi32(places, sums)));
  }

  static QTENSOR_INLINE void header(const uint8_t* at, int64_t row_bytes, LaneRows& to) {
    __m512i raw[4], scales[4], mins[4];
    const __m512i zero = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      raw[r] = every_fourth_row(at + r * row_bytes, row_bytes);
      const __m512i both = scale_and_min_bytes(raw[r]);
      scales[r] = _mm512_unpacklo_epi8(both, zero);
      mins[r] = _mm512_unpackhi_epi8(both, zero);
    }
    transpose_fours(scales);
    transpose_fours(mins);
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
      _mm512_store_si512(to.scale[p], scales[p]);
      _mm512_store_si512(to.min[p], mins[p]);
    }
    const __m512i d =
        _mm512_unpacklo_epi64(_mm512_unpacklo_epi32(raw[0], raw[1]), _mm512_unpacklo_epi32(raw[2], raw[3]));
    _mm512_store_ps(to.d, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(d)));
    _mm512_store_ps(to.dmin, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(d, 16))));
  }
};

struct LanesQ4_K : LanesWithMins {
  static constexpr int64_t bytes = sizeof(BlockQ4_K);
  static constexpr int largest = 15;
  struct Chunk {
    __m512i raw[4];
    QTENSOR_INLINE Chunk(const uint8_t* at, int64_t row_bytes, int chunk) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++)
        raw[r] = every_fourth_row(at + r * row_bytes + offsetof(BlockQ4_K, qs) + 16 * chunk, row_bytes);
    }
    template <int I>
    QTENSOR_INLINE void values(__m512i (&to)[2]) const {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) to[h] = nibbles_of_both(twice<I>(raw[2 * h], raw[2 * h + 1]));
    }
  };
};

struct LanesQ5_K : LanesWithMins {
  static constexpr int64_t bytes = sizeof(BlockQ5_K);
  static constexpr int largest = 31;
  struct Chunk {
    __m512i raw[4], high[4], turn;
    QTENSOR_INLINE Chunk(const uint8_t* at, int64_t row_bytes, int chunk) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) {
        const uint8_t* const row = at + r * row_bytes;
        raw[r] = every_fourth_row(row + offsetof(BlockQ5_K, qs) + 16 * chunk, row_bytes);
        high[r] = every_fourth_row(row + offsetof(BlockQ5_K, qh) + 16 * (chunk & 1), row_bytes);
      }
      turn = _mm512_sub_epi32(bits_of_both(4, 3), _mm512_set1_epi32(chunk & ~1));  // the sub-block's bit moves to bit 4
    }
    template <int I>
    QTENSOR_INLINE void values(__m512i (&to)[2]) const {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++)
        to[h] = with_high_bits(nibbles_of_both(twice<I>(raw[2 * h], raw[2 * h + 1])),
                               twice<I>(high[2 * h], high[2 * h + 1]), turn, 16);
    }
  };
};

struct LanesQ6_K {
  using Kind = LanesQ6_K;
  using BatchRow = LaneBatchOffsets;
  static constexpr bool has_min = false;
  static constexpr int64_t bytes = sizeof(BlockQ6_K);
  static constexpr int pairs = 8, lines = 4;
  static constexpr int largest = 32;  // the offset is 32
  static bool fits(int32_t largest, int most) { return largest * most <= 32767; }

  static QTENSOR_INLINE __m512i pack(const BlockQ8K& x, BatchRow& to) {
    const __m512i zero = _mm512_setzero_si512(), ones = _mm512_set1_epi8(1);
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512i most = zero;
    for (int i = 0; i < 4; i++) {  // two pairs
      const int8_t* const from = x.q + 128 * (i / 2);
      const __m512i v = _mm512_permutex2var_epi32(
          _mm512_load_si512(from), _mm512_add_epi32(low, _mm512_set1_epi32(8 * (i % 2))), _mm512_load_si512(from + 64));
      _mm512_store_si512(to.q + 64 * i, v);
      const auto of_groups = [](__m512i fours) {  // A, B of one pair, two times, then of the other
        fours = _mm512_add_epi32(fours, _mm512_shuffle_epi32(fours, _MM_PERM_BADC));
        return _mm512_add_epi32(fours, _mm512_shuffle_i32x4(fours, fours, 0xb1));
      };
      const __m512i sums = _mm512_slli_epi32(of_groups(_mm512_dpbusd_epi32(zero, ones, v)), 5);
      const __m512i start = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4), sums);
      _mm_store_si128((__m128i*)to.start[2 * i], _mm512_castsi512_si128(_mm512_sub_epi32(zero, start)));
      most = _mm512_max_epi32(most, of_groups(_mm512_dpbusd_epi32(zero, _mm512_abs_epi8(v), ones)));
    }
    to.d = x.d;
    return most;
  }

  static QTENSOR_INLINE void header(const uint8_t* at, int64_t row_bytes, LaneRows& to) {
    __m512i low[4], high[4];
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      const __m512i raw = every_fourth_row(at + r * row_bytes + offsetof(BlockQ6_K, scales), row_bytes);
      const __m512i b = _mm512_shuffle_epi8(raw, order);
      low[r] = _mm512_srai_epi16(_mm512_unpacklo_epi8(b, b), 8);
      high[r] = _mm512_srai_epi16(_mm512_unpackhi_epi8(b, b), 8);
    }
    transpose_fours(low);
    transpose_fours(high);
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
      _mm512_store_si512(to.scale[p], low[p]);
      _mm512_store_si512(to.scale[4 + p], high[p]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 16; r += 4) {
      const uint8_t* place[4];
      for (int i = 0; i < 4; i++) place[i] = at + (r + i) * row_bytes;
      _mm_store_ps(to.d + r, load_halves(place, offsetof(BlockQ6_K, d)));
    }
  }
  struct Chunk {
    __m512i raw[4], high[4], turn;
    QTENSOR_INLINE Chunk(const uint8_t* at, int64_t row_bytes, int chunk) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) {
        const uint8_t* const row = at + r * row_bytes;
        raw[r] = every_fourth_row(row + 16 * chunk, row_bytes);
        high[r] = every_fourth_row(row + offsetof(BlockQ6_K, qh) + 32 * (chunk / 4) + 16 * (chunk & 1), row_bytes);
      }
      turn = chunk & 2 ? bits_of_both(2, 30) : bits_of_both(4, 0);
    }
    template <int I>
    QTENSOR_INLINE void values(__m512i (&to)[2]) const {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++)
        to[h] = with_high_bits(nibbles_of_both(twice<I>(raw[2 * h], raw[2 * h + 1])),
                               twice<I>(high[2 * h], high[2 * h + 1]), turn, 48);
    }
  };
};

}  // namespace
}  // namespace qtensor
