// The formats without kernels of their own. One kernel serves all formats of a kind. It branches on the format, which
// is the same for all threads, and unpacks four values at a time, just before they are multiplied.
// Layouts and their source: kernels/portable/unpacked_blocks.h.
#pragma once

#include "cuda/block_products.h"
#include "grids.h"

namespace qtensor {
namespace cuda {

// Negates those of four positive bytes whose bit is set. No byte is 0, so there is no carry between bytes.
LANES_DEVICE uint32_t with_signs(uint32_t bytes, uint32_t bits) {
  const uint32_t ones = (bits & 15) * 0x00204081 & 0x01010101;
  return (bytes ^ ones * 255) + ones;
}
LANES_DEVICE uint32_t plus_each(uint32_t a, uint32_t b) {
  return ((a & 0x7f7f7f7f) + (b & 0x7f7f7f7f)) ^ ((a ^ b) & 0x80808080);
}
// Looks up bytes below 16 in a table of sixteen bytes.
LANES_DEVICE uint32_t look_up(const uint32_t (&table)[4], uint32_t at) {
  uint32_t low = at & 0x07070707;
  low |= low >> 4;
  low = (low & 0xff) | (low >> 8 & 0xff00);
  const uint32_t upper = (at >> 3 & 0x01010101) * 255;
  return (__byte_perm(table[0], table[1], low) & ~upper) | (__byte_perm(table[2], table[3], low) & upper);
}
LANES_DEVICE uint32_t levels_of_iq4(uint32_t at) {
  const uint32_t table[4] = {0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535};
  return look_up(table, at);
}
LANES_DEVICE uint32_t levels_of_mxfp4(uint32_t at) {
  const uint32_t table[4] = {0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc};
  return look_up(table, at);
}
// The highest base-three digit of each byte after multiplication by a power of three. Two bytes at a time.
LANES_DEVICE uint32_t trits_of(uint32_t bytes, uint32_t power) {
  const uint32_t even = (bytes & 0x00ff00ff) * power & 0x00ff00ff;
  const uint32_t odd = (bytes >> 8 & 0x00ff00ff) * power & 0x00ff00ff;
  return minus_each((even * 3 >> 8 & 0x00030003) | (odd * 3 & 0x03000300), 0x01010101);
}
LANES_DEVICE uint32_t row_of_eight(const uint64_t* grid, uint32_t row, int half) {
  return reinterpret_cast<const uint32_t*>(grid)[2 * row + uint32_t(half)];
}

// ---- blocks of 256 values ----

// Values 4q .. 4q + 3 of a group of sixteen.
LANES_DEVICE uint32_t four_of_256(Format format, const Grids* grids, const uint8_t* w, int group, int q) {
  const int j = group / 2;                        // number of their 32 values
  const int i = 2 * group + q / 2, half = q % 2;  // number of their eight values, and which half of them
  const int r = 4 * group + q;                    // number of the four
  const int pairs_at = 32 * (group / 8) + 16 * (group % 2) + 4 * q, pairs_shift = 2 * (j % 4);
  switch (format) {
    case Format::Q2_K:
      return load4(w + 16 + pairs_at) >> pairs_shift & 0x03030303;
    case Format::TQ2_0:
      return minus_each(load4(w + pairs_at) >> pairs_shift & 0x03030303, 0x01010101);
    case Format::Q3_K: {
      const uint32_t low = load4(w + 32 + pairs_at) >> pairs_shift & 0x03030303;
      const uint32_t high = load4(w + 16 * (group % 2) + 4 * q) >> j & 0x01010101;
      return minus_each(low | high << 2, 0x04040404);
    }
    case Format::IQ4_XS:
      return levels_of_iq4(load4(w + 8 + 16 * j + 4 * q) >> (4 * (group % 2)) & 0x0f0f0f0f);
    case Format::IQ2_XXS: {
      const uint32_t signs = grids->even_signs[load4(w + 8 * j + 4) >> (7 * (i % 4)) & 127];
      return with_signs(row_of_eight(grids->iq2_xxs, w[8 * j + i % 4], half), signs >> (4 * half));
    }
    case Format::IQ2_XS: {
      const uint32_t word = load4(w + 4 * group) >> (16 * (q / 2)) & 0xffff;
      return with_signs(row_of_eight(grids->iq2_xs, word & 511, half), grids->even_signs[word >> 9] >> (4 * half));
    }
    case Format::IQ2_S: {
      const uint32_t row = w[i] | uint32_t(w[64 + i / 4] >> (2 * (i % 4)) & 3) << 8;
      return with_signs(row_of_eight(grids->iq2_s, row, half), w[32 + i] >> (4 * half));
    }
    case Format::IQ3_XXS: {
      const uint32_t signs = grids->even_signs[load4(w + 64 + 4 * j) >> (7 * (i % 4)) & 127];
      return with_signs(grids->iq3_xxs[w[r]], signs >> (4 * half));
    }
    case Format::IQ3_S:
      return with_signs(grids->iq3_s[w[r] | uint32_t(w[64 + r / 8] >> (r % 8) & 1) << 8], w[72 + i] >> (4 * half));
    case Format::IQ1_S: {
      const uint32_t high = load4(w + 32 + 4 * (j / 2)) >> (16 * (j % 2));
      const uint32_t row = w[i] | (high >> (3 * (i % 4)) & 7) << 8;
      return plus_each(row_of_eight(grids->iq1, row, half), high & 0x8000 ? 0xffffffff : 0x01010101);
    }
    case Format::IQ1_M: {
      const uint32_t high = w[32 + i / 2] >> (4 * (i % 2));
      return plus_each(row_of_eight(grids->iq1, w[i] | (high & 7) << 8, half), high & 8 ? 0xffffffff : 0x01010101);
    }
    default: {  // TQ1_0: 32 bytes of five digits, sixteen bytes of five, and four bytes of four
      const int digit = group < 10 ? j : group < 15 ? group - 10 : q;
      const int at = group < 10 ? 16 * (group % 2) + 4 * q : group < 15 ? 32 + 4 * q : 48;
      return trits_of(load4(w + at), digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81);
    }
  }
}

LANES_DEVICE int scale_of_16(Format format, const uint8_t* w, int group) {
  const int j = group / 2;
  switch (format) {
    case Format::Q2_K:
      return w[group] & 15;
    case Format::Q3_K: {
      const uint8_t* const scales = w + 96;
      const int low = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4;
      return (low | (scales[8 + group % 4] >> (2 * (group / 4)) & 3) << 4) - 32;
    }
    case Format::IQ4_XS:
      return int((load4(w) >> (16 + 2 * j) & 3) << 4 | (w[4 + j / 2] >> (4 * (j % 2)) & 15)) - 32;
    case Format::IQ2_XXS:
      return int(load4(w + 8 * j + 4) >> 28) * 2 + 1;
    case Format::IQ2_XS:
      return (w[64 + j] >> (4 * (group % 2)) & 15) * 2 + 1;
    case Format::IQ2_S:
      return (w[72 + j] >> (4 * (group % 2)) & 15) * 2 + 1;
    case Format::IQ3_XXS:
      return int(load4(w + 64 + 4 * j) >> 28) * 2 + 1;
    case Format::IQ3_S:
      return (w[104 + j / 2] >> (4 * (j % 2)) & 15) * 2 + 1;
    case Format::IQ1_S:
      return int(load4(w + 32 + 4 * (j / 2)) >> (16 * (j % 2) + 12) & 7) * 2 + 1;
    case Format::IQ1_M:
      return int(load4(w + 48 + 4 * (group / 8)) >> (16 * (j / 2 % 2) + 3 * (group % 4)) & 7) * 2 + 1;
    default:  // TQ1_0, TQ2_0
      return 1;
  }
}

// The factor of `products`. `row` is the weight's row, whose halves may follow all levels.
LANES_DEVICE float step_of_256(Format format, const uint8_t* row, int blocks, int b) {
  const BlockLayout of = layout_of(format);
  const uint8_t* const w = row + b * of.levels;
  if (format == Format::Q2_K) return half_to_float(uint16_t(load4(w + 80)));
  if (format == Format::IQ4_XS) return half_to_float(uint16_t(load4(w)));
  if (format == Format::IQ1_M) {
    const uint32_t low = load4(w + 48), high = load4(w + 52);
    const uint32_t d = (low >> 12 & 0x000f) | (low >> 24 & 0x00f0) | (high >> 4 & 0x0f00) | (high >> 16 & 0xf000);
    return __fmul_rn(half_to_float(uint16_t(d)), 0.125f);
  }
  const float d = half_to_float(reinterpret_cast<const uint16_t*>(row + int64_t(blocks) * of.levels)[b]);
  if (format == Format::IQ2_XXS || format == Format::IQ2_XS || format == Format::IQ2_S || format == Format::IQ1_S)
    return __fmul_rn(d, 0.125f);
  return format == Format::IQ3_XXS ? __fmul_rn(d, 0.25f) : d;
}
LANES_DEVICE float min_step_of_q2_k(const uint8_t* w) { return half_to_float(uint16_t(load4(w + 80) >> 16)); }

struct Unpacked256 {
  static constexpr bool kScaled = false;
  const uint8_t* w[2];
  float d[2];
  LANES_DEVICE void load(const Product& t, const uint8_t* const (&row)[2], int b, int) {
    for (int i = 0; i < 2; i++) {
      w[i] = row[i] + b * layout_of(t.format).levels;
      d[i] = step_of_256(t.format, row[i], t.blocks, b);
    }
  }
  template <int TILES, class Column>
  LANES_DEVICE void steps(const Product& t, int, int q, Column x, float (&f)[TILES][4]) const {
    int products[TILES][4] = {};
    LANES_LOOP
    for (int group = 0; group < 16; group++) {
      uint32_t a[2];
      int scale[2];
      for (int i = 0; i < 2; i++) {
        a[i] = four_of_256(t.format, t.grids, w[i], group, q);
        scale[i] = scale_of_16(t.format, w[i], group);
      }
      LANES_UNROLL
      for (int n = 0; n < TILES; n++) {
        int sum[4] = {0, 0, 0, 0};
        mma_s8_short(sum, a, word(x(n), 16 * group + 4 * q));
        for (int i = 0; i < 4; i++) products[n][i] += sum[i] * scale[i / 2];
      }
    }
    LANES_UNROLL
    for (int n = 0; n < TILES; n++)
      for (int i = 0; i < 4; i++) f[n][i] = __fmul_rn(__int2float_rn(products[n][i]), d[i / 2]);
    if (t.format != Format::Q2_K) return;
    // Two more mma, for sixteen mins and sixteen sums.
    const uint32_t a[2] = {load4(w[0] + 4 * q) >> 4 & 0x0f0f0f0f, load4(w[1] + 4 * q) >> 4 & 0x0f0f0f0f};
    const float dmin[2] = {min_step_of_q2_k(w[0]), min_step_of_q2_k(w[1])};
    LANES_UNROLL
    for (int n = 0; n < TILES; n++) {
      const uint2 digit = digits_of(x(n) + kSums16At + 8 * q);
      int low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
      mma_s8_short(low, a, digit.x);
      mma_s8_short(high, a, digit.y);
      for (int i = 0; i < 4; i++) f[n][i] = __fmaf_rn(-__int2float_rn(low[i] + 128 * high[i]), dmin[i / 2], f[n][i]);
    }
  }
};

// ---- blocks of 32 values ----

// Values 4q .. 4q + 3 of each half.
LANES_DEVICE uint2 four_of_32(Format format, const uint8_t* w, int q) {
  const bool fifth = format == Format::Q5_0 || format == Format::Q5_1;
  const uint32_t nibbles = load4(w + (fifth ? 4 : 0) + 4 * q);
  uint2 levels = {nibbles & 0x0f0f0f0f, nibbles >> 4 & 0x0f0f0f0f};
  if (fifth) {
    const auto spread = [](uint32_t bits) { return ((bits & 15) * 0x00204081 & 0x01010101) << 4; };
    const uint32_t high = load4(w);
    levels.x |= spread(high >> (4 * q)), levels.y |= spread(high >> (16 + 4 * q));
    if (format == Format::Q5_1) return levels;
    return {minus_each(levels.x, 0x10101010), minus_each(levels.y, 0x10101010)};
  }
  if (format == Format::IQ4_NL) return {levels_of_iq4(levels.x), levels_of_iq4(levels.y)};
  return {levels_of_mxfp4(levels.x), levels_of_mxfp4(levels.y)};
}

// d and m of a block; those of a row follow all its levels.
struct StepOf32 {
  float d, m;
  LANES_DEVICE StepOf32(Format format, const uint8_t* steps, int block) : m(0.0f) {
    if (format == Format::MXFP4) {
      const uint32_t e = steps[block];  // 2^(e - 128)
      d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
      return;
    }
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(steps);
    const int each = format == Format::Q5_1 ? 2 : 1;
    d = half_to_float(halves[each * block]);
    if (format == Format::Q5_1) m = half_to_float(halves[each * block + 1]);
  }
};

struct Unpacked32 {
  static constexpr bool kScaled = true;
  const uint8_t *w[2], *d[2];
  LANES_DEVICE void load(const Product& t, const uint8_t* const (&row)[2], int b, int) {
    const int levels = layout_of(t.format).levels;
    for (int i = 0; i < 2; i++) w[i] = row[i] + 8 * b * levels, d[i] = row[i] + int64_t(t.sub_blocks) * levels;
  }
  template <int TILES, class Column>
  LANES_DEVICE void steps(const Product& t, int b, int q, Column x, float (&f)[TILES][4]) const {
    const int count = sub_blocks_of(t, b), levels = layout_of(t.format).levels;
    const bool with_min = t.format == Format::Q5_1;
    LANES_UNROLL
    for (int n = 0; n < TILES; n++)
      for (int i = 0; i < 4; i++) f[n][i] = 0.0f;
    LANES_LOOP
    for (int j = 0; j < count; j++) {
      const uint2 of[2] = {four_of_32(t.format, w[0] + j * levels, q), four_of_32(t.format, w[1] + j * levels, q)};
      const uint32_t a[4] = {of[0].x, of[1].x, of[0].y, of[1].y};
      const StepOf32 step[2] = {{t.format, d[0], 8 * b + j}, {t.format, d[1], 8 * b + j}};
      LANES_UNROLL
      for (int n = 0; n < TILES; n++) {
        int sum[4] = {0, 0, 0, 0};
        mma_s8(sum, a, {word(x(n), 32 * j + 4 * q), word(x(n), 32 * j + 16 + 4 * q)});
        const float mine = scale_of_32(x(n), j);
        const OfOutputs dx(mine, q), sums(with_min ? __fmul_rn(sum_of_32(x(n), j), mine) : 0.0f, q);
        for (int i = 0; i < 4; i++) {
          f[n][i] = __fmaf_rn(__int2float_rn(sum[i]), __fmul_rn(step[i / 2].d, dx.of[i % 2]), f[n][i]);
          if (with_min) f[n][i] = __fmaf_rn(sums.of[i % 2], step[i / 2].m, f[n][i]);
        }
      }
    }
  }
};

// ---- single values, for embeddings ----

LANES_DEVICE float value_of_256(Format format, const Grids* grids, const uint8_t* row, int blocks, int i) {
  const int b = i / 256, group = i % 256 / 16;
  const uint8_t* const w = row + b * layout_of(format).levels;
  const int level = int8_t(four_of_256(format, grids, w, group, i % 16 / 4) >> (8 * (i % 4)));
  const float step = __fmul_rn(step_of_256(format, row, blocks, b), __int2float_rn(scale_of_16(format, w, group)));
  const float value = __fmul_rn(step, __int2float_rn(level));
  if (format != Format::Q2_K) return value;
  return __fsub_rn(value, __fmul_rn(min_step_of_q2_k(w), __int2float_rn(w[group] >> 4)));
}
LANES_DEVICE float value_of_32(Format format, const uint8_t* row, int blocks, int i) {
  const int levels = layout_of(format).levels, l = i % 32;
  const uint2 four = four_of_32(format, row + i / 32 * levels, l % 16 / 4);
  const StepOf32 step(format, row + int64_t(blocks) * levels, i / 32);
  const float value = __fmul_rn(step.d, __int2float_rn(int8_t((l < 16 ? four.x : four.y) >> (8 * (l % 4)))));
  return format == Format::Q5_1 ? __fadd_rn(value, step.m) : value;
}

}  // namespace cuda
}  // namespace qtensor
