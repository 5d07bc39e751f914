#include "ops/matmul.h"

#include <algorithm>
#include <vector>

#include "kernel_table.h"
#include "ops/packing.h"
#include "packed_weights.h"
#include "runtime/dispatch.h"
#include "runtime/work_sharing.h"

namespace qtensor {
namespace {

enum class Use { normed, quantized, quantized_32, packed, slabs, items, count };
Scratch& memory(Use use) {
  static Scratch shared[size_t(Use::count)];
  return shared[size_t(use)];
}

// Cost of a multiply-add with a float weight relative to one with bytes: most of it is reading and widening. Reducing
// the lanes of a row costs as much as sixteen of them.
constexpr int64_t kFloatCost = 8;

bool is_float(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }

// Selects the kernels of a product. Packed weights, and some weights in rows, use the slab kernels if the family has
// them. Other rows use tiles, and the rows that do not fill a tile use the row kernels. Packed weights without slab
// kernels are unpacked for tiles; if there are no tiles either, the generic kernels read them.
struct Ways {
  MatmulKernel rows;
  Tiles tiles;
  Slabs slabs;
  bool unpacks;           // rows are unpacked for tiles, 32 at a time, into a worker's scratch
  int64_t batch_at = -1;  // offset of the batch rows that are packed for tiles or slabs
  bool packs = false;     // this product packs the batch rows; false if an earlier product packs them in the same way

  Ways(const KernelTable& table, const Weight& w, int64_t m) {
    const bool packed = w.slab_stride > 0;
    const bool whole = w.k % kSuperBlock == 0;
    if (packed && table.slabs != nullptr) slabs = table.slabs(w.format, m);
    if (!packed && whole && table.slabs_of_rows != nullptr) slabs = table.slabs_of_rows(w.format, m);
    if (slabs.kernel == nullptr && table.tiles != nullptr && whole) tiles = table.tiles(w.format, m);
    unpacks = packed && tiles.kernel != nullptr;
    rows = (packed && !unpacks ? kGenericKernels : table).matmul(w.format);
    if (rows == nullptr) refuse("this block format has no kernel");
  }
  int64_t batch_bytes(int64_t blocks, int64_t m) const {
    return slabs.kernel != nullptr ? blocks * m * slabs.packing->block_bytes : tiles.packing->bytes(blocks, m);
  }
  bool needs_batch() const { return slabs.kernel != nullptr || tiles.kernel != nullptr; }
  bool packs_as(const Ways& other) const {
    return slabs.packing == other.slabs.packing && tiles.packing == other.tiles.packing;
  }
};

// Four rows are read together, one from each quarter of a work item. With this number of rows, a quarter is not near a
// multiple of a page in the usual formats and widths, so the four rows use different cache sets. A gated product
// alternates between two weights and takes twice as many: docs/kernels/gemv.md.
constexpr int64_t kSmallMRows = 96;

// Rows of one product, computed by one worker.
struct WorkItem {
  size_t product;
  int64_t begin, end;
};
// Divides the rows into work items: enough of them that a thread that loses its CPU for a while does not delay the
// others, but not so small that claiming them costs time.
std::vector<WorkItem> plan_work(const Matmul& op, const std::vector<Ways>& ways, int threads, int64_t tile_rows) {
  int64_t rows = 0;
  for (const auto& product : op.products) rows += product.weight.rows;
  const int64_t even = std::max<int64_t>(rows / (threads * 8) / 16 * 16, 16);
  const bool gated = op.combine == Combine::silu_mul;
  int64_t grain = tile_rows > 0 ? tile_rows : op.m > 8 ? 64 : kSmallMRows;
  if (op.m <= 8 && gated) grain = std::max(grain, 2 * kSmallMRows);
  grain = std::min(grain, even);
  // Whole slabs. Those of a gated product's two weights alternate in memory and are read in order.
  for (size_t i = 0; i < ways.size(); i++)
    if (ways[i].slabs.kernel != nullptr || op.products[i].weight.slab_stride > 0)
      grain = gated || op.m > 8 || even < 2 * kSlabRows ? kSlabRows : 2 * kSlabRows;
  std::vector<WorkItem> plan;
  for (size_t i = 0; i < (gated ? 1 : op.products.size()); i++) {  // gated: the second product goes with the first
    const int64_t rows_of_product = op.products[i].weight.rows;
    for (int64_t at = 0; at < rows_of_product; at += grain)
      plan.push_back({i, at, std::min(rows_of_product, at + grain)});
  }
  return plan;
}

// Packed activations and each thread's scratch begin at pages, with an unused page between them. Otherwise hardware
// prefetch for one thread would fetch lines that another thread is writing.
inline int64_t page_stride(int64_t bytes) { return (bytes + 4095) / 4096 * 4096 + 4096; }

constexpr int64_t kPastCacheM = 128;  // from this M on, results would evict operands from the caches

// The state of a matmul step while it runs.
struct MatmulRun {
  const Matmul& op;
  std::vector<Ways> ways;  // one per product
  int64_t blocks = 0;
  const float* x = nullptr;            // m x k, after the norm, if there is one
  BlockQ8K* quantized = nullptr;       // m x blocks
  BlockQ8x32* quantized_32 = nullptr;  // the same for blocks of 32
  bool any_tiles = false;
  uint8_t *tile_scratch = nullptr, *batches = nullptr;
  int64_t tile_scratch_bytes = 0, rows_bytes = 0;  // per worker; unpacked rows come first
  uint8_t* slab_scratch = nullptr;
  int64_t slab_scratch_bytes = 0;  // per worker: packed rows, then sums

  // Allocates memory for packed batch rows and workers' scratch.
  void prepare(const KernelTable& table, int workers) {
    int64_t bytes = 0;
    bool any_slabs = false;
    for (size_t i = 0; i < ways.size(); i++) {
      Ways& way = ways[i];
      if (!way.needs_batch()) continue;
      any_slabs |= way.slabs.kernel != nullptr;
      any_tiles |= way.tiles.kernel != nullptr;
      if (way.unpacks)
        rows_bytes = std::max(rows_bytes, page_stride(kGroupRows * bytes_per_row(op.products[i].weight.format, op.k)));
      for (size_t before = 0; before < i; before++)
        if (ways[before].batch_at >= 0 && way.packs_as(ways[before])) way.batch_at = ways[before].batch_at;
      if (way.batch_at >= 0) continue;
      way.packs = true;
      way.batch_at = bytes;
      bytes += page_stride(way.batch_bytes(blocks, op.m));
    }
    if (bytes == 0) return;
    if (any_tiles) tile_scratch_bytes = rows_bytes + page_stride(table.tile_scratch_bytes(op.m));
    tile_scratch = static_cast<uint8_t*>(memory(Use::packed).get(size_t(tile_scratch_bytes * workers + bytes)));
    batches = tile_scratch + tile_scratch_bytes * workers;
    if (!any_slabs) return;
    slab_scratch_bytes = page_stride(kPackedScratchBytes + kSlabRows * op.m * int64_t(sizeof(float)));
    slab_scratch = static_cast<uint8_t*>(memory(Use::slabs).get(size_t(slab_scratch_bytes * workers)));
  }

  PackTask packing(const Ways& way) const { return {quantized, quantized_32, blocks, op.m, batches + way.batch_at}; }

  // Computes rows [begin, end) of one product. y points to row `begin`; its batch rows are y_stride floats apart.
  void product(size_t number, int64_t begin, int64_t end, float* y, int64_t y_stride, bool past_cache, int worker) {
    const Weight& w = op.products[number].weight;
    const Ways& way = ways[number];
    const int64_t row_bytes = bytes_per_row(w.format, op.k);
    const uint8_t* const weight = w.data + (w.slab_stride > 0 ? begin / kSlabRows * w.slab_stride : begin * row_bytes);
    if (way.slabs.kernel != nullptr) {
      uint8_t* const packed = slab_scratch + slab_scratch_bytes * worker;
      SlabTask t{weight, w.slab_stride, end - begin, blocks, batches + way.batch_at, op.m, y, y_stride};
      t.sums = reinterpret_cast<float*>(packed + kPackedScratchBytes);
      t.row_bytes = w.slab_stride > 0 ? 0 : row_bytes;
      t.packed = packed;
      return way.slabs.kernel(t);
    }
    uint8_t* const scratch = tile_scratch + tile_scratch_bytes * worker;
    if (!way.unpacks) return product_of_rows(w, way, weight, end - begin, y, y_stride, past_cache, scratch);
    for (int64_t row = begin; row < end; row += kGroupRows) {
      unpack_group(w, row, scratch);
      product_of_rows({w.format, scratch, w.rows, w.k}, way, scratch, std::min(kGroupRows, end - row), y + row - begin,
                      y_stride, past_cache, scratch);
    }
  }

  void product_of_rows(const Weight& w, const Ways& way, const uint8_t* weight, int64_t rows, float* y,
                       int64_t y_stride, bool past_cache, uint8_t* scratch) {
    const int64_t row_bytes = bytes_per_row(w.format, op.k);
    const int64_t tiled = way.tiles.kernel != nullptr ? rows / 16 * 16 : 0;
    if (tiled > 0) {
      TileTask t{};
      t.weight = weight;
      t.row_bytes = row_bytes;
      t.blocks = blocks;
      t.packed = batches + way.batch_at;
      t.m = op.m;
      t.y = y;
      t.y_stride = y_stride;
      t.row_end = tiled;
      t.past_cache = past_cache && y_stride % 16 == 0 && reinterpret_cast<uintptr_t>(y) % 64 == 0;
      t.scratch = scratch + rows_bytes;
      way.tiles.kernel(t);
    }
    if (tiled == rows) return;
    // as many batch rows at a time as fit in L2
    const int64_t chunk = std::max<int64_t>(16, (int64_t(512) << 10) / (blocks * int64_t(sizeof(BlockQ8K))));
    for (int64_t j = 0; j < op.m; j += chunk) {
      MatmulTask t{};
      t.weight = weight;
      t.row_bytes = row_bytes;
      t.k = op.k;
      t.blocks = quantized == nullptr ? nullptr : quantized + j * blocks;
      t.blocks_32 = quantized_32 == nullptr ? nullptr : quantized_32 + j * blocks;
      t.blocks_per_row = blocks;
      t.floats = x + j * op.k;
      t.m = std::min(chunk, op.m - j);
      t.y = y + j * y_stride;
      t.y_stride = y_stride;
      t.row_begin = tiled;
      t.row_end = rows;
      t.slab_stride = w.slab_stride;
      way.rows(t);
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
    MatmulRun run{op};
    run.ways.reserve(op.products.size());
    for (const auto& product : op.products) run.ways.emplace_back(table, product.weight, m);
    run.blocks = (k + kSuperBlock - 1) / kSuperBlock;
    run.x = op.x;
    float* normed = nullptr;
    if (op.norm != nullptr) run.x = normed = memory(Use::normed).floats(m * k);
    const size_t blocks = size_t(m * run.blocks);
    if (any_256) run.quantized = static_cast<BlockQ8K*>(memory(Use::quantized).get(blocks * sizeof(BlockQ8K)));
    if (any_32) run.quantized_32 = static_cast<BlockQ8x32*>(memory(Use::quantized_32).get(blocks * sizeof(BlockQ8x32)));
    run.prepare(table, pool.size());
    parallel_for(pool, m, std::max<int64_t>(1, kSmall / k), [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; j++) {
        if (normed != nullptr) table.rms_norm(op.x + j * k, op.norm, op.eps, k, normed + j * k);
        if (any_256) table.quantize_q8k(run.x + j * k, k, run.quantized + j * run.blocks);
        if (any_32) table.quantize_q8x32(run.x + j * k, k, run.quantized_32 + j * run.blocks);
        for (const Ways& way : run.ways)
          if (way.packs && way.slabs.kernel != nullptr) way.slabs.packing->row(run.packing(way), j);
      }
    });
    if (run.any_tiles) {
      auto pack = [&](int64_t index, int) {
        for (const Ways& way : run.ways)
          if (way.packs && way.tiles.kernel != nullptr)
            way.tiles.packing->block(run.packing(way), index / run.blocks, index % run.blocks);
      };
      run_tasks(pool, (m + 15) / 16 * run.blocks, m * k * 64, pack);
    }
    const std::vector<WorkItem> plan = plan_work(op, run.ways, pool.size(), run.any_tiles ? table.tile_rows : 0);
    int64_t longest = 0;
    for (const WorkItem& item : plan) longest = std::max(longest, item.end - item.begin);
    const int64_t item_floats = (longest * m + 15) / 16 * 16;
    float* items = op.combine == Combine::none ? nullptr : memory(Use::items).floats(2 * item_floats * pool.size());
    auto task = [&](int64_t index, int worker) {
      const WorkItem& item = plan[size_t(index)];
      const Product& product = op.products[item.product];
      const int64_t rows = item.end - item.begin, y_stride = product.weight.rows;
      float* y = product.y + item.begin;
      if (op.combine == Combine::none) {
        run.product(item.product, item.begin, item.end, y, y_stride, m >= kPastCacheM, worker);
        return;
      }
      float* first = items + 2 * item_floats * worker;
      run.product(item.product, item.begin, item.end, first, rows, false, worker);
      if (op.combine == Combine::add) {
        for (int64_t j = 0; j < m; j++) table.add(y + j * y_stride, first + j * rows, rows, y + j * y_stride);
        return;
      }
      float* second = first + item_floats;
      run.product(1, item.begin, item.end, second, rows, false, worker);
      for (int64_t j = 0; j < m; j++) table.silu_mul(first + j * rows, second + j * rows, rows, y + j * y_stride);
    };
    int64_t weights = 0;
    for (const auto& product : op.products)
      weights += product.weight.rows * (is_float(product.weight.format) ? kFloatCost * (k + 16) : k);
    run_tasks(pool, int64_t(plan.size()), weights * m, task);
  };
}

}  // namespace qtensor
