#include "ops/matmul.h"

#include <algorithm>

#include "kernel_table.h"
#include "packed_weights.h"
#include "runtime/dispatch.h"
#include "runtime/work_sharing.h"

namespace qtensor {
namespace {

enum class Use { normed, quantised, quantised_32, packed, slab_batch, slab_batch_32, slab_sums, items, count };
Scratch& memory(Use use) {
  static Scratch shared[size_t(Use::count)];
  return shared[size_t(use)];
}

// A multiply-add with a float weight takes as long as so many with bytes, most of it to read and to widen it; adding up
// the lanes of a row takes as long as sixteen of them.
constexpr int64_t kFloatCost = 8;

bool is_float(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }

MatmulKernel matmul_kernel(const KernelTable& table, Format format) {
  switch (format) {
    case Format::F32:
      return table.matmul_f32;
    case Format::F16:
      return table.matmul_f16;
    case Format::BF16:
      return table.matmul_bf16;
    case Format::Q4_K:
      return table.matmul_q4_k;
    case Format::Q5_K:
      return table.matmul_q5_k;
    case Format::Q6_K:
      return table.matmul_q6_k;
    default:
      if (const MatmulKernel kernel = table.kernel_32(format)) return kernel;
      if (const MatmulKernel kernel = table.unpacked_kernel(format)) return kernel;
      refuse("this block format has no kernel");
  }
}

bool is_k_quant(Format f) { return f == Format::Q4_K || f == Format::Q5_K || f == Format::Q6_K; }

// Null for a weight that is not packed, or whose packed form the family leaves to the generic kernels.
SlabKernel slab_kernel(const KernelTable& table, const Weight& w) {
  return w.slab_stride > 0 && table.slab_kernel != nullptr ? table.slab_kernel(w.format) : nullptr;
}

// Null where tiles are not to be had, or slower.
TileKernel tile_kernel(const KernelTable& table, const Weight& w, int64_t m) {
  const Format format = w.format;
  if (w.slab_stride > 0 || table.tiles_from_m == nullptr || m < table.tiles_from_m(format)) return nullptr;
  switch (format) {
    case Format::Q4_K:
      return table.matmul_tiles_q4_k;
    case Format::Q5_K:
      return table.matmul_tiles_q5_k;
    case Format::Q6_K:
      return table.matmul_tiles_q6_k;
    default:
      return has_blocks_of_32(format) ? table.tile_kernel_32(format)
             : is_float(format)       ? nullptr
                                      : table.tile_kernel_256(format);
  }
}

// A quarter of so many rows is nowhere near a multiple of a page in the usual formats and widths: four rows that are
// read together, one from each quarter, stay off each other's cache sets. A gated product goes from one weight to the
// other with each work item, and takes twice as many: docs/kernels/gemv.md.
constexpr int64_t kSmallMRows = 96;

// Rows of one product that one worker computes.
struct WorkItem {
  const Product* product;
  int64_t begin, end;
};
// Enough work items that a thread which loses its CPU for a while holds nobody up, none so small that claiming it
// costs.
std::vector<WorkItem> plan_work(const Matmul& op, int threads, int64_t tile_rows) {
  int64_t rows = 0;
  for (const auto& product : op.products) rows += product.weight.rows;
  const int64_t even = std::max<int64_t>(rows / (threads * 8) / 16 * 16, 16);
  const bool gated = op.combine == Combine::silu_mul;
  int64_t grain = tile_rows > 0 ? tile_rows : op.m > 8 ? 64 : kSmallMRows;
  if (op.m <= 8 && gated) grain = std::max(grain, 2 * kSmallMRows);
  grain = std::min(grain, even);
  // Whole slabs. A gated product's lie in turns and are read in order, one of each weight.
  for (const auto& product : op.products)
    if (product.weight.slab_stride > 0) grain = gated || op.m > 8 || even < 2 * kSlabRows ? kSlabRows : 2 * kSlabRows;
  std::vector<WorkItem> plan;
  for (const auto& product : op.products) {
    for (int64_t at = 0; at < product.weight.rows; at += grain)
      plan.push_back({&product, at, std::min(product.weight.rows, at + grain)});
    if (gated) break;  // the second product goes with the first
  }
  return plan;
}

// Packed activations and each thread's scratch begin at pages and leave one between them: what runs ahead of a thread's
// reading would otherwise take lines that another thread is writing.
inline int64_t page_stride(int64_t bytes) { return (bytes + 4095) / 4096 * 4096 + 4096; }

constexpr int64_t kPastCacheM = 128;  // results of so many batch rows would only push operands out of the caches

// Everything one matmul step knows while it runs.
struct MatmulRun {
  const KernelTable& table;
  const Matmul& op;
  int64_t blocks = 0;
  const float* x = nullptr;                                                  // m x k, normed if that was asked for
  BlockQ8K* quantised = nullptr;                                             // m x blocks
  BlockQ8x32* quantised_32 = nullptr;                                        // the same for blocks of 32
  uint8_t *packed = nullptr, *packed_lanes = nullptr, *packed_32 = nullptr;  // each kind of weights' in tiles
  uint8_t* tile_scratch = nullptr;
  int64_t tile_scratch_bytes = 0;
  uint8_t *slab_batch = nullptr, *slab_batch_32 = nullptr;  // for packed weights of either kind: blocks x m
  float* slab_sums = nullptr;
  int64_t slab_sums_floats = 0;

  // Rows [begin, end) of one weight into y, whose batch rows have that stride; y points at row `begin`.
  void product(const Weight& w, int64_t begin, int64_t end, float* y, int64_t y_stride, bool past_cache, int worker) {
    const int64_t row_bytes = bytes_per_row(w.format, op.k);
    const bool packed_weight = w.slab_stride > 0;
    const uint8_t* const weight = w.data + (packed_weight ? begin / kSlabRows * w.slab_stride : begin * row_bytes);
    if (const SlabKernel kernel = slab_kernel(table, w)) {
      float* const sums = slab_sums + slab_sums_floats * worker;
      const uint8_t* const batch = has_blocks_of_32(w.format) ? slab_batch_32 : slab_batch;
      return kernel({weight, w.slab_stride, end - begin, blocks, batch, op.m, y, y_stride, sums});
    }
    const uint8_t* const tiles = is_k_quant(w.format) ? packed : has_blocks_of_32(w.format) ? packed_32 : packed_lanes;
    const TileKernel by_tiles = tiles != nullptr ? tile_kernel(table, w, op.m) : nullptr;
    const int64_t tiled = by_tiles != nullptr ? (end - begin) / 16 * 16 : 0;
    if (tiled > 0) {
      TileTask t{};
      t.weight = weight;
      t.row_bytes = row_bytes;
      t.blocks = blocks;
      t.packed = tiles;
      t.m = op.m;
      t.y = y;
      t.y_stride = y_stride;
      t.row_end = tiled;
      t.past_cache = past_cache && y_stride % 16 == 0 && reinterpret_cast<uintptr_t>(y) % 64 == 0;
      t.scratch = tile_scratch + tile_scratch_bytes * worker;
      by_tiles(t);
    }
    if (tiled == end - begin) return;
    const MatmulKernel kernel = matmul_kernel(packed_weight ? kGenericKernels : table, w.format);
    // as many batch rows at once as stay in L2 while the rows pass by
    const int64_t chunk = std::max<int64_t>(16, (int64_t(512) << 10) / (blocks * int64_t(sizeof(BlockQ8K))));
    for (int64_t j = 0; j < op.m; j += chunk) {
      MatmulTask t{};
      t.weight = weight;
      t.row_bytes = row_bytes;
      t.k = op.k;
      t.blocks = quantised == nullptr ? nullptr : quantised + j * blocks;
      t.blocks_32 = quantised_32 == nullptr ? nullptr : quantised_32 + j * blocks;
      t.blocks_per_row = blocks;
      t.floats = x + j * op.k;
      t.m = std::min(chunk, op.m - j);
      t.y = y + j * y_stride;
      t.y_stride = y_stride;
      t.row_begin = tiled;
      t.row_end = end - begin;
      t.slab_stride = w.slab_stride;
      kernel(t);
    }
  }
};

}  // namespace

Step matmul(Matmul op) {
  bool any_256 = false, any_32 = false;
  for (const auto& product : op.products) {
    const bool of_32 = has_blocks_of_32(product.weight.format);
    any_32 |= of_32;
    any_256 |= !of_32 && !is_float(product.weight.format);
  }
  return [=](ThreadPool& pool) {
    const KernelTable& table = kernels();
    const int64_t m = op.m, k = op.k;
    MatmulRun run{table, op};
    run.blocks = (k + kSuperBlock - 1) / kSuperBlock;
    run.x = op.x;
    float* normed = nullptr;
    if (op.norm != nullptr) run.x = normed = memory(Use::normed).floats(m * k);
    const size_t blocks = size_t(m * run.blocks);
    if (any_256) run.quantised = static_cast<BlockQ8K*>(memory(Use::quantised).get(blocks * sizeof(BlockQ8K)));
    if (any_32) run.quantised_32 = static_cast<BlockQ8x32*>(memory(Use::quantised_32).get(blocks * sizeof(BlockQ8x32)));
    bool slabs_256 = false, slabs_32 = false;
    for (const auto& product : op.products)
      if (slab_kernel(table, product.weight) != nullptr)
        (has_blocks_of_32(product.weight.format) ? slabs_32 : slabs_256) = true;
    const auto batch_for_slabs = [&](Use use) {
      return static_cast<uint8_t*>(memory(use).get(blocks * size_t(table.slab_block_bytes)));
    };
    if (slabs_256) run.slab_batch = batch_for_slabs(Use::slab_batch);
    if (slabs_32) run.slab_batch_32 = batch_for_slabs(Use::slab_batch_32);
    if (slabs_256 || slabs_32) {
      run.slab_sums_floats = page_stride(kSlabRows * m * int64_t(sizeof(float))) / int64_t(sizeof(float));
      run.slab_sums = memory(Use::slab_sums).floats(run.slab_sums_floats * pool.size());
    }
    parallel_for(pool, m, std::max<int64_t>(1, kSmall / k), [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; j++) {
        if (normed != nullptr) table.rms_norm(op.x + j * k, op.norm, op.eps, k, normed + j * k);
        if (any_256) table.quantize_q8k(run.x + j * k, k, run.quantised + j * run.blocks);
        if (any_32) table.quantize_q8x32(run.x + j * k, k, run.quantised_32 + j * run.blocks);
        const int64_t at = j * table.slab_block_bytes;
        if (slabs_256) table.pack_slab_batch_row(run.quantised + j * run.blocks, run.blocks, m, run.slab_batch + at);
        if (slabs_32)
          table.pack_slab_batch_row_32(run.quantised_32 + j * run.blocks, run.blocks, m, run.slab_batch_32 + at);
      }
    });
    bool tiles_mins = false, tiles_signed = false, tiles_lanes = false, tiles_32 = false;
    for (const auto& product : op.products) {
      const Format f = product.weight.format;
      if (tile_kernel(table, product.weight, m) == nullptr) continue;
      (f == Format::Q6_K             ? tiles_signed
       : is_k_quant(f)               ? tiles_mins
       : has_blocks_of_32(f)         ? tiles_32
       : table.pack_block_lanes != 0 ? tiles_lanes
                                     : tiles_mins) = true;
    }
    tiles_32 &= k % kSuperBlock == 0;
    const bool tiles_256 = tiles_mins || tiles_signed;
    const bool any_tiles = tiles_256 || tiles_lanes || tiles_32;
    if (any_tiles) {
      const int64_t tiles = (m + 15) / 16;
      const int64_t bytes = tiles_256 ? page_stride(table.packed_bytes(run.blocks, m)) : 0;
      const int64_t bytes_lanes = tiles_lanes ? page_stride(table.packed_bytes_lanes(run.blocks, m)) : 0;
      const int64_t bytes_32 = tiles_32 ? page_stride(table.packed_bytes_32(run.blocks, m)) : 0;
      run.tile_scratch_bytes = page_stride(table.tile_scratch_bytes(m));
      run.tile_scratch = static_cast<uint8_t*>(
          memory(Use::packed).get(size_t(run.tile_scratch_bytes * pool.size() + bytes + bytes_lanes + bytes_32)));
      uint8_t* const packed = run.tile_scratch + run.tile_scratch_bytes * pool.size();
      if (tiles_256) run.packed = packed;
      if (tiles_lanes) run.packed_lanes = packed + bytes;
      if (table.pack_block_lanes == nullptr) run.packed_lanes = run.packed;
      if (tiles_32) run.packed_32 = packed + bytes + bytes_lanes;
      PackTask packing{run.quantised, run.quantised_32, run.blocks, m, tiles_mins, tiles_signed, packed};
      PackTask packing_lanes = packing, packing_32 = packing;
      packing_lanes.packed = run.packed_lanes;
      packing_32.packed = run.packed_32;
      auto pack = [&](int64_t index, int) {
        if (tiles_256) table.pack_block(packing, index / run.blocks, index % run.blocks);
        if (tiles_lanes) table.pack_block_lanes(packing_lanes, index / run.blocks, index % run.blocks);
        if (tiles_32) table.pack_block_32(packing_32, index / run.blocks, index % run.blocks);
      };
      run_tasks(pool, tiles * run.blocks, m * k * 64, pack);
    }
    const std::vector<WorkItem> plan = plan_work(op, pool.size(), any_tiles ? table.tile_rows : 0);
    int64_t longest = 0;
    for (const WorkItem& item : plan) longest = std::max(longest, item.end - item.begin);
    const int64_t item_floats = (longest * m + 15) / 16 * 16;
    float* items = op.combine == Combine::none ? nullptr : memory(Use::items).floats(2 * item_floats * pool.size());
    auto task = [&](int64_t index, int worker) {
      const WorkItem& item = plan[size_t(index)];
      const Weight& w = item.product->weight;
      const int64_t rows = item.end - item.begin;
      float* y = item.product->y + item.begin;
      if (op.combine == Combine::none) {
        run.product(w, item.begin, item.end, y, w.rows, m >= kPastCacheM, worker);
        return;
      }
      float* first = items + 2 * item_floats * worker;
      run.product(w, item.begin, item.end, first, rows, false, worker);
      if (op.combine == Combine::add) {
        for (int64_t j = 0; j < m; j++) table.add(y + j * w.rows, first + j * rows, rows, y + j * w.rows);
        return;
      }
      float* second = first + item_floats;
      run.product(op.products[1].weight, item.begin, item.end, second, rows, false, worker);
      for (int64_t j = 0; j < m; j++) table.silu_mul(first + j * rows, second + j * rows, rows, y + j * w.rows);
    };
    int64_t weights = 0;
    for (const auto& product : op.products)
      weights += product.weight.rows * (is_float(product.weight.format) ? kFloatCost * (k + 16) : k);
    run_tasks(pool, int64_t(plan.size()), weights * m, task);
  };
}

}  // namespace qtensor
