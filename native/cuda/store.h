// Stores new keys and values in the cache: they are rotated, rounded to the levels of the format, and written.
#pragma once

#include "cuda/cache.h"

namespace qtensor {
namespace cuda {

// A warp processes the keys (blockIdx.y = 0) or the values of a head: of one row, or, if adjacent positions share
// bytes, of all rows in order.
struct Store {
  const float *k, *v;  // rows x heads x dim
  Places places;
  Pool pool, window;
  Levels key_levels, value_levels;
};
constexpr int kStoreThreads = 32;
static constexpr int store_shared_bytes(int dim) { return dim; }
static constexpr bool rows_share_bytes(CacheFormat f, bool keys) { return !keys && value_bits(f) < 8; }

// The sum of a[i] * b[i], computed by the virtual vector, whose lane l adds dimensions l, l + 16, ...
template <int PIECES>
LANES_DEVICE float dot_product(const float (&a)[PIECES], const float (&b)[PIECES], int dim, int lane) {
  float sum = 0.0f;
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++) {
    if (32 * i >= dim) continue;
    const float other_a = __shfl_xor_sync(kWarp, a[i], 16), other_b = __shfl_xor_sync(kWarp, b[i], 16);
    const bool upper = lane & 16;
    sum = __fmaf_rn(upper ? other_a : a[i], upper ? other_b : b[i], sum);
    if (32 * i + 16 < dim) sum = __fmaf_rn(upper ? a[i] : other_a, upper ? b[i] : other_b, sum);
  }
  return sum_of_lanes(sum);
}

// Writes the levels of a rotated head to `levels`, one byte each (below 8 bits: numbers of levels). Returns the scale.
template <int PIECES>
LANES_DEVICE uint16_t round_to_bytes(const float (&v)[PIECES], int dim, int lane, uint8_t* levels) {
  const uint32_t bits = top_bits_of(v, dim, lane);
  const uint16_t scale = float_to_half(__fdiv_rn(__uint_as_float(bits < 0x7f800000 ? bits : kNaN), 127.0f));
  const float step = half_to_float(bits < 0x7f800000 ? scale : uint16_t(0x7e00));
  const bool usable = step > 0.0f && step < 1e30f;
  const float inverse = __fdiv_rn(1.0f, step);
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++)
    if (lane + 32 * i < dim) levels[lane + 32 * i] = uint8_t(usable ? byte_level(v[i], inverse) + 128 : 128);
  return bits < 0x7f800000 ? scale : uint16_t(0x7e00);
}
template <int PIECES>
LANES_DEVICE uint16_t round_to_levels(const float (&v)[PIECES], int dim, int lane, const Levels& t, uint8_t* numbers) {
  const float squares = dot_product(v, v, dim, lane);
  const bool usable = squares >= 1e-30f && __float_as_uint(squares) < 0x7f800000;
  const float inverse =
      usable ? __fdiv_rn(1.0f, __fmul_rn(__fsqrt_rn(__fdiv_rn(squares, float(dim))), t.deviations_of_one)) : 0.0f;
  float level[PIECES];
  LANES_UNROLL
  for (int i = 0; i < PIECES; i++) {
    const float y = __fmul_rn(v[i], inverse), outward = __uint_as_float(__float_as_uint(y) & 0x7fffffff);
    int beyond = 0;
    float size = t.first;
    LANES_UNROLL
    for (int j = 0; j < 7; j++)
      if (j + 1 < t.half && outward > t.begins[j]) {
        beyond++;
        size = __fadd_rn(size, t.larger[j]);
      }
    const bool negative = y < 0.0f;
    level[i] = lane + 32 * i < dim ? negative ? -size : size : 0.0f;
    if (lane + 32 * i < dim)
      numbers[lane + 32 * i] = uint8_t(!usable ? t.half : negative ? t.half - 1 - beyond : t.half + beyond);
  }
  const float along = dot_product(v, level, dim, lane);
  if (usable) return float_to_half(__fdiv_rn(squares, along));
  return squares < 1e-30f ? uint16_t(0) : uint16_t(0x7e00);
}

// Writes one bit field of a byte.
LANES_DEVICE void put_field(uint8_t* at, int number, int from, int bits, int shift) {
  const int mask = (1 << bits) - 1;
  *at = uint8_t((*at & ~(mask << shift)) | (number >> from & mask) << shift);
}

template <int PIECES>
LANES_DEVICE void put(const Store& t, const float (&turned)[PIECES], const Pool& pool, int block, int of_head,
                      bool keys, int slot, int lane, uint8_t* levels) {
  const int dim = pool.dim, bits = keys ? key_bits(pool.format) : value_bits(pool.format);
  uint8_t* const head = head_of(pool, block, of_head);
  uint16_t* const scales = reinterpret_cast<uint16_t*>(head + scales_at(pool.format, dim)) + (keys ? 0 : kTile);
  const uint16_t scale = bits == 8 ? round_to_bytes(turned, dim, lane, levels)
                                   : round_to_levels(turned, dim, lane, keys ? t.key_levels : t.value_levels, levels);
  if (lane == 0) scales[slot] = scale;
  __syncwarp();
  if (keys) {  // words of four dimensions
    const uint32_t* const four = reinterpret_cast<const uint32_t*>(levels);
    uint32_t* const words = reinterpret_cast<uint32_t*>(head);
    for (int i = lane; i < dim * bits / 32; i += 32)
      words[i * kTile + slot] = bits == 8 ? four[i] : four[2 * i] | four[2 * i + 1] << 4;
  } else {
    uint8_t* const values = head + key_bytes(pool.format, dim) + slot % 4;
    const int group = slot / 4;
    for (int d = lane; d < dim; d += 32) {
      const int number = levels[d];
      if (bits == 8) {
        values[(group * dim + d) * 4] = uint8_t(number);
      } else if (bits == 4) {
        put_field(values + (group / 2 * dim + d) * 4, number, 0, 4, group % 2 * 4);
      } else {
        constexpr int kLowRows = kTile / 4 / 4;
        put_field(values + (group / 4 * dim + d) * 4, number, 0, 2, group % 4 * 2);
        put_field(values + ((kLowRows + group / 8) * dim + d) * 4, number, 2, 1, group % 8);
      }
    }
  }
  __syncwarp();  // before the levels are overwritten
}

// The place of a row's keys and values.
struct Place {
  int slot, block, window_block;  // block -1: none
  LANES_DEVICE Place(const Places& t, int row) {
    const int position = t.positions[row], at = t.sequences[row] * t.table_length + position / kTile;
    slot = position % kTile, block = t.tables[at], window_block = t.window_tables == nullptr ? -1 : t.window_tables[at];
  }
};

template <int PIECES>
LANES_DEVICE void store_rows(const Store& t, uint8_t* levels) {
  const int lane = int(threadIdx.x), head = int(blockIdx.x), dim = t.pool.dim;
  const bool keys = blockIdx.y == 0, all = rows_share_bytes(t.pool.format, keys);
  const int first = all ? 0 : int(blockIdx.z), end = all ? t.places.rows : first + 1;
  for (int row = first; row < end; row++) {
    const Place place(t.places, row);
    const float* const x = (keys ? t.k : t.v) + (int64_t(row) * t.pool.kv_heads + head) * dim;
    if (t.pool.format == CacheFormat::f16) {
      uint16_t* const to = reinterpret_cast<uint16_t*>(head_of(t.pool, place.block, head));
      for (int d = lane; d < dim; d += 32)
        to[keys ? d * kTile + place.slot : (kTile + place.slot) * dim + d] = float_to_half(x[d]);
      continue;
    }
    float v[PIECES];
    load_head(x, dim, lane, v);
    rotate(v, dim, lane);
    if (place.block >= 0) put(t, v, t.pool, place.block, head, keys, place.slot, lane, levels);
    if (place.window_block >= 0) put(t, v, t.window, place.window_block, head, keys, place.slot, lane, levels);
  }
}
LANES_KERNEL(kStoreThreads, 12) store_key_values(const Store t) {
  LANES_SHARED(levels);
  await_previous();
  if (rows_share_bytes(t.pool.format, blockIdx.y == 0) && blockIdx.z > 0) return;
  if (t.pool.dim <= 32 * kFewPieces)
    store_rows<kFewPieces>(t, levels);
  else
    store_rows<kMostPieces>(t, levels);
}

}  // namespace cuda
}  // namespace qtensor
