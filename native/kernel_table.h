// The contract between the dispatcher and the kernels: one table of function pointers per instruction set.
//
// One arithmetic, one answer: every table must give the bits of the generic one. Dot products over quantized blocks are
// exact integers; floats meet once per 256 values, or per 32 where a format has a scale for so many, in the order
// written at each entry, with fused multiply-add; float reductions run over a virtual vector of 16 lanes that is
// reduced as (l, l+8), (l, l+4), (l, l+2), (l, l+1).
//
// Kernels never allocate, throw or print. Their callers have checked every size.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "cache_format.h"

namespace qtensor {

// y[j][n] = dot(row n of the weight, row j of the batch) for n in [row_begin, row_end) and the M rows of the batch.
// Here a `row` alone is one of the weight. What Python calls a row is a row of the batch: it turns round in this
// product, for to the kernels a row of the batch is a column of what they pack, of a tile, or a lane of a vector.
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
  int64_t
      slab_stride;  // of a packed weight, which the generic kernels take; its end is that of a slab or of the matrix
};

// The same product with a packed weight (packed_weights.h), from its first slab on: whole slabs or to its last row. Or
// with one in rows, of which a block of 64 at most is packed at a time.
struct SlabTask {
  const uint8_t* weight;
  int64_t slab_stride;  // bytes from slab to slab
  int64_t rows;
  int64_t blocks;    // per row
  const uint8_t* x;  // [block][batch row], packed
  int64_t m;
  float* y;
  int64_t y_stride;
  float* sums;                // [batch row][kSlabRows], for this worker alone; begins at a cache line
  int64_t row_bytes = 0;      // of a weight in rows
  uint8_t* packed = nullptr;  // kPackedScratchBytes for rows that the kernel packs, likewise
};
constexpr int64_t kPackedScratchBytes = 64 * 8 * 34;  // of Q8_0, the largest

// Activations are packed before a product by tiles or with a packed weight.
struct PackTask {
  const BlockQ8K* x;       // m x blocks
  const BlockQ8x32* x_32;  // the same, for weights in blocks of 32
  int64_t blocks, m;
  uint8_t* packed;
};
// For packed weights: row after row.
struct SlabPacking {
  int64_t block_bytes;  // of a batch row
  void (*row)(const PackTask&, int64_t row);
};
// For tiles: one call for each 16 batch rows and each block.
struct TilePacking {
  int64_t (*bytes)(int64_t blocks, int64_t m);
  void (*block)(const PackTask&, int64_t tile, int64_t block);
};

// The same product for large M by kernels that work on tiles of 16 x 16. Rows come in multiples of 16.
struct TileTask {
  const uint8_t* weight;
  int64_t row_bytes;
  int64_t blocks;         // per row
  const uint8_t* packed;  // every M tile, packed for the format; begins at a page, for speed alone
  int64_t m;
  float* y;
  int64_t y_stride;
  int64_t row_begin, row_end;
  bool past_cache;   // y is too large to be kept in a cache, and its batch rows begin at cache lines
  uint8_t* scratch;  // tile_scratch_bytes(m), for this worker alone; begins at a page as well
};

// Causal attention of `queries` vectors that share one KV head, over halves. Query i sees positions [0, limits[i]).
// Keys lie as [dim][kTilePositions] halves per tile, values as [kTilePositions][dim].
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

// The same over a cache of bytes or less. q is rotated and rounded to bytes, q = dq * bytes; keys are k = dk_j * bytes,
// values v = dv_j * bytes. Per tile, in order of position, everything in units of log2:
//   s_j = float(exact sum q k) * (dk_j * u), u = dq * scale * log2(e)
//   m' = max(m, max_j s_j);  p_j = exp2(s_j - m');  c = exp2(m - m');  l = fma(l, c, reduce16(p))
//   w_j = p_j * dv_j;  t = max_j w_j;  P_j = round_to_even(w_j * (32767 / t)), 15 bits of the tile's largest
//   o = fma(float(exact sum P_j v_j), t / 32767, o * c)
// t < 1e-30 leaves o * c. The result is o / l, rotated back. NaN in what is stored shows as NaN.
struct ByteAttentionTask {
  const float* const* q;
  float* const* out;
  const int64_t* limits;
  int64_t queries;
  int64_t dim;  // multiple of 16, at most kMostByteDim
  CacheFormat format;
  const uint8_t* const* tiles;   // a head's 128 positions each, in `format`
  const uint8_t* const* window;  // below 8 bits: the same in k8v8, for tile 0 and for the tile a query itself stands in
  float scale;
  bool by_tiles;     // where the family has tiles for it; the bits are the same
  uint8_t* scratch;  // byte_attention_scratch(queries, dim), aligned to 64
};
constexpr int64_t kMostByteDim = 1024;  // up to here a sum of byte products fits a float's 24 bits
static constexpr int64_t byte_attention_scratch(int64_t queries, int64_t dim) {
  return queries * (6 * dim + 64) + 320 * dim + 45056;
}

using MatmulKernel = void (*)(const MatmulTask&);
using TileKernel = void (*)(const TileTask&);
using SlabKernel = void (*)(const SlabTask&);
// Kernels that want batch rows packed, and how; without a kernel where there is none.
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

  // d = max|x| / 127; q = round_to_even(x * (127 / max|x|)). max|x| < 1e-30 gives d = 0; NaN or Inf gives d = NaN; q =
  // 0.
  void (*quantize_q8k)(const float* x, int64_t k, BlockQ8K* out);
  // The same for each 32 values.
  void (*quantize_q8x32)(const float* x, int64_t k, BlockQ8x32* out);

  // Products with rows of any block format, or null for one the family does not know.
  // K-quants, per 256-block b in order: f = float(sum q*sc*x) * d; with mins f = fma(-float(sum m*sums), dmin, f);
  // acc = fma(f, dx, acc). Other blocks of 256 (kernels/portable/unpacked_blocks.h takes them apart) the same, d times
  // the format's step first.
  // Blocks of 32, of which weights and activations have a scale each: per 256 values f = 0, then per block in order
  // f = fma(float(sum q*x), d * dx, f), where it has a min (Q4_1, Q5_1) also f = fma(float(sum x) * dx, m, f);
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
  // Rotates one head (kernels/portable/head_vectors.h) and rounds it for the cache: with 8 bits top = max|x|, scale =
  // half(top / 127), levels = 128 + round_to_even(x * (1 / scale)); with less the numbers of the nearest levels.
  void (*round_head)(const float* x, int64_t dim, int bits, uint8_t* levels, half* scale);
  void (*attention_bytes)(const ByteAttentionTask&);

  // No operations but ceilings. The exclusive or of the 64-bit words of so many cache lines, which are read in order
  // (1), or in 2 or 4 places at a time:
  uint64_t (*read_lines)(const uint8_t* data, int64_t lines, int places);
  // `rounds` times `peak_products` byte products in registers; `random` holds 4096 bytes.
  int32_t (*byte_peak)(const int8_t* random, int64_t rounds);
  int64_t peak_products;

  // Rows of a sequence that attention over bytes best takes together by tiles (0: the family has none for it).
  int64_t attention_tile_rows;

  // Packed weights for so many batch rows, where they are faster than tiles of rows that are unpacked first; null where
  // the family has kernels for none.
  Slabs (*slabs)(Format, int64_t m);
  bool packs_by_default;  // packed weights are slower nowhere
  // The same for weights in rows of whole super-blocks.
  Slabs (*slabs_of_rows)(Format, int64_t m);

  // Tiles for so many batch rows, where they are faster than rows; null where the family has none. Weights in blocks of
  // 32 have rows of whole super-blocks.
  Tiles (*tiles)(Format, int64_t m);
  int64_t tile_rows;  // of the weight, that are best taken together
  int64_t (*tile_scratch_bytes)(int64_t m);
};

extern const KernelTable kGenericKernels;
#if defined(QTENSOR_X86)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvxVnniKernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAmxKernels;  // what tiles do otherwise; null where AVX-512's entry serves as well
struct TileKernelsWithMins {
  TileKernel q4_k, q5_k;
};
extern const TileKernelsWithMins kAmxKernelsWithMins;  // apart, for they take as long to compile as all else
#endif
#if defined(QTENSOR_ARM64)
extern const KernelTable kNeonKernels;
extern const KernelTable kNeonI8mmKernels;
#endif

}  // namespace qtensor
