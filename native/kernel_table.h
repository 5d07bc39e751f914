// The contract between the dispatcher and the kernels: one table of function pointers per instruction set.
//
// Every table must give the same bits as the generic one. Dot products over quantized blocks are exact integers. There
// is one float step per 256 values, or per 32 for formats with a scale for 32, in the order specified at each entry,
// with fused multiply-add. Float reductions use a virtual vector of 16 lanes, which is reduced as (l, l+8), (l, l+4),
// (l, l+2), (l, l+1).
//
// Kernels never allocate, throw or print. Their callers have checked all sizes.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "cache_format.h"

namespace qtensor {

// y[j][n] = dot(row n of the weight, row j of the batch) for n in [row_begin, row_end) and the m rows of the batch.
// In the kernels, `row` alone means a row of the weight; Python's rows are batch rows here.
struct MatmulTask {
  const uint8_t* weight;        // first row of the matrix
  int64_t row_bytes;            // distance between rows
  int64_t k;                    // values per row
  const BlockQ8K* blocks;       // weights in blocks of 256: m x blocks_per_row activations
  const BlockQ8x32* blocks_32;  // weights in blocks of 32: the same
  int64_t blocks_per_row;
  const float* floats;  // float weights: m x k activations
  int64_t m;
  float* y;
  int64_t y_stride;  // floats between batch rows of y
  int64_t row_begin, row_end;
  int64_t slab_stride;  // of a packed weight (generic kernels only); row_end is then the end of a slab or of the matrix
};

// The same product with a packed weight (packed_weights.h): whole slabs, or up to the last row. With row_bytes, the
// weight is in rows, and the kernel packs or unpacks one block of up to 64 rows at a time.
struct SlabTask {
  const uint8_t* weight;
  int64_t slab_stride;  // bytes from slab to slab
  int64_t rows;
  int64_t blocks;    // per row
  const uint8_t* x;  // [block][batch row], packed
  int64_t m;
  float* y;
  int64_t y_stride;
  float* sums;                // [batch row][kSlabRows], for this worker only; begins at a cache line
  int64_t row_bytes = 0;      // of a weight in rows; 0: the weight is packed
  uint8_t* packed = nullptr;  // kPackedScratchBytes for packed rows; for this worker only, aligned like sums
};
constexpr int64_t kPackedScratchBytes = 64 * 8 * 34;  // for Q8_0, the largest

// Activations are packed before a product by tiles or with a packed weight.
struct PackTask {
  const BlockQ8K* x;       // m x blocks
  const BlockQ8x32* x_32;  // the same, for weights in blocks of 32
  int64_t blocks, m;
  uint8_t* packed;
};
// How batch rows are packed for packed weights: one call per batch row.
struct SlabPacking {
  int64_t block_bytes;  // of a batch row
  void (*row)(const PackTask&, int64_t row);
};
// How batch rows are packed for tiles: one call for each 16 batch rows and each block.
struct TilePacking {
  int64_t (*bytes)(int64_t blocks, int64_t m);
  void (*block)(const PackTask&, int64_t tile, int64_t block);
};

// The same product for large M by kernels that process tiles of 16 x 16. The number of rows is a multiple of 16.
struct TileTask {
  const uint8_t* weight;
  int64_t row_bytes;
  int64_t blocks;         // per row
  const uint8_t* packed;  // all batch rows, packed for the format; begins at a page, only for speed
  int64_t m;
  float* y;
  int64_t y_stride;
  int64_t row_begin, row_end;
  bool past_cache;   // use streaming stores: y is too large for a cache, and its rows begin at cache lines
  uint8_t* scratch;  // tile_scratch_bytes(m), for this worker only; begins at a page, only for speed
};

// Causal attention of `queries` vectors, which share one KV head, over a cache of halves. Query i sees positions
// [0, limits[i]).
// Keys are stored as [dim][kTilePositions] halves per tile, values as [kTilePositions][dim].
// Per tile, in order of position: s_j = scale * (fma chain over dim); m' = max(m, max_j s_j); p_j = exp(s_j - m');
// l = fma(l, exp(m - m'), reduce16(p)); o = o * exp(m - m') then o = fma(p_j, v_j, o) in order of j. Result o / l.
struct AttentionTask {
  const float* const* q;  // queries pointers to dim floats
  float* const* out;      // queries pointers to dim floats
  const int64_t* limits;  // queries
  int64_t queries;
  int64_t dim;  // multiple of 16
  const half* const* k_tiles;
  const half* const* v_tiles;
  float scale;
  float* scratch;  // attention_scratch_floats(queries, dim)
};
static constexpr int64_t attention_scratch_floats(int64_t queries, int64_t dim) {
  return queries * (dim + kTilePositions + 2) + 64;
}

// The same over a cache with 8 bits or less. q is rotated and rounded to bytes, q = dq * bytes; keys are
// k = dk_j * bytes, values v = dv_j * bytes. Per tile, in order of position, all in units of log2:
//   s_j = float(exact sum q k) * (dk_j * u), u = dq * scale * log2(e)
//   m' = max(m, max_j s_j);  p_j = exp2(s_j - m');  c = exp2(m - m');  l = fma(l, c, reduce16(p))
//   w_j = p_j * dv_j;  t = max_j w_j;  P_j = round_to_even(w_j * (32767 / t)), at most 15 bits
//   o = fma(float(exact sum P_j v_j), t / 32767, o * c)
// If t < 1e-30, o becomes o * c. The result is o / l, rotated back. NaN in the cache gives NaN.
struct ByteAttentionTask {
  const float* const* q;
  float* const* out;
  const int64_t* limits;
  int64_t queries;
  int64_t dim;  // multiple of 16, at most kMostByteDim
  CacheFormat format;
  const uint8_t* const* tiles;   // 128 positions of the head each, in `format`
  const uint8_t* const* window;  // below 8 bits: the same in k8v8, for tile 0 and for the tile of each query's position
  float scale;
  bool by_tiles;     // use AMX tiles if the family has them; the bits are the same
  uint8_t* scratch;  // byte_attention_scratch(queries, dim), aligned to 64
};
constexpr int64_t kMostByteDim = 1024;  // up to this dimension, a sum of byte products fits in the 24 bits of a float
static constexpr int64_t byte_attention_scratch(int64_t queries, int64_t dim) {
  return queries * (6 * dim + 64) + 320 * dim + 45056;
}

using MatmulKernel = void (*)(const MatmulTask&);
using TileKernel = void (*)(const TileTask&);
using SlabKernel = void (*)(const SlabTask&);
// A kernel that needs packed batch rows, and how to pack them; kernel is null if the family has none.
struct Tiles {
  TileKernel kernel = nullptr;
  const TilePacking* packing = nullptr;
};
struct Slabs {
  SlabKernel kernel = nullptr;
  const SlabPacking* packing = nullptr;
};

struct KernelTable {
  const char* name;

  // d = max|x| / 127; q = round_to_even(x * (127 / max|x|)). If max|x| < 1e-30, d = 0 and q = 0; with NaN or infinity,
  // d = NaN and q = 0.
  void (*quantize_q8k)(const float* x, int64_t k, BlockQ8K* out);
  // The same, with a d for each 32 values.
  void (*quantize_q8x32)(const float* x, int64_t k, BlockQ8x32* out);

  // Products with weights in rows; null for formats without a kernel.
  // K-quants, per 256-block b in order: f = float(sum q*sc*x) * d; with mins f = fma(-float(sum m*sums), dmin, f);
  // acc = fma(f, dx, acc). Other blocks of 256 (kernels/portable/unpacked_blocks.h) the same, with d multiplied by the
  // format's step first.
  // Blocks of 32, with a scale each for weights and activations: per 256 values f = 0, then per block in order
  // f = fma(float(sum q*x), d * dx, f), with a min (Q4_1, Q5_1) also f = fma(float(sum x) * dx, m, f);
  // acc = acc + f.
  // Floats: lane l takes fma(w, x, acc) over k = l, l+16, ...; then the reduction.
  MatmulKernel (*matmul)(Format);

  // out = (x * (1 / sqrt(sum x^2 / n + eps))) * weight, sum of squares by lanes.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // out = gate / (1 + exp(-gate)) * up
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);
  void (*add)(const float* a, const float* b, int64_t n, float* out);
  // In place; max, exp of the difference, sum by lanes, one division each.
  void (*softmax)(float* x, int64_t n);
  // Rotates one head of `dim` floats: pairs (2i, 2i+1) or (i, i + dim/2); cosine and sine hold dim/2 floats.
  void (*rope_adjacent)(float* x, const float* cosine, const float* sine, int64_t dim);
  void (*rope_halves)(float* x, const float* cosine, const float* sine, int64_t dim);
  // Rounds to half, to nearest even.
  void (*to_half)(const float* x, int64_t n, half* out);
  void (*attention)(const AttentionTask&);
  // Rotates one head (kernels/portable/head_vectors.h) and rounds it for the cache. With 8 bits, top = max|x|, scale =
  // half(top / 127), levels = 128 + round_to_even(x * (1 / scale)). With fewer bits, `levels` are the indices of the
  // nearest levels.
  void (*round_head)(const float* x, int64_t dim, int bits, uint8_t* levels, half* scale);
  void (*attention_bytes)(const ByteAttentionTask&);

  // For measuring the limits of the machine. Returns the exclusive or of the 64-bit words of `lines` cache lines, which
  // are read in order (places = 1), or from 2 or 4 places alternately.
  uint64_t (*read_lines)(const uint8_t* data, int64_t lines, int places);
  // Computes `rounds` times `peak_products` byte products in registers; `random` holds 4096 bytes.
  int32_t (*byte_peak)(const int8_t* random, int64_t rounds);
  int64_t peak_products;

  // Rows of a sequence that attention over bytes processes together with AMX tiles; 0 if the family has none.
  int64_t attention_tile_rows;

  // Kernels for packed weights and m batch rows, if they are faster than tiles that unpack rows first. Null if the
  // family has none.
  Slabs (*slabs)(Format, int64_t m);
  bool packs_by_default;  // packed weights are never slower
  // The same for weights in rows whose length is a multiple of 256.
  Slabs (*slabs_of_rows)(Format, int64_t m);

  // Tiles for m batch rows, if they are faster than row kernels. Null if the family has none. The length of a row is
  // then a multiple of 256.
  Tiles (*tiles)(Format, int64_t m);
  int64_t tile_rows;  // rows of the weight per work item
  int64_t (*tile_scratch_bytes)(int64_t m);
};

extern const KernelTable kGenericKernels;
#if defined(QTENSOR_X86)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvxVnniKernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAmxKernels;  // entries that use tiles; the others are null and taken from AVX-512
struct TileKernelsWithMins {
  TileKernel q4_k, q5_k;
};
extern const TileKernelsWithMins kAmxKernelsWithMins;  // in another object, to compile in parallel
#endif
#if defined(QTENSOR_ARM64)
extern const KernelTable kNeonKernels;
extern const KernelTable kNeonI8mmKernels;
#endif

}  // namespace qtensor
