// Products of a single row of floats, for decoding. The norm and the quantization before them and the sum or gate after
// them are part of the launch, and weights of the same format that read the same row are one launch.
//
// A step of a model is a chain of small launches, each of which waits for the previous one. Their number and their
// waiting cost more than their computations. So each thread block quantizes the row again, which is faster than another
// launch, and loads its first weights before it awaits the row.
#pragma once

#include "cuda/matmul.h"
#include "cuda/rows.h"

namespace qtensor {
namespace cuda {

enum class Join { none, add, silu_mul };

constexpr int kMostParts = 3, kMostSets = 8;
struct OneRow {
  struct Part {
    const uint8_t* weight;
    float* y;
    int rows;
  };
  Part part[kMostParts];  // with silu_mul: gate and up projection; else any number
  int parts;
  Product facts;      // only row_bytes, blocks, sub_blocks, format and grids, which all parts share
  const float* x;     // facts.blocks super-blocks
  const float* norm;  // may be null
  int64_t k;
  float eps;
  Join join;
  int sets;  // sets of sixteen rows per thread block; silu_mul: two, one of each part; other parts: one
};
constexpr int kOneRowWarps = 8, kOneRowThreads = 32 * kOneRowWarps;
// Shared memory: activations of each warp; results and scales by blocks; with a norm, the row and its scale.
static constexpr int one_row_shared_bytes(int blocks, int sets, int64_t k, bool normed) {
  return kOneRowWarps * kActivationBytes + (16 * sets * (blocks | 1) + (blocks + 3) / 4 * 4) * 4 +
         (normed ? int(k + 4) * 4 : 0);
}

// Up to sixteen rows of a part.
struct SixteenRows {
  const uint8_t* weight;
  float* y;
  int count;
  LANES_DEVICE SixteenRows(const OneRow& t, int set) {
    int part = 0, group = int(blockIdx.x);
    if (t.join == Join::silu_mul) {
      part = set;
    } else {
      group = group * t.sets + set;
      LANES_UNROLL
      for (int i = 0; i + 1 < kMostParts; i++)
        if (part == i && i + 1 < t.parts && group >= (t.part[i].rows + 15) / 16)
          group -= (t.part[i].rows + 15) / 16, part++;
    }
    OneRow::Part of = t.part[0];
    LANES_UNROLL
    for (int i = 1; i < kMostParts; i++)
      if (part == i) of = t.part[i];
    const int left = of.rows - 16 * group;
    count = left < 16 ? left : 16;
    weight = of.weight + int64_t(16 * group) * t.facts.row_bytes;
    y = of.y + 16 * group;
  }
};

// The number of sets of this thread block.
LANES_DEVICE int sets_of(const OneRow& t) {
  if (t.join == Join::silu_mul || t.parts > 1) return t.sets;
  const int left = (t.part[0].rows + 15) / 16 - int(blockIdx.x) * t.sets;
  return left < t.sets ? left : t.sets;
}

template <bool BY_32>
struct QuantizedAs {
  using Block = BlockQ8K;
};
template <>
struct QuantizedAs<true> {
  using Block = BlockQ8x32;
};

template <class Block>
LANES_DEVICE void one_row(const OneRow& t, uint8_t* shared) {
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  const int blocks = t.facts.blocks, pitch = blocks | 1;
  uint8_t* const mine = shared + warp * kActivationBytes;
  float* const results = reinterpret_cast<float*>(shared + kOneRowWarps * kActivationBytes);  // [set][row][pitch]
  float* const scales = results + 16 * t.sets * pitch;
  float* const row = scales + (blocks + 3) / 4 * 4;
  float* const scale = row + t.k;

  // A warp multiplies blocks warp, warp + 8, ... of all sets, one set after the other.
  const auto load = [&](Block& to, int set, int b) {
    const SixteenRows rows(t, set);
    const uint8_t* from[2];
    for (int i = 0; i < 2; i++)
      from[i] = rows.weight + int64_t(g + 8 * i < rows.count ? g + 8 * i : 0) * t.facts.row_bytes;
    to.load(t.facts, from, b, q);
  };
  const int sets = sets_of(t);
  int set = warp / blocks, b = warp % blocks;
  Block next;
  if (set < sets) load(next, set, b);
  const int64_t first = 256 * int64_t(b) + 8 * lane;
  float weights[8];
  if (t.norm != nullptr)
    for (int i = 0; i < 8; i++) weights[i] = first + i < t.k ? t.norm[first + i] : 0.0f;
  if (thread < sets) {
    const SixteenRows rows(t, thread);
    fetch_ahead(rows.weight, uint32_t(rows.count * t.facts.row_bytes));
  }
  await_previous();

  const int out_set = thread / 16, r = thread % 16;
  float* out = nullptr;
  float before = 0.0f;
  if (out_set < sets) {
    const SixteenRows rows(t, out_set);
    if (r < rows.count) out = rows.y + r;
    if (t.join == Join::add && out != nullptr) before = *out;
  }
  float by = 1.0f;
  if (t.norm != nullptr) {
    for (int i = 4 * thread; i < t.k; i += 4 * kOneRowThreads)
      *reinterpret_cast<uint4*>(row + i) = *reinterpret_cast<const uint4*>(t.x + i);
    __syncthreads();
    if (warp == 0) {
      const float found = norm_scale(add_squares(0.0f, row, int(t.k), lane), int(t.k), t.eps);
      if (lane == 0) *scale = found;
    }
    __syncthreads();
    by = *scale;
  }
  const auto activations = [&](int block, const float* weight) {
    const int64_t begin = 256 * int64_t(block) + 8 * lane;
    if (t.norm == nullptr) return EightValues(t.x, begin, t.k);
    EightValues v;
    for (int i = 0; i < 8; i++) v.set(i, begin + i < t.k ? __fmul_rn(__fmul_rn(row[begin + i], by), weight[i]) : 0.0f);
    return v;
  };
  EightValues ahead = activations(b, weights);
  int quantized = -1;
  while (set < sets) {
    const Block now = next;
    const EightValues values = ahead;
    const int now_set = set, now_b = b;
    b += kOneRowWarps;
    while (b >= blocks) b -= blocks, set++;
    if (set < sets) {
      load(next, set, b);
      if (b != now_b) ahead = activations(b, t.norm + 256 * int64_t(b) + 8 * lane);
    }
    if (now_b != quantized) {
      __syncwarp();
      quantize_block(values, lane, reinterpret_cast<typename QuantizedAs<Block::kScaled>::Block*>(mine));
      __syncwarp();
      quantized = now_b;
      if (!Block::kScaled && now_set == 0 && lane == 0) scales[now_b] = scale_of(mine);
    }
    float f[1][4];
    now.template steps<1>(t.facts, now_b, q, [&](int) { return static_cast<const uint8_t*>(mine); }, f);
    if (q == 0)
      for (int i = 0; i < 2; i++) results[(16 * now_set + g + 8 * i) * pitch + now_b] = f[0][2 * i];
  }
  __syncthreads();
  if (warp >= (sets + 1) / 2) return;
  float acc = 0.0f;
  const float* const of_row = results + (out_set < sets ? thread : r) * pitch;
  for (int i = 0; i < blocks; i++)
    acc = Block::kScaled ? __fadd_rn(acc, of_row[i]) : __fmaf_rn(of_row[i], scales[i], acc);
  if (t.join == Join::silu_mul) {
    acc = silu_times(acc, __shfl_xor_sync(kWarp, acc, 16));
    if (out_set > 0) return;
  }
  if (out != nullptr) *out = t.join == Join::add ? __fadd_rn(before, acc) : acc;
}

// blocks: thread blocks per multiprocessor, as many as the registers allow without spills.
#define QTENSOR_ONE_ROW(name, Block, blocks)                            \
  LANES_KERNEL(kOneRowThreads, blocks) one_row_##name(const OneRow t) { \
    LANES_SHARED(shared);                                               \
    one_row<Block>(t, shared);                                          \
  }
QTENSOR_ONE_ROW(q4_k, Q4K, 2)
QTENSOR_ONE_ROW(q5_k, Q5K, 2)
QTENSOR_ONE_ROW(q6_k, Q6K, 2)
QTENSOR_ONE_ROW(q8_0, Q80, 1)
QTENSOR_ONE_ROW(q4_0, Q40, 2)
QTENSOR_ONE_ROW(q4_1, Q41, 1)
QTENSOR_ONE_ROW(unpacked_256, Unpacked256, 2)
QTENSOR_ONE_ROW(unpacked_32, Unpacked32, 2)
#undef QTENSOR_ONE_ROW

}  // namespace cuda
}  // namespace qtensor
