// The CUDA kernels on emulated lanes as a separate kernel family for tests only, so that they pass all tests of the
// CPU's families. Data that a GPU would receive once is copied in each call.
#include <algorithm>
#include <vector>

#include "cuda/lay_rows.h"
#include "emulated_device.h"
#include "kernel_table.h"

namespace qtensor {
namespace {

using cuda::Aligned;
using cuda::emulated_device;
using cuda::Places;
using cuda::Pool;

void quantize_q8k(const float* x, int64_t k, BlockQ8K* out) { cuda::launch_quantize(emulated_device(), x, 1, k, out); }
void quantize_q8x32(const float* x, int64_t k, BlockQ8x32* out) {
  cuda::launch_quantize_by_32(emulated_device(), x, 1, k, out);
}

template <Format FORMAT>
void matmul(const MatmulTask& t) {
  const int64_t rows = t.row_end - t.row_begin;
  if (rows <= 0) return;
  const Aligned laid(rows * cuda::laid_row_bytes(FORMAT, t.k));
  cuda::lay_rows(FORMAT, t.weight + t.row_begin * t.row_bytes, rows, t.k, static_cast<uint8_t*>(laid.data));
  const void* const x = cuda::is_float(FORMAT)     ? static_cast<const void*>(t.floats)
                        : has_blocks_of_32(FORMAT) ? static_cast<const void*>(t.blocks_32)
                                                   : t.blocks;
  const cuda::LaidWeight weight{FORMAT, static_cast<const uint8_t*>(laid.data), rows, t.k};
  cuda::launch_product(emulated_device(), weight, x, t.m, t.y + t.row_begin, t.y_stride);
}

#define QTENSOR_CASE(format) \
  case Format::format:       \
    return matmul<Format::format>;
MatmulKernel matmul_kernel(Format format) {
  switch (format) {
    QTENSOR_CASE(F32)
    QTENSOR_CASE(F16)
    QTENSOR_CASE(BF16)
    QTENSOR_CASE(Q4_K)
    QTENSOR_CASE(Q5_K)
    QTENSOR_CASE(Q6_K)
    QTENSOR_CASE(Q8_0)
    QTENSOR_CASE(Q4_0)
    QTENSOR_CASE(Q4_1)
    QTENSOR_CASE(Q5_0)
    QTENSOR_CASE(Q5_1)
    QTENSOR_CASE(IQ4_NL)
    QTENSOR_CASE(MXFP4)
    QTENSOR_CASE(Q2_K)
    QTENSOR_CASE(Q3_K)
    QTENSOR_CASE(IQ4_XS)
    QTENSOR_CASE(IQ2_XXS)
    QTENSOR_CASE(IQ2_XS)
    QTENSOR_CASE(IQ2_S)
    QTENSOR_CASE(IQ3_XXS)
    QTENSOR_CASE(IQ3_S)
    QTENSOR_CASE(IQ1_S)
    QTENSOR_CASE(IQ1_M)
    QTENSOR_CASE(TQ1_0)
    QTENSOR_CASE(TQ2_0)
    default:
      return nullptr;
  }
}
#undef QTENSOR_CASE

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  cuda::launch_norm(emulated_device(), x, weight, eps, 1, n, out);
}
void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  cuda::launch_silu_mul(emulated_device(), gate, up, n, out);
}
void add(const float* a, const float* b, int64_t n, float* out) { cuda::launch_add(emulated_device(), a, b, n, out); }
void softmax(float* x, int64_t n) { cuda::launch_softmax(emulated_device(), x, 1, n); }

template <bool ADJACENT>
void rope(float* x, const float* cosine, const float* sine, int64_t dim) {
  const int32_t first = 0;
  cuda::launch_rope(emulated_device(), x, 1, 1, dim, &first, cosine, sine, ADJACENT);
}

// Store the vector of a head in a slot of a cache with one block, and read it back.
Aligned* stored(const float* x, int64_t dim, CacheFormat format, int slot) {
  Aligned* const head = new Aligned(head_bytes(format, dim));
  const int32_t position = slot, none = 0;
  const Pool pool{static_cast<uint8_t*>(head->data), 1, 1, int(dim), format};
  cuda::launch_store(emulated_device(), x, x, Places{&position, &none, &none, nullptr, 1, 1}, pool, pool);
  return head;
}
int some_slot() { return int(emulated_device().launches() * 37 % kTilePositions); }

void to_half(const float* x, int64_t n, half* out) {
  const int slot = some_slot();
  const std::unique_ptr<Aligned> head(stored(x, n, CacheFormat::f16, slot));
  const half* const keys = static_cast<const half*>(head->data);
  const half* const values = keys + n * kTilePositions + slot * n;
  for (int64_t i = 0; i < n; i++) out[i] = keys[i * kTilePositions + slot];
  if (std::memcmp(out, values, size_t(n) * 2) != 0) lanes::refuse("keys and values are rounded differently");
}
void round_head(const float* x, int64_t dim, int bits, uint8_t* levels, half* scale) {
  const int slot = some_slot(), group = slot / 4;
  const CacheFormat format = bits == 8 ? CacheFormat::k8v8 : bits == 4 ? CacheFormat::k4v4 : CacheFormat::k4v3;
  const std::unique_ptr<Aligned> head(stored(x, dim, format, slot));
  const uint8_t* const data = static_cast<const uint8_t*>(head->data);
  const uint8_t* const values = data + key_bytes(format, dim) + slot % 4;
  for (int64_t d = 0; d < dim; d++) {
    if (bits == 8) levels[d] = values[(group * dim + d) * 4];
    if (bits == 4) levels[d] = values[(group / 2 * dim + d) * 4] >> (group % 2 * 4) & 15;
    if (bits == 3)
      levels[d] = uint8_t((values[(group / 4 * dim + d) * 4] >> (group % 4 * 2) & 3) |
                          (values[((8 + group / 8) * dim + d) * 4] >> (group % 8) & 1) << 2);
  }
  std::memcpy(scale, data + scales_at(format, dim) + 2 * (kTilePositions + slot), 2);
}

// Queries of a head that share tiles at arbitrary addresses: a sequence, whose table contains distances from the first
// tile.
struct SharedTiles {
  std::vector<int32_t> positions, sequences, table, window_table;
  Pool pool, window;
  int64_t most = 0;

  SharedTiles(const int64_t* limits, int64_t queries, int64_t dim, CacheFormat format)
      : sequences(size_t(queries), 0),
        pool{nullptr, 1, 1, int(dim), format},
        window{nullptr, 1, 1, int(dim), CacheFormat::k8v8} {
    for (int64_t i = 0; i < queries; i++) {
      positions.push_back(int32_t(limits[i] - 1));
      most = std::max(most, limits[i]);
    }
    table.resize(size_t((most + kTilePositions - 1) / kTilePositions));
    window_table.resize(table.size());
  }
  static void name(Pool& pool, std::vector<int32_t>& table, int64_t tile, const uint8_t* data) {
    if (pool.data == nullptr) pool.data = const_cast<uint8_t*>(data);
    table[size_t(tile)] = int32_t((data - pool.data) / head_bytes(pool.format, pool.dim));
    if (cuda::head_of(pool, table[size_t(tile)], 0) != data) lanes::refuse("a tile that lies between blocks");
  }
  void attend(const float* const* q, float scale, float* const* out) {
    const int64_t queries = int64_t(positions.size()), dim = pool.dim;
    const Aligned x(queries * dim * 4), y(queries * dim * 4);
    for (int64_t i = 0; i < queries; i++) std::memcpy(static_cast<float*>(x.data) + i * dim, q[i], size_t(dim) * 4);
    const bool small = pool.format > CacheFormat::k8v8;
    const Places places{positions.data(), sequences.data(), table.data(), small ? window_table.data() : nullptr,
                        int(queries),     int(table.size())};
    cuda::launch_attention(emulated_device(), static_cast<const float*>(x.data), 1, places, pool, window, scale, most,
                           static_cast<float*>(y.data));
    if (pool.format != CacheFormat::f16) {  // the other kernels must give the same bits
      const Aligned tiled(queries * dim * 4);
      const cuda::Attend t = cuda::attend_of(emulated_device(), static_cast<const float*>(x.data), 1, places, pool,
                                             window, scale, most, static_cast<float*>(tiled.data));
      emulated_device().launch(cuda::attend_begin, {unsigned(queries)}, cuda::kQueryThreads, 0, t);
      cuda::launch_attend(emulated_device(), t, false);
      if (std::memcmp(y.data, tiled.data, size_t(queries * dim) * 4) != 0) lanes::refuse("attention differs by tiles");
    }
    for (int64_t i = 0; i < queries; i++) std::memcpy(out[i], static_cast<float*>(y.data) + i * dim, size_t(dim) * 4);
  }
};

void attention(const AttentionTask& t) {
  SharedTiles tiles(t.limits, t.queries, t.dim, CacheFormat::f16);
  for (size_t i = 0; i < tiles.table.size(); i++) {
    if (t.v_tiles[i] != t.k_tiles[i] + t.dim * kTilePositions) lanes::refuse("values that do not follow their keys");
    tiles.name(tiles.pool, tiles.table, int64_t(i), reinterpret_cast<const uint8_t*>(t.k_tiles[i]));
  }
  tiles.attend(t.q, t.scale, t.out);
}
void attention_bytes(const ByteAttentionTask& t) {
  SharedTiles tiles(t.limits, t.queries, t.dim, t.format);
  const bool small = t.format > CacheFormat::k8v8;
  for (const int32_t position : tiles.positions) {
    const int64_t own = position / kTilePositions;
    if (small) {
      tiles.name(tiles.window, tiles.window_table, 0, t.window[0]);
      tiles.name(tiles.window, tiles.window_table, own, t.window[own]);
    }
    for (int64_t i = small ? 1 : 0; i < own + (small ? 0 : 1); i++) tiles.name(tiles.pool, tiles.table, i, t.tiles[i]);
  }
  tiles.attend(t.q, t.scale, t.out);
}

KernelTable table() {
  KernelTable t = kGenericKernels;  // kernels that measure upper limits are not replaced
  t.name = "cuda-emulated";
  t.quantize_q8k = quantize_q8k;
  t.quantize_q8x32 = quantize_q8x32;
  t.matmul = matmul_kernel;
  t.rms_norm = rms_norm;
  t.silu_mul = silu_mul;
  t.add = add;
  t.softmax = softmax;
  t.rope_adjacent = rope<true>;
  t.rope_halves = rope<false>;
  t.to_half = to_half;
  t.attention = attention;
  t.round_head = round_head;
  t.attention_bytes = attention_bytes;
  return t;
}

}  // namespace

extern const KernelTable kCudaEmulatedKernels = table();

}  // namespace qtensor
