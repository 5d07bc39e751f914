// Operations as launches: selects the kernel, the number of threads and the size of shared memory. Written once for any
// device: a GPU or, in tests, the emulation of emulated_lanes.h. A device has
//   launch(QTENSOR_KERNEL(name), Grid, threads, shared_bytes, arguments)   one struct of arguments to a kernel
//   scratch(use, bytes)                                                    memory that is kept, aligned to 256 bytes
//   grids()                                                                kGrids in memory of the device
// Pointers are addresses of the device. Callers have checked all sizes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/byte_attention.h"
#include "cuda/embed.h"
#include "cuda/half_attention.h"
#include "cuda/layout.h"
#include "cuda/matmul.h"
#include "cuda/one_row.h"
#include "cuda/prepare.h"
#include "cuda/rows.h"
#include "cuda/store.h"
#include "kernels/portable/level_tables.h"

namespace qtensor {
namespace cuda {

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};
enum class Scratch { normed, quantized, quantized_32, first, second, bytes, unit, scores, tops, steps, sums, count };

constexpr int kMaxSmallM = 16;
constexpr int kSmallMSharedLimit = 99 << 10;  // available to a thread block on all architectures from 8.6 on

static inline unsigned groups_of(int64_t count, int64_t together) {
  return unsigned((count + together - 1) / together);
}

struct LaidWeight {
  Format format;
  const uint8_t* data;
  int64_t rows, k;
};
static inline bool is_float(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }

template <class Device>
const Grids* grids_for(Device& device, Format format) {
  return has_grids(format) ? device.grids() : nullptr;
}

// Quantizes m rows of k floats to `out`, m x blocks.
template <class Device>
void launch_quantize(Device& device, const float* x, int64_t m, int64_t k, BlockQ8K* out) {
  const int blocks = int((k + kSuperBlock - 1) / kSuperBlock);
  const Grid grid{groups_of(blocks, kQuantizeThreads / 32), unsigned(m), 1};
  device.launch(QTENSOR_KERNEL(quantize), grid, kQuantizeThreads, 0, Quantize{x, k, out, blocks});
}

// The same for weights in blocks of 32.
template <class Device>
void launch_quantize_by_32(Device& device, const float* x, int64_t m, int64_t k, BlockQ8x32* out) {
  const int blocks = int((k + kSuperBlock - 1) / kSuperBlock);
  const Grid grid{groups_of(blocks, kQuantizeThreads / 32), unsigned(m), 1};
  device.launch(QTENSOR_KERNEL(quantize_by_32), grid, kQuantizeThreads, 0, QuantizeBy32{x, k, out, blocks});
}

#define QTENSOR_LAUNCH_PRODUCT(name)                                                                     \
  if (m <= 8 && small8 <= kSmallMSharedLimit)                                                            \
    device.launch(QTENSOR_KERNEL(small_m_##name##_8), small, kSmallMThreads, small8, t);                 \
  else if (m <= kMaxSmallM && small16 <= kSmallMSharedLimit)                                             \
    device.launch(QTENSOR_KERNEL(small_m_##name##_16), small, kSmallMThreads, small16, t);               \
  else                                                                                                   \
    device.launch(QTENSOR_KERNEL(large_m_##name), large, kLargeMThreads, size_t(kLargeMSharedBytes), t); \
  return;

// y[j][n] = row n of the weight times column j. x contains floats for float weights, otherwise the output of
// launch_quantize or launch_quantize_by_32.
template <class Device>
void launch_product(Device& device, const LaidWeight& w, const void* x, int64_t m, float* y, int64_t y_stride) {
  if (is_float(w.format)) {
    const FloatProduct t{
        w.data, laid_row_bytes(w.format, w.k), static_cast<const float*>(x), int(w.rows), int(m), w.k, y, y_stride};
    const Grid grid{groups_of(w.rows, kFloatRows), unsigned(m), 1};
    if (w.format == Format::F32)
      device.launch(QTENSOR_KERNEL(product_f32), grid, kFloatThreads, 0, t);
    else if (w.format == Format::F16)
      device.launch(QTENSOR_KERNEL(product_f16), grid, kFloatThreads, 0, t);
    else
      device.launch(QTENSOR_KERNEL(product_bf16), grid, kFloatThreads, 0, t);
    return;
  }
  const int blocks = int((w.k + kSuperBlock - 1) / kSuperBlock);
  const Product t{w.data,
                  laid_row_bytes(w.format, w.k),
                  static_cast<const uint8_t*>(x),
                  blocks,
                  int(w.rows),
                  int(m),
                  int(w.k / kSubBlock),
                  y,
                  y_stride,
                  w.format,
                  grids_for(device, w.format)};
  const Grid small{groups_of(w.rows, kSmallMRows), 1, 1},
      large{groups_of(w.rows, kLargeMRows), groups_of(m, kLargeMTile), 1};
  const size_t small8 = size_t(small_m_shared_bytes(1, blocks)), small16 = size_t(small_m_shared_bytes(2, blocks));
  switch (w.format) {
    case Format::Q4_K:
      QTENSOR_LAUNCH_PRODUCT(q4_k)
    case Format::Q5_K:
      QTENSOR_LAUNCH_PRODUCT(q5_k)
    case Format::Q6_K:
      QTENSOR_LAUNCH_PRODUCT(q6_k)
    case Format::Q8_0:
      QTENSOR_LAUNCH_PRODUCT(q8_0)
    case Format::Q4_0:
      QTENSOR_LAUNCH_PRODUCT(q4_0)
    case Format::Q4_1:
      QTENSOR_LAUNCH_PRODUCT(q4_1)
    default:
      if (has_blocks_of_32(w.format)) {
        QTENSOR_LAUNCH_PRODUCT(unpacked_32)
      }
      QTENSOR_LAUNCH_PRODUCT(unpacked_256)
  }
}
#undef QTENSOR_LAUNCH_PRODUCT

// Whether launch_one_row can be used: for parts of one quantized format with the same single row, which is not the
// output of any part.
constexpr int64_t kMostNormedK = 16384;  // the row must fit in shared memory
static inline bool one_row_serves(Format format, int64_t m, int64_t k, bool normed) {
  const int blocks = int((k + kSuperBlock - 1) / kSuperBlock);
  return m == 1 && !is_float(format) && k % kSubBlock == 0 && (!normed || k <= kMostNormedK) &&
         one_row_shared_bytes(blocks, 2, k, normed) <= kSmallMSharedLimit;
}
struct OneRowInput {
  const float *x, *norm;  // norm may be null
  float eps;
};
struct OneRowOutput {
  LaidWeight weight;
  float* y;
};
template <class Device>
void launch_one_row(Device& device, const OneRowInput& in, const OneRowOutput* out, int count, Join join) {
  constexpr int64_t kFullGrid = 1024;  // with more thread blocks, each processes several sets instead
  const LaidWeight& w = out[0].weight;
  const int blocks = int((w.k + kSuperBlock - 1) / kSuperBlock);
  OneRow t{};
  int64_t groups = 0;
  for (int i = 0; i < count; i++) {
    t.part[i] = {out[i].weight.data, out[i].y, int(out[i].weight.rows)};
    groups += groups_of(out[i].weight.rows, 16);
  }
  t.parts = count, t.x = in.x, t.norm = in.norm, t.eps = in.eps, t.k = w.k, t.join = join, t.sets = 1;
  if (join == Join::silu_mul) {
    t.sets = 2, groups /= 2;
  } else if (count == 1) {
    t.sets = int(std::clamp<int64_t>(groups / kFullGrid, 1, kMostSets));
    while (t.sets > 1 && one_row_shared_bytes(blocks, t.sets, w.k, in.norm != nullptr) > kSmallMSharedLimit) t.sets--;
  }
  t.facts.row_bytes = laid_row_bytes(w.format, w.k);
  t.facts.blocks = blocks, t.facts.sub_blocks = int(w.k / kSubBlock), t.facts.m = 1;
  t.facts.format = w.format, t.facts.grids = grids_for(device, w.format);
  const Grid grid{groups_of(groups, join == Join::silu_mul ? 1 : t.sets)};
  const size_t shared = size_t(one_row_shared_bytes(blocks, t.sets, w.k, in.norm != nullptr));
  const auto launch = [&](auto kernel) { device.launch(kernel, grid, kOneRowThreads, shared, t); };
  switch (w.format) {
    case Format::Q4_K:
      return launch(QTENSOR_KERNEL(one_row_q4_k));
    case Format::Q5_K:
      return launch(QTENSOR_KERNEL(one_row_q5_k));
    case Format::Q6_K:
      return launch(QTENSOR_KERNEL(one_row_q6_k));
    case Format::Q8_0:
      return launch(QTENSOR_KERNEL(one_row_q8_0));
    case Format::Q4_0:
      return launch(QTENSOR_KERNEL(one_row_q4_0));
    case Format::Q4_1:
      return launch(QTENSOR_KERNEL(one_row_q4_1));
    default:
      if (has_blocks_of_32(w.format)) return launch(QTENSOR_KERNEL(one_row_unpacked_32));
      return launch(QTENSOR_KERNEL(one_row_unpacked_256));
  }
}

template <class Device>
void launch_norm(Device& device, const float* x, const float* weight, float eps, int64_t rows, int64_t width,
                 float* out) {
  device.launch(QTENSOR_KERNEL(rms_norm), Grid{unsigned(rows)}, kRowThreads, kNormSharedBytes,
                Norm{x, weight, eps, int(width), out});
}
template <class Device>
void launch_silu_mul(Device& device, const float* gate, const float* up, int64_t n, float* out) {
  device.launch(QTENSOR_KERNEL(silu_mul), Grid{groups_of(n, kRowThreads)}, kRowThreads, 0, Pair{gate, up, n, out});
}
template <class Device>
void launch_add(Device& device, const float* a, const float* b, int64_t n, float* out) {
  device.launch(QTENSOR_KERNEL(add), Grid{groups_of(n, kRowThreads)}, kRowThreads, 0, Pair{a, b, n, out});
}
template <class Device>
void launch_softmax(Device& device, float* x, int64_t rows, int64_t width) {
  device.launch(QTENSOR_KERNEL(softmax), Grid{unsigned(rows)}, kRowThreads, 16, Softmax{x, int(width)});
}
template <class Device>
void launch_argmax(Device& device, const float* x, int64_t rows, int64_t width, int32_t* out) {
  device.launch(QTENSOR_KERNEL(argmax), Grid{unsigned(rows)}, kRowThreads, kRowThreads / 32 * 8,
                Argmax{x, int(width), out});
}
template <class Device>
void launch_gather(Device& device, const float* x, const int32_t* ids, int64_t rows, int64_t width, float* out) {
  device.launch(QTENSOR_KERNEL(gather_rows), Grid{unsigned(rows)}, kRowThreads, 0, Gather{x, ids, int(width), out});
}
template <class Device>
void launch_embed(Device& device, const LaidWeight& w, const int32_t* ids, int64_t rows, float* out) {
  device.launch(
      QTENSOR_KERNEL(embed_rows), Grid{unsigned(rows)}, kEmbedThreads, 0,
      Embed{w.data, laid_row_bytes(w.format, w.k), w.format, int(w.k), ids, out, grids_for(device, w.format)});
}
template <class Device>
void launch_rope(Device& device, float* x, int64_t rows, int64_t heads, int64_t dim, const int32_t* positions,
                 const float* cosine, const float* sine, bool adjacent) {
  device.launch(QTENSOR_KERNEL(rope), Grid{unsigned(rows), unsigned(heads)}, kRopeThreads, 0,
                Rope{x, positions, cosine, sine, int(heads), int(dim), adjacent});
}

template <class Device>
void launch_rope_table(Device& device, const double* frequency, int64_t pairs, const int32_t* positions, int64_t rows,
                       double factor, float* cosine, float* sine) {
  device.launch(QTENSOR_KERNEL(rope_table), Grid{unsigned(rows)}, kRopeThreads, 0,
                RopeTable{frequency, positions, factor, int(pairs), cosine, sine});
}

static inline Levels levels_for(int bits) {
  const LevelTable& table = bits == 3 ? kLevels3 : kLevels4;
  Levels levels{};
  levels.half = table.half;
  for (int i = 0; i < 7; i++) levels.begins[i] = table.begins[i], levels.larger[i] = table.larger[i];
  levels.first = table.first;
  levels.deviations_of_one = float(double(table.deviations) / 127.0);
  for (int i = 0; i < 16; i++) levels.bytes[i / 4] |= uint32_t(table.bytes[i] ^ 128) << (8 * (i % 4));
  return levels;
}

static inline Store store_of(const float* k, const float* v, const Places& places, const Pool& pool,
                             const Pool& window) {
  return {k, v, places, pool, window, levels_for(key_bits(pool.format)), levels_for(value_bits(pool.format))};
}
template <class Device>
void launch_store(Device& device, const float* k, const float* v, const Places& places, const Pool& pool,
                  const Pool& window) {
  const Store t = store_of(k, v, places, pool, window);
  device.launch(QTENSOR_KERNEL(store_key_values), Grid{unsigned(pool.kv_heads), 2, unsigned(places.rows)},
                kStoreThreads, size_t(store_shared_bytes(pool.dim)), t);
}

// Attention over a cache with 8 bits or less. `most` is the largest number of positions that a row sees.
template <class Device>
Attend attend_of(Device& device, const float* q, int64_t heads, const Places& places, const Pool& pool,
                 const Pool& window, float scale, int64_t most, float* out) {
  const int64_t queries = places.rows * heads, dim = pool.dim, tiles = (most + kTile - 1) / kTile,
                all = queries * tiles;
  Attend t{};
  t.q = q, t.out = out, t.places = places, t.pool = pool, t.window = window;
  t.heads = int(heads), t.most_tiles = int(tiles), t.scale = scale;
  t.together = int(std::min<int64_t>(tiles, kMostTogether));
  t.key_levels = levels_for(key_bits(pool.format)), t.value_levels = levels_for(value_bits(pool.format));
  t.bytes = static_cast<int8_t*>(device.scratch(Scratch::bytes, queries * dim));
  t.unit = static_cast<float*>(device.scratch(Scratch::unit, queries * 4));
  t.scores = static_cast<float*>(device.scratch(Scratch::scores, all * kTile * 4));
  t.tops = static_cast<float*>(device.scratch(Scratch::tops, all * 4));
  t.steps = static_cast<float*>(device.scratch(Scratch::steps, all * 3 * 4));
  t.sums = static_cast<int*>(device.scratch(Scratch::sums, all * dim * 4));
  return t;
}
// Whether it is faster to process a whole query in one thread block.
static inline bool takes_whole_queries(const Attend& t) {
  constexpr int kFewQueries = 512, kFewTiles = 2;  // with 8 tiles the four launches are faster, on an H100
  return t.pool.dim <= kWholeQueryDim && t.places.rows * t.heads <= kFewQueries && t.most_tiles <= kFewTiles;
}
// Called after attend_begin or prepare_attention.
template <class Device>
void launch_attend(Device& device, const Attend& t, bool whole_queries) {
  const unsigned queries = unsigned(t.places.rows * t.heads), tiles = unsigned(t.most_tiles);
  if (whole_queries) {
    device.launch(QTENSOR_KERNEL(attend_query), Grid{queries}, unsigned(t.together * kTile), sizeof(WholeQueryRoom), t);
    return;
  }
  device.launch(QTENSOR_KERNEL(attend_scores), Grid{tiles, queries}, kTileThreads, kScoresSharedBytes, t);
  device.launch(QTENSOR_KERNEL(attend_weights), Grid{tiles, queries}, kTileThreads, kWeightsSharedBytes, t);
  device.launch(QTENSOR_KERNEL(attend_join), Grid{queries}, kQueryThreads, 0, t);
}
template <class Device>
void launch_attention(Device& device, const float* q, int64_t heads, const Places& places, const Pool& pool,
                      const Pool& window, float scale, int64_t most, float* out) {
  const Grid each{unsigned(places.rows * heads)};
  if (pool.format == CacheFormat::f16) {
    device.launch(QTENSOR_KERNEL(attend_halves), each, kHalfThreads, size_t(half_attend_shared_bytes(pool.dim)),
                  HalfAttend{q, out, places, pool, int(heads), scale});
    return;
  }
  const Attend t = attend_of(device, q, heads, places, pool, window, scale, most, out);
  device.launch(QTENSOR_KERNEL(attend_begin), each, kQueryThreads, 0, t);
  launch_attend(device, t, takes_whole_queries(t));
}
// Prepares the rows to be stored and the rows to be attended of one step.
template <class Device>
void launch_prepare(Device& device, const Prepare& t) {
  const int64_t all =
      int64_t(t.attend.places.rows) * t.attend.heads + 2 * int64_t(t.store.places.rows) * t.store.pool.kv_heads;
  device.launch(QTENSOR_KERNEL(prepare_attention), Grid{unsigned(all)}, kPrepareThreads,
                size_t(store_shared_bytes(t.store.pool.dim)), t);
}

}  // namespace cuda
}  // namespace qtensor
