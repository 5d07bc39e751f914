// Operands of tiles: K-quant weights as two exact byte planes, packed 8-bit activations, and mins.
//
// A weight's integer q*sc does not fit in a byte, so it is split as high * 2^shift + low into two byte planes. Both are
// multiplied exactly and joined as integers, which gives the same sum as the vector kernels. Each format has its own
// way to compute the planes (see below). Weights are the A operand, 16 rows of 64 values; activations are packed
// beforehand as B, [k/4][16 batch rows][4 bytes].
//
// The sums of mins are computed by tiles too: sum_j m_j * sums32_j as bfloat16 with sums32 = high + low, both exact
// (a multiple of 64 up to 64 * 64, and 0..63). A min is stored as 128 + m, whose bfloat16 is 0x4300 + m, without any
// arithmetic. The excess, 128 times the sum of all, is subtracted by a ninth pair of products, with -128. All numbers
// are below 2^24, so float32 is exact in any order.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/avx512/transpose.h"
#include "kernels/portable/always_inline.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

// Activations of one M tile of one block. The values of all M tiles and blocks are stored first, a page each, followed
// by the other data of all. A load waits for a recent store at the same offset in its page. With this layout and one
// set of planes, the tiles that small_m.h loads for 64 values do not conflict with those that it unpacks meanwhile.
struct PackedValues {
  int8_t q[4][16][16][4];  // [64 values][k / 4][batch row][k % 4]
};
struct PackedSums {
  // bfloat16 [k / 2][batch row][k % 2], in the order of the rows' mins: k / 2 = 0 to 3 high, 4 to 7 low, then the sum
  // of all, zeros
  uint16_t mins[16][16][2];
  float d[16];
};
static_assert(sizeof(PackedValues) == 4096 && sizeof(PackedSums) % 64 == 0);

// The M tiles of one block, which are adjacent.
struct PackedTiles {
  const PackedValues* values;
  const PackedSums* sums;
  PackedTiles operator+(int64_t tiles) const { return {values + tiles, sums + tiles}; }
};
inline int64_t packed_b_bytes(int64_t blocks, int64_t m) {
  return (m + 15) / 16 * blocks * int64_t(sizeof(PackedValues) + sizeof(PackedSums));
}
inline PackedTiles packed_tiles(const uint8_t* packed, int64_t blocks, int64_t tiles, int64_t block) {
  const auto* const values = reinterpret_cast<const PackedValues*>(packed);
  return PackedTiles{values, reinterpret_cast<const PackedSums*>(values + blocks * tiles)} + block * tiles;
}

// Converts integers that are exact in bfloat16 to bfloat16, in the lower words of dwords.
inline __m256i bfloat16_of(__m256i exact) {
  return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(exact)), 16);
}

// The factors of mins for a batch row, as its dwords of PackedSums::mins.
inline __m512i packed_sums(const BlockQ8K& x) {
  const __m128i words = _mm_load_si128((const __m128i*)x.sums32);
  const __m256i sums = _mm256_cvtepi16_epi32(words), low = _mm256_and_si256(sums, _mm256_set1_epi32(63));
  __m128i all = _mm_madd_epi16(words, _mm_set1_epi16(1));
  all = _mm_add_epi32(all, _mm_shuffle_epi32(all, _MM_SHUFFLE(1, 0, 3, 2)));
  all = _mm_add_epi32(all, _mm_shuffle_epi32(all, _MM_SHUFFLE(2, 3, 0, 1)));
  const __m128i all_low = _mm_and_si128(all, _mm_setr_epi32(0, 255, 0, 0));
  const __m128i all_high = _mm_andnot_si128(_mm_set1_epi32(255), _mm_and_si128(all, _mm_setr_epi32(-1, 0, 0, 0)));
  const __m256i both = _mm256_zextsi128_si256(_mm_or_si128(all_high, all_low));
  const __m512i parts = _mm512_zextsi128_si512(_mm256_cvtepi32_epi16(bfloat16_of(_mm256_sub_epi32(sums, low))));
  return _mm512_inserti32x4(_mm512_inserti32x4(parts, _mm256_cvtepi32_epi16(bfloat16_of(low)), 1),
                            _mm256_cvtepi32_epi16(bfloat16_of(both)), 2);
}

inline void pack_b(const PackTask& t, int64_t tile, int64_t block) {
  const int64_t blocks = t.blocks, first = 16 * tile, count = t.m - first < 16 ? t.m - first : 16;
  const BlockQ8K* const from = t.x + first * blocks + block;  // batch rows are `blocks` blocks apart
  const PackedTiles to = packed_tiles(t.packed, blocks, (t.m + 15) / 16, block) + tile;
  auto& values = const_cast<PackedValues&>(*to.values);
  auto& sums = const_cast<PackedSums&>(*to.sums);
  for (int part = 0; part < 4; part++) {
    __m512i r[16];
    for (int j = 0; j < 16; j++)
      r[j] = j < count ? _mm512_load_si512(from[j * blocks].q + 64 * part) : _mm512_setzero_si512();
    transpose16(r);
    for (int k = 0; k < 16; k++) _mm512_store_si512(values.q[part][k], r[k]);
  }
  __m512i mins[16];
  for (int j = 0; j < 16; j++) {
    sums.d[j] = j < count ? from[j * blocks].d : 0.0f;
    mins[j] = j < count ? packed_sums(from[j * blocks]) : _mm512_setzero_si512();
  }
  transpose16(mins);
  for (int k = 0; k < 16; k++) _mm512_store_si512(sums.mins[k], mins[k]);
}

// One block of sixteen rows of weights: the planes that the tiles read, and the headers of the rows.
struct alignas(64) RowPlanes {
  uint8_t high[4][16][64];  // [64 values][row][value]
  uint8_t low[4][16][64];
};
struct alignas(64) RowHeaders {
  uint8_t scales[16][16];  // for formats with mins: eight high parts of scales, eight low parts
  uint16_t mins[16][32];   // bfloat16 [row][128 + m_0 ... 128 + m_7, the same eight, -128, -128, zeros]
  float d[16];
  float dmin[16];
  // Initializes the part that unpacking does not write.
  void begin() {
    const __m256i behind = _mm256_zextsi128_si256(_mm_cvtsi32_si128(int(0xc300c300)));  // -128 twice, zeros
    for (int r = 0; r < 16; r++) _mm256_store_si256((__m256i*)(mins[r] + 16), behind);
  }
};
constexpr char kMinExponent = 0x43;  // the upper byte of a bfloat16 in [128, 256); the lower is its value minus 128

// Operands of vpshufb that select, from a row's scales in each lane, the bytes for the values of a part; other bytes
// become zero. vpermw, which permutes words, would take a slot on both vector ports. They are in memory, because gcc
// would otherwise build them from constants each time.
struct alignas(64) ScaleOrders {
  uint16_t high[4][32] = {}, low[4][32] = {};  // [part][lane], for scales of 32 values
  uint16_t upper[4][32] = {};                  // for scales of 16 values, to the upper byte of a word
  constexpr ScaleOrders() {
    for (int part = 0; part < 4; part++)
      for (int lane = 0; lane < 32; lane++) {
        high[part][lane] = uint16_t(0x8000 + 2 * part + lane / 16);
        low[part][lane] = uint16_t(high[part][lane] + 8);
        upper[part][lane] = uint16_t(((4 * part + lane / 8) << 8) + 0x80);
      }
  }
};
constexpr ScaleOrders kScaleOrders;

// One block of four rows, which are `stride` bytes apart.
struct FourBlocks {
  const uint8_t* first;
  int64_t stride, stride3;  // stride3 is 3 * stride, so that a row's address fits in an instruction
  const uint8_t* at(int r) const { return first + (r == 3 ? stride3 : r * stride); }
};

// Q4_K and Q5_K: sc = 8 * (sc >> 3) + (sc & 7), so high = q * (sc >> 3) and low = q * (sc & 7) are below 256, and one
// 16-bit multiplication computes two byte products without a carry between them.
template <class Quant>
struct MinPlanes {
  static constexpr bool has_min = true, is_signed = false;
  static constexpr int shift = 3;
  static constexpr int64_t bytes = Quant::bytes;
  // Unpacks headers to rows [row, row + 4).
  static QTENSOR_INLINE void headers(FourBlocks from, RowHeaders& to, int row) {
    const uint8_t* const place[4] = {from.at(0), from.at(1), from.at(2), from.at(3)};
    const __m512i raw = rows_16(place, 0), bytes = scale_and_min_bytes(raw);
    const __m512i twice = _mm512_shuffle_epi32(bytes, _MM_PERM_BABA);
    const __m512i parts = _mm512_and_si512(_mm512_srlv_epi32(twice, every_lane(3, 3, 0, 0)), _mm512_set1_epi8(7));
    _mm512_store_si512(to.scales[row], parts);
    const __m512i mins = _mm512_unpackhi_epi8(bytes, _mm512_set1_epi8(kMinExponent));
    for (int r = 0; r < 4; r += 2) {
      const __m512i two = r == 0 ? _mm512_shuffle_i32x4(mins, mins, 0x50) : _mm512_shuffle_i32x4(mins, mins, 0xfa);
      _mm256_store_si256((__m256i*)to.mins[row + r], _mm512_castsi512_si256(two));
      _mm256_store_si256((__m256i*)to.mins[row + r + 1], _mm512_extracti64x4_epi64(two, 1));
    }
    const __m256 both = d_and_dmin(raw);
    _mm_store_ps(to.d + row, _mm256_castps256_ps128(both));
    _mm_store_ps(to.dmin + row, _mm256_extractf128_ps(both, 1));
  }
  // Unpacks values [64 PART, 64 PART + 64) to rows [row, row + 4), whose headers have been unpacked.
  template <int PART>
  static QTENSOR_INLINE void values(FourBlocks from, const RowHeaders& headers, RowPlanes& to, int row) {
    __m512i high = _mm512_load_si512(kScaleOrders.high[PART]), low = _mm512_load_si512(kScaleOrders.low[PART]);
    in_register(high);
    in_register(low);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      const __m512i q = Quant::template part<PART>(from.at(r));
      const __m512i scales = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)headers.scales[row + r]));
      _mm512_store_si512(to.high[PART][row + r], _mm512_mullo_epi16(q, _mm512_shuffle_epi8(scales, high)));
      _mm512_store_si512(to.low[PART][row + r], _mm512_mullo_epi16(q, _mm512_shuffle_epi8(scales, low)));
    }
  }
};
// Q6_K: sc * (q - 32) is in [-4064, 4096] and is split into its upper and lower bytes, 256 * high + low. Bytes at even
// and at odd positions are multiplied separately, (q - 32) * 256 by sc * 256; the upper half is the product.
struct SignedPlanes {
  static constexpr bool has_min = false, is_signed = true;  // the upper byte is signed
  static constexpr int shift = 8;
  static constexpr int64_t bytes = sizeof(BlockQ6_K);
  static QTENSOR_INLINE void headers(FourBlocks from, RowHeaders& to, int row) {
    const uint8_t* const place[4] = {from.at(0), from.at(1), from.at(2), from.at(3)};
    _mm_store_ps(to.d + row, load_halves(place, offsetof(BlockQ6_K, d)));
  }
  template <int PART>
  static QTENSOR_INLINE void values(FourBlocks from, const RowHeaders&, RowPlanes& to, int row) {
    __m512i order = _mm512_load_si512(kScaleOrders.upper[PART]);
    in_register(order);
    const __m512i middle = _mm512_set1_epi8(32), upper = _mm512_set1_epi16(short(0xff00));
    constexpr __mmask64 odd_bytes = 0xaaaaaaaaaaaaaaaa;
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      const uint8_t* const block = from.at(r);
      const __m512i scales =
          _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(block + offsetof(BlockQ6_K, scales))));
      const __m512i scale = _mm512_shuffle_epi8(scales, order);
      const __m512i centered = _mm512_sub_epi8(Q6_K512::part<PART>(block), middle);
      const __m512i even = _mm512_mulhi_epi16(_mm512_slli_epi16(centered, 8), scale);
      const __m512i odd = _mm512_mulhi_epi16(_mm512_and_si512(centered, upper), scale);
      _mm512_store_si512(to.high[PART][row + r], _mm512_mask_blend_epi8(odd_bytes, _mm512_srli_epi16(even, 8), odd));
      _mm512_store_si512(to.low[PART][row + r], _mm512_mask_blend_epi8(odd_bytes, even, _mm512_slli_epi16(odd, 8)));
    }
  }
};

template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};

// Calls call(Number<0>()) to call(Number<3>()), in this order.
template <class Call>
QTENSOR_INLINE void for_four(Call call) {
  call(Number<0>());
  call(Number<1>());
  call(Number<2>());
  call(Number<3>());
}

}  // namespace
}  // namespace qtensor
