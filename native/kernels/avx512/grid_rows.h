// Four rows of the formats with grids (IQ1, IQ2, IQ3) with one to four batch rows, with VNNI. Rows of a large grid are
// loaded from its table. A grid of up to 512 rows is looked up in registers, as codes of two bytes, which are expanded
// afterwards. Signs are masks, by which activations are negated.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "blocks.h"
#include "grids.h"
#include "kernel_table.h"
#include "kernels/avx512/folded_blocks.h"
#include "kernels/avx512/four_headers.h"
#include "kernels/avx512/integer_kernels.h"
#include "kernels/portable/always_inline.h"
#include "kernels/portable/grid_codes.h"
#include "kernels/x86/rows.h"

namespace qtensor {
namespace {

// A block of one row: q[c] is values [64 c, 64 c + 64) as bytes, with the format's offset added; which of them are
// negative; and sixteen scales as words.
struct GridRow {
  __m512i q[4];
  __mmask64 negative[4];
  __m256i scales;
};

// Loads the 32 grid rows of a block, of eight bytes each, by their numbers.
QTENSOR_INLINE void read_rows(const uint64_t* grid, __m512i numbers, GridRow& to) {
  alignas(64) uint16_t index[32];
  _mm512_store_si512(index, numbers);
  for (int c = 0; c < 4; c++) {
    const auto at = [&](int i) { return (long long)grid[index[8 * c + i]]; };
    to.q[c] = _mm512_setr_epi64(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
  }
}

// Looks up the codes with these 32 numbers in 64 codes at a time. The numbers' upper bits select among the results.
template <int N>
QTENSOR_INLINE __m512i codes_of(const uint16_t (&codes)[N], __m512i numbers) {
  __m512i found[N / 64];
  for (int i = 0; i < N / 64; i++)
    found[i] =
        _mm512_permutex2var_epi16(_mm512_loadu_si512(codes + 64 * i), numbers, _mm512_loadu_si512(codes + 64 * i + 32));
  for (int left = N / 128, bit = 64; left > 0; left /= 2, bit *= 2) {
    const __mmask32 second = _mm512_test_epi16_mask(numbers, _mm512_set1_epi16(short(bit)));
    for (int i = 0; i < left; i++) found[i] = _mm512_mask_blend_epi16(second, found[2 * i], found[2 * i + 1]);
  }
  return found[0];
}
// Expands codes of eight values, two bits each. Levels are looked up by the two bits at their position in a nibble.
QTENSOR_INLINE void spread_pairs(__m512i codes, GridRow& to) {
  constexpr int8_t a = kLevelsIQ2[0], b = kLevelsIQ2[1], c = kLevelsIQ2[2];
  const __m512i levels = _mm512_broadcast_i32x4(_mm_setr_epi8(a, b, c, 0, b, 0, 0, 0, c, 0, 0, 0, 0, 0, 0, 0));
  const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  for (int n = 0; n < 4; n++) {
    const __m512i two = _mm512_permutexvar_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(4 * n)), codes);
    const __m512i bytes = _mm512_shuffle_epi8(two, every_lane(0, 0x01010101, 0x02020202, 0x03030303));
    const __m512i low = _mm512_mask_mov_epi8(bytes, 0xcccccccccccccccc, _mm512_srli_epi16(bytes, 4));
    to.q[n] = _mm512_shuffle_epi8(levels, _mm512_and_si512(low, _mm512_set1_epi16(0x0c03)));
  }
}
// Expands codes of four values, four bits each, to q[0] and q[1].
QTENSOR_INLINE void spread_nibbles(__m512i codes, const int8_t (&eight)[8], __m512i* q) {
  const __m512i levels = _mm512_broadcast_i32x4(_mm_loadl_epi64((const __m128i*)eight));
  const __m512i lane = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
  for (int n = 0; n < 2; n++) {
    const __m512i four = _mm512_permutexvar_epi64(_mm512_add_epi64(lane, _mm512_set1_epi64(4 * n)), codes);
    const __m512i bytes = _mm512_shuffle_epi8(four, every_lane(0x01010000, 0x03030202, 0x05050404, 0x07070606));
    const __m512i low = _mm512_mask_mov_epi8(bytes, 0xaaaaaaaaaaaaaaaa, _mm512_srli_epi16(bytes, 4));
    q[n] = _mm512_shuffle_epi8(levels, _mm512_and_si512(low, _mm512_set1_epi8(15)));
  }
}

QTENSOR_INLINE __m512i words_of_32(const uint8_t* bytes) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)bytes));
}
// Eight dwords as words, two times each. Scales are odd: 2 * n + 1.
QTENSOR_INLINE __m256i twice(__m256i dwords) { return _mm256_or_si256(dwords, _mm256_slli_epi32(dwords, 16)); }
QTENSOR_INLINE __m256i odd(__m256i words) { return _mm256_or_si256(_mm256_slli_epi16(words, 1), _mm256_set1_epi16(1)); }

QTENSOR_INLINE void signs_from(__m256i bytes, GridRow& to) {
  alignas(32) uint64_t words[4];
  _mm256_store_si256((__m256i*)words, bytes);
  for (int c = 0; c < 4; c++) to.negative[c] = words[c];
}
// Each byte has seven sign bits; the eighth makes the number of set bits even.
QTENSOR_INLINE void even_signs_from(__m256i seven, GridRow& to) {
  const char one = char(128);
  const __m256i odd_number =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, one, one, 0, one, 0, 0, one, one, 0, 0, one, 0, one, one, 0));
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(seven, 4), _mm256_set1_epi8(15));
  const __m256i eighth =
      _mm256_xor_si256(_mm256_shuffle_epi8(odd_number, seven), _mm256_shuffle_epi8(odd_number, upper));
  signs_from(_mm256_or_si256(seven, eighth), to);
}
// Eight dwords, each with four times seven sign bits and a scale of four bits.
QTENSOR_INLINE void signs_and_scales(__m256i words, GridRow& to) {
  const auto part = [&](__m256i moved, int mask, __m256i rest) {  // (moved & mask) | rest
    return _mm256_ternarylogic_epi32(moved, _mm256_set1_epi32(mask), rest, 0xea);
  };
  __m256i seven = _mm256_and_si256(words, _mm256_set1_epi32(0x7f));
  seven = part(_mm256_slli_epi32(words, 1), 0x7f00, seven);
  seven = part(_mm256_slli_epi32(words, 2), 0x7f0000, seven);
  seven = part(_mm256_slli_epi32(words, 3), 0x7f000000, seven);
  even_signs_from(seven, to);
  to.scales = odd(twice(_mm256_srli_epi32(words, 28)));
}
// Eight bytes of two nibbles; each nibble is a scale.
QTENSOR_INLINE __m256i nibble_scales(const uint8_t* eight) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)eight));
  const __m256i both = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12));
  return odd(_mm256_and_si256(both, _mm256_set1_epi32(0x000f000f)));
}

// A format: its offset, the number of scales per 32 values, and unpacking of a block.
template <class Block>
struct Grid;

template <>
struct Grid<BlockIQ2_XXS> {
  static constexpr int offset = 0, scales = 1;
  static QTENSOR_INLINE void take(const uint8_t* block, GridRow& to) {
    const __m512i raw = _mm512_loadu_si512(block + offsetof(BlockIQ2_XXS, qs));
    const __m512i numbers = _mm512_cvtepu8_epi16(_mm512_cvtepi64_epi32(raw));
    signs_and_scales(_mm512_cvtepi64_epi32(_mm512_srli_epi64(raw, 32)), to);
    spread_pairs(codes_of(kCodesIQ2_XXS, numbers), to);
  }
};

template <>
struct Grid<BlockIQ2_XS> {
  static constexpr int offset = 0, scales = 2;
  static QTENSOR_INLINE void take(const uint8_t* block, GridRow& to) {
    const __m512i raw = _mm512_loadu_si512(block + offsetof(BlockIQ2_XS, qs));
    even_signs_from(_mm512_cvtepi16_epi8(_mm512_srli_epi16(raw, 9)), to);
    to.scales = nibble_scales(block + offsetof(BlockIQ2_XS, scales));
    spread_pairs(codes_of(kCodesIQ2_XS, raw), to);  // uses nine bits of each number
  }
};

template <>
struct Grid<BlockIQ2_S> {
  static constexpr int offset = 0, scales = 2;
  static QTENSOR_INLINE void take(const uint8_t* block, GridRow& to) {
    int64_t high;  // two bits for each row of the grid
    __builtin_memcpy(&high, block + offsetof(BlockIQ2_S, qh), 8);
    const __m512i byte_of_four =
        _mm512_setr_epi64(0, 0x0001000100010001, 0x0002000200020002, 0x0003000300030003, 0x0004000400040004,
                          0x0005000500050005, 0x0006000600060006, 0x0007000700070007);
    const __m512i words = _mm512_permutexvar_epi16(
        byte_of_four, _mm512_castsi128_si512(_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)high))));
    const __m512i moved = _mm512_sllv_epi16(words, _mm512_set1_epi64(0x0002000400060008));
    signs_from(_mm256_loadu_si256((const __m256i*)(block + offsetof(BlockIQ2_S, signs))), to);
    to.scales = nibble_scales(block + offsetof(BlockIQ2_S, scales));
    const __m512i low = words_of_32(block + offsetof(BlockIQ2_S, qs));
    read_rows(kGrids.iq2_s, and_or(moved, _mm512_set1_epi16(0x300), low), to);
  }
};

template <>
struct Grid<BlockIQ3_XXS> {
  static constexpr int offset = 0, scales = 1;
  static QTENSOR_INLINE void take(const uint8_t* block, GridRow& to) {
    const uint8_t* const qs = block + offsetof(BlockIQ3_XXS, qs);
    signs_and_scales(_mm256_loadu_si256((const __m256i*)(block + offsetof(BlockIQ3_XXS, scales))), to);
    for (int n = 0; n < 2; n++)
      spread_nibbles(codes_of(kCodesIQ3_XXS, words_of_32(qs + 32 * n)), kLevelsIQ3_XXS, to.q + 2 * n);
  }
};

template <>
struct Grid<BlockIQ3_S> {
  static constexpr int offset = 0, scales = 1;
  static QTENSOR_INLINE void take(const uint8_t* block, GridRow& to) {
    const uint8_t* const qs = block + offsetof(BlockIQ3_S, qs);
    __mmask32 high[2];  // a bit for each row of the grid
    __builtin_memcpy(high, block + offsetof(BlockIQ3_S, qh), 8);
    for (int n = 0; n < 2; n++) {
      const __m512i low = words_of_32(qs + 32 * n);
      const __m512i numbers = _mm512_mask_add_epi16(low, high[n], low, _mm512_set1_epi16(256));
      spread_nibbles(codes_of(kCodesIQ3_S, numbers), kLevelsIQ3_S, to.q + 2 * n);
    }
    signs_from(_mm256_loadu_si256((const __m256i*)(block + offsetof(BlockIQ3_S, signs))), to);
    int scales;
    __builtin_memcpy(&scales, block + offsetof(BlockIQ3_S, scales), 4);
    const __m256i nibble = _mm256_srlv_epi32(_mm256_set1_epi32(scales), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    to.scales = odd(twice(_mm256_and_si256(nibble, _mm256_set1_epi32(15))));
  }
};

// Values of IQ1 are -8, 0 or 8, plus or minus 1. With the offset of 9, they are the grid's bytes plus 10 or 8.
struct ShiftedGrid {
  static constexpr int offset = 9;
  static QTENSOR_INLINE void shift(__mmask32 down, GridRow& to) {
    for (int c = 0; c < 4; c++) {
      to.q[c] = _mm512_add_epi8(to.q[c], _mm512_set1_epi8(10));
      to.q[c] = _mm512_mask_sub_epi64(to.q[c], __mmask8(down >> (8 * c)), to.q[c],
                                      _mm512_set1_epi8(2));  // no byte borrows, because each is at least 2
    }
  }
};

template <>
struct Grid<BlockIQ1_S> : ShiftedGrid {
  static constexpr int scales = 1;
  static QTENSOR_INLINE void take(const uint8_t* block, GridRow& to) {
    const __m128i qh = _mm_loadu_si128((const __m128i*)(block + offsetof(BlockIQ1_S, qh)));
    const __m512i word_of_four =
        _mm512_setr_epi64(0, 0x0001000100010001, 0x0002000200020002, 0x0003000300030003, 0x0004000400040004,
                          0x0005000500050005, 0x0006000600060006, 0x0007000700070007);
    const __m512i high = _mm512_permutexvar_epi16(word_of_four, _mm512_castsi128_si512(qh));
    // three bits each; shifts by 16 or more give zero
    const __m512i moved = _mm512_or_si512(_mm512_sllv_epi16(high, _mm512_set1_epi64(0x0010000200050008)),
                                          _mm512_srlv_epi16(high, _mm512_set1_epi64(0x0001001000100010)));
    to.scales = odd(twice(_mm256_and_si256(_mm256_srli_epi32(_mm256_cvtepu16_epi32(qh), 12), _mm256_set1_epi32(7))));
    const __m512i low = words_of_32(block + offsetof(BlockIQ1_S, qs));
    read_rows(kGrids.iq1, and_or(moved, _mm512_set1_epi16(0x700), low), to);
    shift(_mm512_movepi16_mask(high), to);
  }
};

template <>
struct Grid<BlockIQ1_M> : ShiftedGrid {
  static constexpr int scales = 2;
  static QTENSOR_INLINE void take(const uint8_t* block, GridRow& to) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(block + offsetof(BlockIQ1_M, qh))));
    const __m512i both = _mm512_cvtepu16_epi32(bytes);  // each is used twice
    const __m512i high =
        _mm512_sllv_epi16(_mm512_or_si512(both, _mm512_slli_epi32(both, 16)), _mm512_set1_epi32(0x00040008));
    int64_t scales;
    __builtin_memcpy(&scales, block + offsetof(BlockIQ1_M, scales), 8);
    const __m256i words = _mm256_cvtepu16_epi64(_mm_cvtsi64_si128((long long)scales));
    const __m256i four = _mm256_shuffle_epi8(words, _mm256_set1_epi16(0x0100));
    const __m256i second = _mm256_shuffle_epi8(words, _mm256_set1_epi16(0x0908));
    const __m256i each = _mm256_blend_epi32(four, second, 0xcc);
    const __m256i three = _mm256_srlv_epi16(each, _mm256_set1_epi64x(0x0009000600030000));
    to.scales = odd(_mm256_and_si256(three, _mm256_set1_epi16(7)));
    const __m512i low = words_of_32(block + offsetof(BlockIQ1_M, qs));
    read_rows(kGrids.iq1, and_or(high, _mm512_set1_epi16(0x700), low), to);
    shift(_mm512_test_epi16_mask(high, _mm512_set1_epi16(0x800)), to);
  }
};

template <class Block>
__attribute__((noinline)) void take_row(const uint8_t* block, GridRow& to) {  // compiled once for all callers
  Grid<Block>::take(block, to);
}

template <class Block>
QTENSOR_INLINE __m128 grid_d(const uint8_t* const* place) {
  return load_halves(place, offsetof(Block, d));
}
template <>
QTENSOR_INLINE __m128 grid_d<BlockIQ1_M>(const uint8_t* const* place) {  // the upper nibble of each word of scales
  const auto d = [&](int r) {
    uint64_t scales;
    __builtin_memcpy(&scales, place[r] + offsetof(BlockIQ1_M, scales), 8);
    return short((scales >> 12 & 0xf) | (scales >> 24 & 0xf0) | (scales >> 36 & 0xf00) | (scales >> 48 & 0xf000));
  };
  return _mm_cvtph_ps(_mm_setr_epi16(d(0), d(1), d(2), d(3), 0, 0, 0, 0));
}

template <class Block, int M>
inline void grid_four_rows(const MatmulTask& t, FourRows rows, int64_t batch_row, float step) {
  using Format = Grid<Block>;
  const int64_t blocks = t.blocks_per_row;
  const uint8_t* place[4];
  for (int r = 0; r < 4; r++) place[r] = t.weight + (rows.first + r * rows.stride) * t.row_bytes;
  Ahead<sizeof(Block)> ahead(t, rows);
  __m128 acc[M];
  for (int j = 0; j < M; j++) acc[j] = _mm_setzero_ps();
  const __m512i zero = _mm512_setzero_si512();
  // the order of the sums of sixteen values after vpackssdw
  const __m512i first =
      _mm512_setr_epi64(0x0000000000000000, 0x0004000400040004, 0x0001000100010001, 0x0005000500050005,
                        0x0002000200020002, 0x0006000600060006, 0x0003000300030003, 0x0007000700070007);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(8));
  const BlockQ8K* x = t.blocks + batch_row * blocks;
  for (int64_t b = 0; b < blocks; b++, x++) {
    ahead.ask(place);
    const __m128 d = _mm_mul_ps(grid_d<Block>(place), _mm_set1_ps(step));
    __m512i sum[M][4];
    for (int r = 0; r < 4; r++) {
      GridRow w;
      if constexpr (M == 1)
        Format::take(place[r], w);
      else
        take_row<Block>(place[r], w);
      place[r] += sizeof(Block);
      const __m512i scales = _mm512_castsi256_si512(w.scales);
      const __m512i scale[2] = {_mm512_permutexvar_epi16(first, scales), _mm512_permutexvar_epi16(second, scales)};
      for (int j = 0; j < M; j++) {
        const BlockQ8K& xb = x[j * blocks];
        __m512i dot[4], total = zero;
        for (int c = 0; c < 4; c++) {
          __m512i bytes = _mm512_load_si512(xb.q + 64 * c);
          if constexpr (Format::offset == 0) bytes = _mm512_mask_sub_epi8(bytes, w.negative[c], zero, bytes);
          dot[c] = _mm512_dpbusd_epi32(zero, w.q[c], bytes);  // at most 4 * 62 * 127: fits in 16 bits
        }
        if constexpr (Format::offset != 0) {
          const __m256i sums = _mm256_load_si256((const __m256i*)xb.sums16);
          total = _mm512_zextsi256_si512(
              _mm256_mullo_epi32(_mm256_madd_epi16(w.scales, sums), _mm256_set1_epi32(-Format::offset)));
        }
        total = _mm512_dpwssd_epi32(total, _mm512_packs_epi32(dot[0], dot[1]), scale[0]);
        sum[j][r] = _mm512_dpwssd_epi32(total, _mm512_packs_epi32(dot[2], dot[3]), scale[1]);
      }
    }
    for (int j = 0; j < M; j++) {
      const __m128i sums = reduce_four(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
      acc[j] = _mm_fmadd_ps(_mm_mul_ps(_mm_cvtepi32_ps(sums), d), _mm_set1_ps(x[j * blocks].d), acc[j]);
    }
  }
  for (int j = 0; j < M; j++) store_four_rows(t.y + (batch_row + j) * t.y_stride, rows, acc[j]);
}

}  // namespace
}  // namespace qtensor
