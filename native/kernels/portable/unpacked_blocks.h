// All block formats except Q4_K, Q5_K and Q6_K, unpacked to signed bytes and integer scales. Kernels process only two
// kinds of unpacked blocks, so a format needs only an `unpack` function.
// Source of the layouts: ggml's ggml-common.h and ggml-quants.c.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "grids.h"
#include "kernels/portable/always_inline.h"

namespace qtensor {
namespace {

// 256 values: d * kStep * scale * q - dmin * min, with a scale and a min for each sixteen values. d and dmin are halves
// from the file. kStep of the format is a power of two, so that scales and values are integers. Values times scales are
// below 2^13, so sums of 256 products with activations fit in 32 bits.
struct alignas(64) Unpacked256 {
  int8_t q[256];
  int16_t scales[16], mins[16];
  half d, dmin;
};
// 32 values: d * q + m.
struct alignas(32) Unpacked32 {
  int8_t q[32];
  float d, m;
};

template <class T>
QTENSOR_INLINE void read(T& to, const void* from) {
  __builtin_memcpy(&to, from, sizeof(T));  // data in a file is not aligned
}

// ---- blocks of 32 values ----

// Low nibbles are the first values, and high nibbles the others.
QTENSOR_INLINE void split_nibbles(const uint8_t* qs, uint8_t* out, int count) {
  for (int l = 0; l < count; l++) {
    out[l] = qs[l] & 15;
    out[l + count] = qs[l] >> 4;
  }
}
QTENSOR_INLINE void split_with_fifth(const uint8_t* qs, const uint8_t* qh, int offset, int8_t* out) {
  uint8_t low[32];
  split_nibbles(qs, low, 16);
  uint32_t high;
  read(high, qh);
  for (int l = 0; l < 32; l++) out[l] = int8_t(int(low[l] | (high >> l & 1) << 4) - offset);
}
QTENSOR_INLINE void look_up(const int8_t (&table)[16], const uint8_t* qs, int8_t* out) {
  for (int l = 0; l < 16; l++) {
    out[l] = table[qs[l] & 15];
    out[l + 16] = table[qs[l] >> 4];
  }
}

constexpr int8_t kLevelsIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kLevelsMXFP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // two times E2M1

QTENSOR_INLINE float power_of_two(uint8_t e) {  // 2^(e - 128)
  const uint32_t bits = e < 2 ? uint32_t(0x00200000) << e : uint32_t(e - 1) << 23;
  float power;
  read(power, &bits);
  return power;
}

// as_float is the family's function to convert a half.
template <class HALF>
QTENSOR_INLINE void unpack(const BlockQ8_0& w, Unpacked32& out, HALF as_float) {
  read(out.q, w.qs);
  out.d = as_float(w.d);
}
template <class HALF>
QTENSOR_INLINE void unpack(const BlockQ4_0& w, Unpacked32& out, HALF as_float) {
  split_nibbles(w.qs, (uint8_t*)out.q, 16);
  for (int8_t& q : out.q) q = int8_t(q - 8);
  out.d = as_float(w.d);
}
template <class HALF>
QTENSOR_INLINE void unpack(const BlockQ4_1& w, Unpacked32& out, HALF as_float) {
  split_nibbles(w.qs, (uint8_t*)out.q, 16);
  out.d = as_float(w.d);
  out.m = as_float(w.m);
}
template <class HALF>
QTENSOR_INLINE void unpack(const BlockQ5_0& w, Unpacked32& out, HALF as_float) {
  split_with_fifth(w.qs, w.qh, 16, out.q);
  out.d = as_float(w.d);
}
template <class HALF>
QTENSOR_INLINE void unpack(const BlockQ5_1& w, Unpacked32& out, HALF as_float) {
  split_with_fifth(w.qs, w.qh, 0, out.q);
  out.d = as_float(w.d);
  out.m = as_float(w.m);
}
template <class HALF>
QTENSOR_INLINE void unpack(const BlockIQ4_NL& w, Unpacked32& out, HALF as_float) {
  look_up(kLevelsIQ4, w.qs, out.q);
  out.d = as_float(w.d);
}
template <class HALF>
QTENSOR_INLINE void unpack(const BlockMXFP4& w, Unpacked32& out, HALF) {
  look_up(kLevelsMXFP4, w.qs, out.q);
  out.d = power_of_two(w.e);
}

// ---- blocks of 256 values ----

// Unpacks the four two-bit values of each byte: 64 bytes become 256 values.
QTENSOR_INLINE void split_pairs(const uint8_t* qs, uint8_t* out) {
  for (int n = 0; n < 2; n++)
    for (int j = 0; j < 4; j++)
      for (int l = 0; l < 32; l++) out[128 * n + 32 * j + l] = qs[32 * n + l] >> (2 * j) & 3;
}

QTENSOR_INLINE void unpack(const BlockQ2_K& w, Unpacked256& out) {
  split_pairs(w.qs, (uint8_t*)out.q);
  for (int j = 0; j < 16; j++) {
    out.scales[j] = w.scales[j] & 15;
    out.mins[j] = w.scales[j] >> 4;
  }
  out.d = w.d;
  out.dmin = w.dmin;
}

QTENSOR_INLINE void unpack(const BlockQ3_K& w, Unpacked256& out) {
  uint8_t low[256];
  split_pairs(w.qs, low);
  for (int j = 0; j < 8; j++)
    for (int l = 0; l < 32; l++) out.q[32 * j + l] = int8_t(low[32 * j + l] + ((w.hmask[l] >> j & 1) << 2) - 4);
  for (int j = 0; j < 16; j++) {
    const int four = j < 8 ? w.scales[j] & 15 : w.scales[j - 8] >> 4;
    out.scales[j] = int16_t((four | (w.scales[8 + j % 4] >> (2 * (j / 4)) & 3) << 4) - 32);
  }
  out.d = w.d;
}

QTENSOR_INLINE void unpack_scales(const BlockIQ4_XS& w, Unpacked256& out) {
  for (int j = 0; j < 8; j++) {
    const int scale = (w.scales_l[j / 2] >> (4 * (j % 2)) & 15) | (w.scales_h >> (2 * j) & 3) << 4;
    out.scales[2 * j] = out.scales[2 * j + 1] = int16_t(scale - 32);
  }
}
QTENSOR_INLINE void unpack(const BlockIQ4_XS& w, Unpacked256& out) {
  for (int j = 0; j < 8; j++) look_up(kLevelsIQ4, w.qs + 16 * j, out.q + 32 * j);
  unpack_scales(w, out);
  out.d = w.d;
}

// Applies bytes of signs to grid rows: (row ^ sign) - sign, byte by byte.
struct SignedRows {
  alignas(64) uint64_t rows[32];
  alignas(64) uint64_t signs[32];
};
QTENSOR_INLINE void sign_rows(const SignedRows& from, int8_t* q) {
  const auto* rows = (const int8_t*)from.rows;
  const auto* signs = (const int8_t*)from.signs;
  for (int l = 0; l < 256; l++) q[l] = int8_t((rows[l] ^ signs[l]) - signs[l]);
}
QTENSOR_INLINE uint64_t two_rows(uint32_t first, uint32_t second) { return first | uint64_t(second) << 32; }

QTENSOR_INLINE void unpack(const BlockIQ2_XXS& w, Unpacked256& out) {
  SignedRows rows;
  for (int j = 0; j < 8; j++) {
    uint32_t words;
    read(words, w.qs + 8 * j + 4);
    for (int l = 0; l < 4; l++) {
      rows.rows[4 * j + l] = kGrids.iq2_xxs[w.qs[8 * j + l]];
      rows.signs[4 * j + l] = kGrids.signs[kGrids.even_signs[words >> (7 * l) & 127]];
    }
    out.scales[2 * j] = out.scales[2 * j + 1] = int16_t(2 * (words >> 28) + 1);
  }
  sign_rows(rows, out.q);
  out.d = w.d;
}

// Scales of IQ2_XS and IQ2_S: a nibble for each sixteen values.
QTENSOR_INLINE void odd_scales(const uint8_t* scales, int16_t* out) {
  for (int j = 0; j < 16; j++) out[j] = int16_t(2 * (scales[j / 2] >> (4 * (j % 2)) & 15) + 1);
}

QTENSOR_INLINE void unpack(const BlockIQ2_XS& w, Unpacked256& out) {
  SignedRows rows;
  for (int i = 0; i < 32; i++) {
    rows.rows[i] = kGrids.iq2_xs[w.qs[i] & 511];
    rows.signs[i] = kGrids.signs[kGrids.even_signs[w.qs[i] >> 9]];
  }
  sign_rows(rows, out.q);
  odd_scales(w.scales, out.scales);
  out.d = w.d;
}

QTENSOR_INLINE void unpack(const BlockIQ2_S& w, Unpacked256& out) {
  SignedRows rows;
  for (int i = 0; i < 32; i++) {
    rows.rows[i] = kGrids.iq2_s[w.qs[i] | (w.qh[i / 4] >> (2 * (i % 4)) & 3) << 8];
    rows.signs[i] = kGrids.signs[w.signs[i]];
  }
  sign_rows(rows, out.q);
  odd_scales(w.scales, out.scales);
  out.d = w.d;
}

QTENSOR_INLINE void unpack(const BlockIQ3_XXS& w, Unpacked256& out) {
  SignedRows rows;
  for (int j = 0; j < 8; j++) {
    uint32_t words;
    read(words, w.scales + 4 * j);
    for (int l = 0; l < 4; l++) {
      const int i = 4 * j + l;
      rows.rows[i] = two_rows(kGrids.iq3_xxs[w.qs[2 * i]], kGrids.iq3_xxs[w.qs[2 * i + 1]]);
      rows.signs[i] = kGrids.signs[kGrids.even_signs[words >> (7 * l) & 127]];
    }
    out.scales[2 * j] = out.scales[2 * j + 1] = int16_t(2 * (words >> 28) + 1);
  }
  sign_rows(rows, out.q);
  out.d = w.d;
}

QTENSOR_INLINE void unpack(const BlockIQ3_S& w, Unpacked256& out) {
  SignedRows rows;
  for (int i = 0; i < 32; i++) {
    const int high = w.qh[i / 4] >> (2 * (i % 4));
    rows.rows[i] =
        two_rows(kGrids.iq3_s[w.qs[2 * i] | (high & 1) << 8], kGrids.iq3_s[w.qs[2 * i + 1] | (high & 2) << 7]);
    rows.signs[i] = kGrids.signs[w.signs[i]];
  }
  sign_rows(rows, out.q);
  for (int j = 0; j < 16; j++) out.scales[j] = int16_t(2 * (w.scales[j / 4] >> (4 * (j / 2 % 2)) & 15) + 1);
  out.d = w.d;
}

// Values of IQ1, multiplied by eight: those of the grid plus 1 or -1.
QTENSOR_INLINE void shifted_row(uint64_t row, bool down, int8_t* q) {
  int8_t bytes[8];
  read(bytes, &row);
  for (int k = 0; k < 8; k++) q[k] = int8_t(bytes[k] + (down ? -1 : 1));
}

QTENSOR_INLINE void unpack(const BlockIQ1_S& w, Unpacked256& out) {
  for (int i = 0; i < 32; i++) {
    const int high = w.qh[i / 4];
    shifted_row(kGrids.iq1[w.qs[i] | (high >> (3 * (i % 4)) & 7) << 8], high & 0x8000, out.q + 8 * i);
  }
  for (int j = 0; j < 16; j++) out.scales[j] = int16_t(2 * (w.qh[j / 2] >> 12 & 7) + 1);
  out.d = w.d;
}

QTENSOR_INLINE void unpack(const BlockIQ1_M& w, Unpacked256& out) {
  for (int i = 0; i < 32; i++) {
    const int high = w.qh[i / 2] >> (4 * (i % 2));
    shifted_row(kGrids.iq1[w.qs[i] | (high & 7) << 8], high & 8, out.q + 8 * i);
  }
  for (int j = 0; j < 16; j++) out.scales[j] = int16_t(2 * (w.scales[j / 4] >> (3 * (j % 4)) & 7) + 1);
  out.d = half(w.scales[0] >> 12 | (w.scales[1] >> 8 & 0x00f0) | (w.scales[2] >> 4 & 0x0f00) | (w.scales[3] & 0xf000));
}

// A base-three digit of a byte. Multiplication by `power`, a power of three, makes it the highest digit.
QTENSOR_INLINE int8_t trit(uint8_t byte, uint8_t power) {
  return int8_t((uint16_t(uint8_t(byte * power)) * 3 >> 8) - 1);
}
QTENSOR_INLINE void plain_scales(int16_t* scales) {
  for (int j = 0; j < 16; j++) scales[j] = 1;
}

QTENSOR_INLINE void unpack(const BlockTQ1_0& w, Unpacked256& out) {
  constexpr uint8_t powers[5] = {1, 3, 9, 27, 81};
  for (int n = 0; n < 5; n++) {
    for (int l = 0; l < 32; l++) out.q[32 * n + l] = trit(w.qs[l], powers[n]);
    for (int l = 0; l < 16; l++) out.q[160 + 16 * n + l] = trit(w.qs[32 + l], powers[n]);
  }
  for (int n = 0; n < 4; n++)
    for (int l = 0; l < 4; l++) out.q[240 + 4 * n + l] = trit(w.qh[l], powers[n]);
  plain_scales(out.scales);
  out.d = w.d;
}

QTENSOR_INLINE void unpack(const BlockTQ2_0& w, Unpacked256& out) {
  uint8_t pairs[256];
  split_pairs(w.qs, pairs);
  for (int l = 0; l < 256; l++) out.q[l] = int8_t(pairs[l] - 1);
  plain_scales(out.scales);
  out.d = w.d;
}

// ---- the formats ----

template <class BLOCK, int DIVISOR = 1, bool HAS_MINS = false>
struct Format256 {
  using Block = BLOCK;
  static constexpr bool kIs256 = true, kHasMins = HAS_MINS;
  static constexpr float kStep = 1.0f / DIVISOR;  // a power of two, so d * kStep is exact
};
template <class BLOCK, bool HAS_MINS = false>
struct Format32 {
  using Block = BLOCK;
  static constexpr bool kIs256 = false, kHasMins = HAS_MINS;
};

// Returns use(Format256<...>{}), or other() for formats of another kind.
template <class Use, class Other>
auto with_format_256(Format format, Use use, Other other) {
  switch (format) {
    case Format::Q2_K:
      return use(Format256<BlockQ2_K, 1, true>{});
    case Format::Q3_K:
      return use(Format256<BlockQ3_K>{});
    case Format::IQ4_XS:
      return use(Format256<BlockIQ4_XS>{});
    case Format::IQ2_XXS:
      return use(Format256<BlockIQ2_XXS, 8>{});
    case Format::IQ2_XS:
      return use(Format256<BlockIQ2_XS, 8>{});
    case Format::IQ2_S:
      return use(Format256<BlockIQ2_S, 8>{});
    case Format::IQ3_XXS:
      return use(Format256<BlockIQ3_XXS, 4>{});
    case Format::IQ3_S:
      return use(Format256<BlockIQ3_S>{});
    case Format::IQ1_S:
      return use(Format256<BlockIQ1_S, 8>{});
    case Format::IQ1_M:
      return use(Format256<BlockIQ1_M, 8>{});
    case Format::TQ1_0:
      return use(Format256<BlockTQ1_0>{});
    case Format::TQ2_0:
      return use(Format256<BlockTQ2_0>{});
    default:
      return other();
  }
}
// Returns use(Format32<...>{}), or other() for formats of another kind.
template <class Use, class Other>
auto with_format_32(Format format, Use use, Other other) {
  switch (format) {
    case Format::Q8_0:
      return use(Format32<BlockQ8_0>{});
    case Format::Q4_0:
      return use(Format32<BlockQ4_0>{});
    case Format::Q4_1:
      return use(Format32<BlockQ4_1, true>{});
    case Format::Q5_0:
      return use(Format32<BlockQ5_0>{});
    case Format::Q5_1:
      return use(Format32<BlockQ5_1, true>{});
    case Format::IQ4_NL:
      return use(Format32<BlockIQ4_NL>{});
    case Format::MXFP4:
      return use(Format32<BlockMXFP4>{});
    default:
      return other();
  }
}
template <class Use, class Other>
auto with_unpacked_format(Format format, Use use, Other other) {
  return with_format_32(format, use, [&] { return with_format_256(format, use, other); });
}

}  // namespace
}  // namespace qtensor
