#include "cuda/operations.h"

#include <algorithm>

#include "cuda/lay_rows.h"

namespace qtensor {
namespace cuda {
namespace {

constexpr int64_t kAttentionScratchBytes = int64_t(64) << 20;  // limit for rows attended together
constexpr int64_t kUploadBytes = int64_t(16) << 20;            // part of a weight that is uploaded at a time

// Attends as many rows at a time as the limit of scratch memory allows.
int64_t attended_together(int64_t heads, int64_t tiles, int64_t dim) {
  return std::max<int64_t>(1, kAttentionScratchBytes / (heads * tiles * (kTile + dim + 4) * 4));
}

// For decoding: adjacent products of the same format are one launch. Returns false if this is not possible.
bool multiply_one_row(Device& device, const Products& p) {
  for (const WeightAndResult& to : p.each)
    if (!one_row_serves(to.weight.format, p.m, p.k, p.norm != nullptr) || to.y == p.x) return false;
  if (p.join == Join::silu_mul &&
      (p.each[0].weight.format != p.each[1].weight.format || p.each[0].weight.rows != p.each[1].weight.rows))
    return false;
  std::vector<OneRowOutput> out;
  for (const WeightAndResult& to : p.each) out.push_back({to.weight, to.y});
  for (size_t begin = 0; begin < out.size();) {
    size_t end = begin + 1;
    while (end < out.size() && end < begin + kMostParts && out[end].weight.format == out[begin].weight.format) end++;
    launch_one_row(device, {p.x, p.norm, p.eps}, &out[begin], int(end - begin), p.join);
    begin = end;
  }
  return true;
}

}  // namespace

void multiply(Device& device, const Products& p) {
  if (multiply_one_row(device, p)) return;
  const float* x = p.x;
  if (p.norm != nullptr) {
    float* const normed = static_cast<float*>(device.scratch(Scratch::normed, p.m * p.k * 4));
    launch_norm(device, x, p.norm, p.eps, p.m, p.k, normed);
    x = normed;
  }
  const void *quantized = nullptr, *quantized_32 = nullptr;
  const auto input_of = [&](const LaidWeight& w) -> const void* {
    if (is_float(w.format)) return x;
    const int64_t blocks = (p.k + kSuperBlock - 1) / kSuperBlock;
    if (has_blocks_of_32(w.format)) {
      if (quantized_32 != nullptr) return quantized_32;
      auto* const to =
          static_cast<BlockQ8x32*>(device.scratch(Scratch::quantized_32, p.m * blocks * int64_t(sizeof(BlockQ8x32))));
      launch_quantize_by_32(device, x, p.m, p.k, to);
      return quantized_32 = to;
    }
    if (quantized == nullptr) {
      auto* const to =
          static_cast<BlockQ8K*>(device.scratch(Scratch::quantized, p.m * blocks * int64_t(sizeof(BlockQ8K))));
      launch_quantize(device, x, p.m, p.k, to);
      quantized = to;
    }
    return quantized;
  };
  if (p.join == Join::none) {
    for (const WeightAndResult& to : p.each)
      launch_product(device, to.weight, input_of(to.weight), p.m, to.y, to.weight.rows);
    return;
  }
  const WeightAndResult& a = p.each[0];
  const int64_t n = p.m * a.weight.rows;
  float* const first = static_cast<float*>(device.scratch(Scratch::first, n * 4));
  launch_product(device, a.weight, input_of(a.weight), p.m, first, a.weight.rows);
  if (p.join == Join::add) {
    launch_add(device, a.y, first, n, a.y);
    return;
  }
  const LaidWeight& up = p.each[1].weight;
  float* const second = static_cast<float*>(device.scratch(Scratch::second, n * 4));
  launch_product(device, up, input_of(up), p.m, second, up.rows);
  launch_silu_mul(device, first, second, n, a.y);
}

void attend(Device& device, const float* q, int64_t heads, const Places& places, const Pool& pool, const Pool& window,
            float scale, int64_t tiles, float* out) {
  const int64_t dim = pool.dim, together = attended_together(heads, tiles, dim);
  for (int64_t row = 0; row < places.rows; row += together) {
    Places some = places;
    some.positions += row, some.sequences += row;
    some.rows = int(std::min<int64_t>(together, places.rows - row));
    const int64_t at = row * heads * dim;
    launch_attention(device, q + at, heads, some, pool, window, scale, tiles * kTile, out + at);
  }
}

void store_and_attend(Device& device, const Layer& t, int64_t tiles, float* out) {
  const int64_t dim = t.pool.dim;
  if (t.pool.format == CacheFormat::k8v8 && dim <= kPrepareDim && t.attended.rows > 0 &&
      t.attended.rows <= attended_together(t.heads, tiles, dim)) {
    const Attend attend = attend_of(device, t.q, t.heads, t.attended, t.pool, t.window, t.scale, tiles * kTile, out);
    launch_prepare(device, {attend, store_of(t.k, t.v, t.stored, t.pool, t.window), t.of_queries, t.of_keys});
    launch_attend(device, attend, takes_whole_queries(attend));
    return;
  }
  const auto turn = [&](const Turn& of, float* x, int64_t rows, int64_t heads) {
    if (of.rows != nullptr) launch_rope(device, x, rows, heads, dim, of.rows, of.cosine, of.sine, true);
  };
  turn(t.of_keys, t.k, t.stored.rows, t.pool.kv_heads);
  launch_store(device, t.k, t.v, t.stored, t.pool, t.window);
  turn(t.of_queries, t.q, t.attended.rows, t.heads);
  attend(device, t.q, t.heads, t.attended, t.pool, t.window, t.scale, tiles, out);
}

void upload_weight(Device& device, Format format, const uint8_t* data, int64_t rows, int64_t k, Address to) {
  grids_for(device, format);
  const BlockLayout block = layout_of(format);
  const int64_t from_bytes = k / block.values * (block.levels + block.scales), row_bytes = laid_row_bytes(format, k);
  const int64_t together = std::max<int64_t>(1, kUploadBytes / row_bytes);
  std::vector<uint8_t> laid(size_t(std::min(together, rows) * row_bytes));
  for (int64_t row = 0; row < rows; row += together) {
    const int64_t count = std::min(together, rows - row);
    lay_rows(format, data + row * from_bytes, count, k, laid.data());
    device.upload(to + Address(row * row_bytes), laid.data(), size_t(count * row_bytes));
  }
  device.wait();
}

}  // namespace cuda
}  // namespace qtensor
