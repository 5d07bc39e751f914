// Four rows of one 256-block, unpacked for broadcasting to batch rows: see kernels/portable/batch_lanes.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "kernels/portable/always_inline.h"
#include "kernels/x86/rows.h"
#include "products.h"
#include "vec16.h"

namespace qtensor {
namespace {

constexpr int kTileRows = 4;
struct alignas(64) RowBlocks {
  uint8_t q[kTileRows][256];
  int32_t scale[kTileRows][16];        // per sub-block or group of 16; for sums of words, in both words
  int16_t scale_pairs[kTileRows][16];  // the same, two per dword; or the mins of groups of 16
  int16_t min_pairs[kTileRows][8];
  float d[kTileRows], dmin[kTileRows];
};

inline void store_scales(__m128i words, int32_t* to) {
  const __m256i dwords = kDwordSums ? _mm256_cvtepi16_epi32(words) : _mm256_cvtepu16_epi32(words);
  _mm256_store_si256((__m256i*)to, kDwordSums ? dwords : _mm256_or_si256(dwords, _mm256_slli_epi32(dwords, 16)));
}

template <class Quant, int C>
QTENSOR_INLINE void store_pair(const uint8_t* block, uint8_t* to) {
  __m256i even, odd;
  Quant::template pair<C>(block, even, odd);
  _mm256_store_si256((__m256i*)(to + 64 * C), even);
  _mm256_store_si256((__m256i*)(to + 64 * C + 32), odd);
}
template <class Quant>
QTENSOR_INLINE void store_values(const uint8_t* block, uint8_t* to) {
  store_pair<Quant, 0>(block, to);
  store_pair<Quant, 1>(block, to);
  store_pair<Quant, 2>(block, to);
  store_pair<Quant, 3>(block, to);
}

template <class Quant, int LARGEST>
struct RowsWithMins {
  static constexpr bool has_min = true;
  using Unpacked = RowBlocks;
  static constexpr int group = 32, largest = LARGEST, offset_bits = 0;
  static constexpr int64_t bytes = Quant::bytes;
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks& to) {
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r++) {
      const ScaleBytes packed = unpack_scales(place[r] + 4);
      const __m128i scale = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)packed.scale));
      store_scales(scale, to.scale[r]);
      _mm_store_si128((__m128i*)to.scale_pairs[r], scale);
      const __m128i min = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)packed.min));
      _mm_store_si128((__m128i*)to.min_pairs[r], min);
      store_values<Quant>(place[r], to.q[r]);
      half d, dmin;
      __builtin_memcpy(&d, place[r], 2);
      __builtin_memcpy(&dmin, place[r] + 2, 2);
      to.d[r] = half_to_float(d);
      to.dmin[r] = half_to_float(dmin);
    }
  }
};

template <class Quant, int LARGEST>
struct RowsOfGroups {
  static constexpr bool has_min = Quant::has_min;
  using Unpacked = RowBlocks;
  static constexpr int group = 16, largest = LARGEST, offset_bits = Quant::offset_bits;
  static constexpr int64_t bytes = Quant::bytes;
  static QTENSOR_INLINE void unpack(const uint8_t* const* place, RowBlocks& to) {
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; r++) {
      const uint8_t* const block = place[r];
      const __m256i scale = Quant::scales_of(block).all;
      _mm256_store_si256((__m256i*)to.scale_pairs[r], scale);
      if constexpr (has_min) {
        _mm256_store_si256((__m256i*)to.scale_pairs[r], Quant::mins_of(block));
        half dmin;
        __builtin_memcpy(&dmin, block + Quant::d_at + 2, 2);
        to.dmin[r] = half_to_float(dmin);
      }
      store_scales(_mm256_castsi256_si128(scale), to.scale[r]);
      store_scales(_mm256_extracti128_si256(scale, 1), to.scale[r] + 8);
      store_values<Quant>(block, to.q[r]);
      half d;
      __builtin_memcpy(&d, block + Quant::d_at, 2);
      to.d[r] = half_to_float(d);
    }
  }
};

}  // namespace
}  // namespace qtensor
