// Shared by the kernels that use the cache: the address of a head of a block, rotation of a head by a warp, and levels.
#pragma once

#include "cache_format.h"
#include "cuda/float_steps.h"

namespace qtensor {
namespace cuda {

constexpr int kTile = int(kTilePositions);
// Pieces of a head: lane l of a warp holds dimensions l, l + 32, ... Heads of up to 128 dimensions have code of their
// own, because that for the largest heads is so long that fetching it takes longer than executing it.
constexpr int kMostPieces = 1024 / 32, kFewPieces = 128 / 32;

// The blocks of one layer, as in ops/attention.h.
struct Pool {
  uint8_t* data;
  int run, kv_heads, dim;
  CacheFormat format;
};
LANES_DEVICE uint8_t* head_of(const Pool& pool, int block, int head) {
  const int64_t number = (int64_t(block / pool.run) * pool.kv_heads + head) * pool.run + block % pool.run;
  return pool.data + number * head_bytes(pool.format, pool.dim);
}

// Row i is at positions[i] of sequences[i]; tables[s][t] is the block of tile t of sequence s.
struct Places {
  const int *positions, *sequences, *tables;
  const int* window_tables;  // null for 8 bits and more
  int rows, table_length;
};

// A table of levels below 8 bits (kernels/portable/level_tables.h), filled by the host.
struct Levels {
  int half;
  float begins[7], larger[7];
  float first, deviations_of_one;  // deviations_of_one: deviations / 127
  uint32_t bytes[4];               // sixteen signed levels
};

// rotate_head of kernels/portable/head_vectors.h.
template <int PIECES>
LANES_DEVICE void rotate(float (&v)[PIECES], int dim, int lane) {
  const int n = dim & -dim, pieces = (dim + 31) / 32;
  const float norm = __fdiv_rn(1.0f, __fsqrt_rn(float(n)));
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++) {
    if (i >= pieces) continue;  // the same for all lanes
    LANES_UNROLL
    for (int width = 1; width <= 8; width *= 2)
      v[i] = __fmaf_rn(v[i], lane & width ? -1.0f : 1.0f, __shfl_xor_sync(kWarp, v[i], width));
    v[i] = __fmul_rn(v[i], norm);
    if (n > 16) {
      const float other = __shfl_xor_sync(kWarp, v[i], 16);
      v[i] = lane & 16 ? __fsub_rn(other, v[i]) : __fadd_rn(v[i], other);
    }
  }
  LANES_UNROLL
  for (int distance = 1; distance < PIECES; distance *= 2) {
    LANES_UNROLL
    for (int i = 0; i < PIECES; i++)
      if (32 * distance < n && i < pieces && !(i & distance)) {
        const float a = v[i], b = v[i + distance];
        v[i] = __fadd_rn(a, b);
        v[i + distance] = __fsub_rn(a, b);
      }
  }
}
template <int PIECES>
LANES_DEVICE void load_head(const float* x, int dim, int lane, float (&v)[PIECES]) {
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++) v[i] = lane + 32 * i < dim ? x[lane + 32 * i] : 0.0f;
}
// The bits of the largest magnitude; 0x7f800000 or above if a value is infinite or NaN.
template <int PIECES>
LANES_DEVICE uint32_t top_bits_of(const float (&v)[PIECES], int dim, int lane) {
  uint32_t bits = 0;
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++) {
    const uint32_t magnitude = lane + 32 * i < dim ? __float_as_uint(v[i]) & 0x7fffffff : 0;
    bits = bits > magnitude ? bits : magnitude;
  }
  return __reduce_max_sync(kWarp, bits);
}
LANES_DEVICE int byte_level(float x, float inverse) {  // x * inverse, limited to magnitude 127, rounded to even
  float y = __fmul_rn(x, inverse);
  y = y < 127.0f ? y : 127.0f;
  y = y > -127.0f ? y : -127.0f;
  return __float2int_rn(y);
}

// Signed levels of four numbers, one in each byte.
LANES_DEVICE uint32_t selector_of(uint32_t numbers) {  // their lower three bits as a selector of __byte_perm
  const uint32_t three = numbers & 0x07070707, pairs = three | three >> 4;
  return (pairs & 0xff) | (pairs >> 8 & 0xff00);
}
LANES_DEVICE uint32_t levels_of_4_bits(const Levels& t, uint32_t numbers) {
  const uint32_t which = selector_of(numbers), upper = (numbers >> 3 & 0x01010101) * 255;
  return (__byte_perm(t.bytes[2], t.bytes[3], which) & upper) | (__byte_perm(t.bytes[0], t.bytes[1], which) & ~upper);
}
LANES_DEVICE uint32_t levels_of_3_bits(const Levels& t, uint32_t numbers) {
  return __byte_perm(t.bytes[0], t.bytes[1], selector_of(numbers));
}

// Four signed levels of a group, in lane `lane` of rows of `width` lanes: dimensions of a key, or positions of a value.
LANES_DEVICE uint32_t group_levels(const uint32_t* words, int bits, const Levels& levels, int group, int width,
                                   int lane) {
  if (bits == 8) return words[group * width + lane] ^ 0x80808080;
  if (bits == 4) return levels_of_4_bits(levels, words[group / 2 * width + lane] >> (4 * (group % 2)) & 0x0f0f0f0f);
  constexpr int kLowRows = kTile / 4 / 4;  // only values have 3 bits
  const uint32_t low = words[group / 4 * width + lane] >> (2 * (group % 4)) & 0x03030303;
  const uint32_t high = words[(kLowRows + group / 8) * width + lane] >> (group % 8) & 0x01010101;
  return levels_of_3_bits(levels, low | high << 2);
}

}  // namespace cuda
}  // namespace qtensor
