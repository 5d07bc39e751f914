// Operands of tiles for small M: activations are the A operand, and weights are B. The time of a tile product grows
// with the rows of its A operand. Here these are batch rows, so that seventeen of them cost little more than sixteen.
// (In weights_as_a.h, the operands are exchanged, and a pair of planes is multiplied with more batch rows.)
//
// The B operand is [k / 4][16 rows][4 bytes]: transposed dwords of sixteen rows of weights. Scales, mins and sums of a
// row are then a lane, so that nothing is spread over a row's values, and nothing is added across lanes. Planes and
// integers are those of weights_as_a.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/amx/weights_as_a.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/avx512/transpose.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

// Activations of one M tile of one block. The values of each begin at a page, for the reason given in weights_as_a.h.
struct AValues {
  int8_t q[4][16][64];  // [64 values][batch row][value]
};
struct alignas(64) ASums {
  int16_t sums32[16][8];
  float d[16];
};
static_assert(sizeof(AValues) == 4096 && sizeof(ASums) % 64 == 0);

struct ATiles {
  const AValues* values;
  const ASums* sums;
};
inline ATiles a_tiles(const uint8_t* packed, int64_t blocks, int64_t m, int64_t block) {
  const int64_t tiles = (m + 15) / 16;
  const auto* const values = reinterpret_cast<const AValues*>(packed);
  const auto* const sums = reinterpret_cast<const ASums*>(values + blocks * tiles);
  return {values + block * tiles, sums + block * tiles};
}
inline int64_t packed_a_bytes(int64_t blocks, int64_t m) {
  return (m + 15) / 16 * blocks * int64_t(sizeof(AValues) + sizeof(ASums));
}

// Batch rows are distributed evenly over their tiles; the last tile may end in batch rows of zeros.
inline int64_t batch_rows_per_tile(int64_t m) {
  const int64_t tiles = (m + 15) / 16;
  return (m + tiles - 1) / tiles;
}

inline void pack_a(const PackTask& t, int64_t tile, int64_t block) {
  const int64_t each = batch_rows_per_tile(t.m), first = each * tile;
  const ATiles to = a_tiles(t.packed, t.blocks, t.m, block);
  auto& values = const_cast<AValues&>(to.values[tile]);
  auto& sums = const_cast<ASums&>(to.sums[tile]);
  alignas(64) static constexpr BlockQ8K kZeros = {};
  for (int64_t j = 0; j < each; j++) {
    const BlockQ8K& from = first + j < t.m ? t.x[(first + j) * t.blocks + block] : kZeros;
    for (int part = 0; part < 4; part++) _mm512_store_si512(values.q[part][j], _mm512_load_si512(from.q + 64 * part));
    _mm_store_si128((__m128i*)sums.sums32[j], _mm_load_si128((const __m128i*)from.sums32));
    sums.d[j] = from.d;
  }
}

// One block of sixteen rows of weights: the planes that the tiles read, and the operands of the epilogue, a lane for
// each row.
struct alignas(64) BPlanes {
  uint8_t high[4][16][64];  // [64 values][k / 4][row, k % 4]
  uint8_t low[4][16][64];
};
struct alignas(64) BHeaders {
  uint8_t scales[16][64];  // words: eight high parts and eight low parts
  uint8_t mins[4][64];     // words, two of each row adjacent
  uint8_t fifth[8][64];    // for Q5_K: the fifth bits, in the order of the block
  float d[16], dmin[16];
};

inline __m512i every_dword(int a, int b, int c, int d) {  // a shuffle of bytes within dwords; -1 is zero
  const auto in = [=](int i) {
    const auto byte = [=](int from) { return uint32_t(from < 0 ? 0x80 : from + 4 * i); };
    return int(byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24);
  };
  return every_lane(in(0), in(1), in(2), in(3));
}

// One block of sixteen rows, which are `stride` bytes apart.
struct SixteenBlocks {
  const uint8_t* group[4];  // rows 0, 4, 8 and 12
  int64_t stride, stride3;  // stride3 is 3 * stride, so that a row's address fits in an instruction

  // Sixteen bytes of rows m, 4 + m, 8 + m and 12 + m.
  QTENSOR_INLINE __m512i four_rows(int m, int64_t at) const {
    const int64_t off = (m == 3 ? stride3 : m * stride) + at;
    const auto load = [&](int g) { return _mm_loadu_si128((const __m128i*)(group[g] + off)); };
    __m512i rows = _mm512_castsi128_si512(load(0));
    rows = _mm512_mask_broadcast_i32x4(rows, 0x00f0, load(1));
    rows = _mm512_mask_broadcast_i32x4(rows, 0x0f00, load(2));
    return _mm512_mask_broadcast_i32x4(rows, 0xf000, load(3));
  }
  // Sixteen bytes of each row; to[i] is dword i of all rows.
  QTENSOR_INLINE void dwords(int64_t at, __m512i (&to)[4]) const {
#pragma GCC unroll 4
    for (int m = 0; m < 4; m++) to[m] = four_rows(m, at);
    transpose_fours(to);
  }
};
inline __m512 floats_of_halves(__m512i dwords) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords)); }

// Q4_K and Q5_K: low nibbles are values of even sub-blocks, and high nibbles those of odd ones. Values of odd
// sub-blocks stay in upper bits of their bytes and are multiplied by a scale in upper bits of a word. The upper word of
// that product is the two byte products; for even sub-blocks, it is the lower word.
struct BQ4_K {
  static constexpr int64_t bytes = sizeof(BlockQ4_K), values_at = offsetof(BlockQ4_K, qs);
  static constexpr bool has_fifth = false;
  static constexpr int odd_up = 4;  // bits by which values of odd sub-blocks are shifted up in their bytes
  template <int GROUP>
  static QTENSOR_INLINE __m512i even(__m512i q, const uint8_t*) {
    return _mm512_and_si512(q, _mm512_set1_epi8(15));
  }
  template <int GROUP>
  static QTENSOR_INLINE __m512i odd(__m512i q, const uint8_t*) {
    return _mm512_and_si512(q, _mm512_set1_epi8(char(0xf0)));
  }
};
struct BQ5_K {
  static constexpr int64_t bytes = sizeof(BlockQ5_K), values_at = offsetof(BlockQ5_K, qs);
  static constexpr bool has_fifth = true;
  static constexpr int odd_up = 3;
  template <int BIT, int TO>  // moves this bit of each byte
  static QTENSOR_INLINE __m512i moved(const uint8_t* fifth) {
    const __m512i bit = _mm512_and_si512(_mm512_load_si512(fifth), _mm512_set1_epi8(char(1 << BIT)));
    return BIT < TO ? _mm512_slli_epi16(bit, TO > BIT ? TO - BIT : 0) : _mm512_srli_epi16(bit, BIT > TO ? BIT - TO : 0);
  }
  template <int GROUP>
  static QTENSOR_INLINE __m512i even(__m512i q, const uint8_t* fifth) {
    return _mm512_or_si512(_mm512_and_si512(q, _mm512_set1_epi8(15)), moved<2 * GROUP, 4>(fifth));
  }
  template <int GROUP>
  static QTENSOR_INLINE __m512i odd(__m512i q, const uint8_t* fifth) {
    const __m512i nibble = _mm512_and_si512(_mm512_srli_epi16(q, 1), _mm512_set1_epi8(0x78));
    return _mm512_or_si512(nibble, moved<2 * GROUP + 1, 7>(fifth));
  }
};

// Planes of Q4_K and Q5_K, like those of MinPlanes. A unit is 32 values.
template <class Quant>
struct BMins {
  static constexpr int shift = 3;
  static constexpr int64_t bytes = Quant::bytes;

  static QTENSOR_INLINE void headers(const SixteenBlocks& from, int64_t later, BHeaders& to) {
    __m512i h[4];  // d and dmin, then the twelve bytes of scales and mins
    from.dwords(later, h);
    _mm512_store_ps(to.d, floats_of_halves(h[0]));
    _mm512_store_ps(to.dmin, floats_of_halves(_mm512_srli_epi32(h[0], 16)));
    const __m512i six = _mm512_set1_epi8(0x3f), four = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(0x30);
    const auto joined = [&](__m512i low, __m512i high) {  // four bits of low, two of high
      return _mm512_ternarylogic_epi32(four, low, _mm512_and_si512(_mm512_srli_epi32(high, 2), upper), 0xca);
    };
    const __m512i scales[2] = {_mm512_and_si512(h[1], six), joined(h[3], h[1])};
    const __m512i mins[2] = {_mm512_and_si512(h[2], six), joined(_mm512_srli_epi32(h[3], 4), h[2])};
    for (int i = 0; i < 2; i++) {
      const __m512i seven = _mm512_set1_epi8(7);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi32(scales[i], 3), seven);
      spread(high, to.scales + 4 * i);
      spread(_mm512_and_si512(scales[i], seven), to.scales + 8 + 4 * i);
      _mm512_store_si512(to.mins[2 * i], _mm512_shuffle_epi8(mins[i], every_dword(0, -1, 1, -1)));
      _mm512_store_si512(to.mins[2 * i + 1], _mm512_shuffle_epi8(mins[i], every_dword(2, -1, 3, -1)));
    }
    if constexpr (Quant::has_fifth) {
      for (int half = 0; half < 2; half++) {
        __m512i bits[4];
        from.dwords(later + int64_t(offsetof(BlockQ5_K, qh)) + 16 * half, bits);
        for (int k = 0; k < 4; k++) _mm512_store_si512(to.fifth[4 * half + k], bits[k]);
      }
    }
  }
  // Stores the scales of four sub-blocks in both words of each row's dword; those of odd sub-blocks are shifted up.
  static QTENSOR_INLINE void spread(__m512i scales, uint8_t (*to)[64]) {
    const __m512i up = _mm512_slli_epi32(scales, 8 - Quant::odd_up);
    _mm512_store_si512(to[0], _mm512_shuffle_epi8(scales, every_dword(0, -1, 0, -1)));
    _mm512_store_si512(to[1], _mm512_shuffle_epi8(up, every_dword(-1, 1, -1, 1)));
    _mm512_store_si512(to[2], _mm512_shuffle_epi8(scales, every_dword(2, -1, 2, -1)));
    _mm512_store_si512(to[3], _mm512_shuffle_epi8(up, every_dword(-1, 3, -1, 3)));
  }

  template <int UNIT>
  static QTENSOR_INLINE void values(const SixteenBlocks& from, int64_t later, const BHeaders& h, BPlanes& to) {
    constexpr int group = UNIT / 2, row = 4 * (UNIT % 2);  // a group is 64 values: an even sub-block and an odd one
    __m512i q[4];
    from.dwords(later + Quant::values_at + 16 * UNIT, q);
    const __m512i even_high = _mm512_load_si512(h.scales[2 * group]);
    const __m512i even_low = _mm512_load_si512(h.scales[8 + 2 * group]);
    const __m512i odd_high = _mm512_load_si512(h.scales[2 * group + 1]);
    const __m512i odd_low = _mm512_load_si512(h.scales[8 + 2 * group + 1]);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      const __m512i even = Quant::template even<group>(q[k], h.fifth[row + k]);
      const __m512i odd = Quant::template odd<group>(q[k], h.fifth[row + k]);
      _mm512_store_si512(to.high[group][row + k], _mm512_mullo_epi16(even, even_high));
      _mm512_store_si512(to.low[group][row + k], _mm512_mullo_epi16(even, even_low));
      _mm512_store_si512(to.high[group][8 + row + k], _mm512_mulhi_epu16(odd, odd_high));
      _mm512_store_si512(to.low[group][8 + row + k], _mm512_mulhi_epu16(odd, odd_low));
    }
  }
};

}  // namespace
}  // namespace qtensor
