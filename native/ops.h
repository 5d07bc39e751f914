// Operations over whole arrays, as steps that can run now or be kept in a program and run again.
//
// A step holds pointers, not values: what it computes depends on what the arrays hold when it runs. Sizes are checked
// when a step is made; what arrays contain (row numbers, positions, block tables) is checked when it runs, before
// anything is written. Both throw std::invalid_argument.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "blocks.h"
#include "cache_format.h"
#include "threads.h"

namespace qtensor {

using Step = std::function<void(ThreadPool&)>;

struct Weight {
  Format format;
  const uint8_t* data;
  int64_t rows, k;
};
int64_t bytes_per_row(Format format, int64_t k);

struct Product {
  Weight weight;
  float* y;  // columns x weight.rows
};

// Where rows of a batch stand: row i continues sequences[i] at positions[i]; tables[s][t] is the pool block that holds
// positions [128 t, 128 t + 128) of sequence s.
struct RowPlaces {
  const int32_t* positions;
  const int32_t* sequences;
  const int32_t* tables;
  int64_t rows, table_count, table_length;
};
// Blocks of kv_heads heads each, as cache_format.h lays them out.
struct KeyValuePool {
  uint8_t* data;
  int64_t blocks, run, kv_heads, dim;  // run: blocks whose heads lie together, see cache_format.h
  CacheFormat format;
};
// Below 8 bits a second pool, of 8 bits, holds the first tile of a sequence and the one it is writing; its tables have
// the shape of the others. In both, -1 says that a tile is not there.
struct RecentTiles {
  const int32_t* tables;  // null: the pool has 8 bits or more
  KeyValuePool pool;
};

Step embed_rows(Weight table, const int32_t* ids, int64_t rows, float* out);
Step gather_rows(const float* x, int64_t x_rows, int64_t width, const int32_t* ids, int64_t rows, float* out);
Step rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* out);
// Products of the same activations, which are quantised once. With a norm the activations are rms_norm(x) of each row.
// Combine::add adds the product to what y holds; Combine::silu_mul takes two products of one shape and writes
// silu(first) * second to the first's y. What happens between is float arithmetic in the order of the single
// operations.
enum class Combine { none, add, silu_mul };
struct Matmul {
  const float* x;
  int64_t columns, k;
  std::vector<Product> products;
  const float* norm = nullptr;
  float eps = 0.0f;
  Combine combine = Combine::none;
};
Step matmul(Matmul op);
Step rope(float* x, int64_t rows, int64_t heads, int64_t dim, const int32_t* positions, const float* cosine,
          const float* sine, int64_t table_rows, bool adjacent);
// Keys and values go to both pools where both have a block for the tile, and must find one.
Step store_key_values(const float* k, const float* v, RowPlaces places, KeyValuePool pool, RecentTiles recent);
// A row at position p reads its tiles from the pool; with recent tiles, tile 0 and tile p / 128 from those.
Step attention(const float* q, int64_t heads, RowPlaces places, KeyValuePool pool, RecentTiles recent, float scale,
               float* out);
Step silu_mul(const float* gate, const float* up, int64_t n, float* out);
Step add(const float* a, const float* b, int64_t n, float* out);
Step softmax(float* x, int64_t rows, int64_t width);
Step argmax(const float* x, int64_t rows, int64_t width, int32_t* out);

// cos and sin of positions[row] * frequency[i], times `factor`; tables of rows x dim_half floats. Angles are reduced in
// double precision with our own polynomials, so every machine has the same table; they must be below 1.6 million.
Step rope_table(const double* frequency, int64_t dim_half, const int32_t* positions, int64_t rows, double factor,
                float* cosine, float* sine);

// The generic dequantisation of `k` values from a row's blocks.
void dequantise_row(Format format, const uint8_t* row, int64_t k, float* out);

class Program {
 public:
  void add(Step step) { steps_.push_back(std::move(step)); }
  void run() const {
    const std::lock_guard<std::mutex> lock(engine_mutex());
    for (const auto& step : steps_) step(thread_pool());
  }
  int64_t size() const { return int64_t(steps_.size()); }

 private:
  std::vector<Step> steps_;
};

}  // namespace qtensor
