// Four rows of one 256-block, unpacked for broadcasting to batch rows: see kernels/portable/batch_lanes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/avx512/four_headers.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

constexpr int kTileRows = 4;
struct alignas(64) RowBlocks {
  uint8_t q[kTileRows][256];  // sub-blocks at their Rows::place
  // [number / 4][row][number % 4] of each sub-block, or group of 16: the upper word zero, and both words alike.
  int32_t scale[4][kTileRows][4], scale_twice[4][kTileRows][4];
  int16_t scale_pairs[kTileRows][8], min_pairs[kTileRows][8];
  float d[kTileRows], dmin[kTileRows];
};

// Words of eight sub-blocks or groups, from number / 4 on.
inline void store_scales(__m512i words, RowBlocks& to, int first) {
  const __m512i zero = _mm512_setzero_si512();
  _mm512_store_si512(to.scale[first], _mm512_unpacklo_epi16(words, zero));
  _mm512_store_si512(to.scale[first + 1], _mm512_unpackhi_epi16(words, zero));
  _mm512_store_si512(to.scale_twice[first], _mm512_unpacklo_epi16(words, words));
  _mm512_store_si512(to.scale_twice[first + 1], _mm512_unpackhi_epi16(words, words));
}

template <class Quant>
inline void store_values(const uint8_t* block, uint8_t* to) {
  __m512i q[4];
  if constexpr (Quant::can_split)
    Quant::split_values(block, q);
  else
    Quant::values(block, q);
  for (int c = 0; c < 4; c++) _mm512_store_si512(to + 64 * c, q[c]);
}

template <class Quant, int LARGEST>
struct RowsWithMins {
  static constexpr bool has_min = true;
  using Unpacked = RowBlocks;
  static constexpr int group = 32, largest = LARGEST;
  static constexpr int64_t bytes = Quant::bytes;
  // Which sub-block stands at a place of q: of split values 0, 2, 1, 3, ...
  static int at(int place) { return Quant::can_split ? (place & 4) | (place & 1) << 1 | (place >> 1 & 1) : place; }
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks& to) {
    const FourHeaders h = headers_with_mins(place);
    store_scales(h.scales[0], to, 0);
    _mm512_store_si512(to.scale_pairs, h.scales[0]);
    _mm512_store_si512(to.min_pairs, h.mins);
    _mm_store_ps(to.d, h.d);
    _mm_store_ps(to.dmin, h.dmin);
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r++) store_values<Quant>(place[r], to.q[r]);
  }
};

template <class Quant, int LARGEST>
struct RowsWithOffset {
  static constexpr bool has_min = false;
  using Unpacked = RowBlocks;
  static constexpr int group = 16, largest = LARGEST;
  static constexpr int64_t bytes = Quant::bytes;
  static int at(int place) { return place; }
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks& to) {
    const FourHeaders h = headers_with_offset(place);
    store_scales(h.scales[0], to, 0);
    store_scales(h.scales[1], to, 2);
    _mm_store_ps(to.d, h.d);
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r++) store_values<Quant>(place[r], to.q[r]);
  }
};

}  // namespace
}  // namespace qtensor
