// What is more than one launch: products with what comes before and after them, and attention in parts.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device.h"

namespace qtensor {
namespace cuda {

// As in ops/matmul.h, over addresses of the device.
struct WeightAndResult {
  LaidWeight weight;
  float* y;  // m x weight.rows
};
struct Products {
  const float* x;
  int64_t m, k;
  std::vector<WeightAndResult> each;
  const float* norm;  // may be null
  float eps;
  Join join;
};
void multiply(Device& device, const Products& products);

// Attention of all rows, as many at a time as scratch memory is meant to hold. `tiles`: of the row that sees the most,
// or more.
void attend(Device& device, const float* q, int64_t heads, const Places& places, const Pool& pool, const Pool& window,
            float scale, int64_t tiles, float* out);

// Keys and queries are rotated, keys and values stored, and rows attended: what a layer does between its products.
// Rows that are stored and rows that are attended may be others.
struct Layer {
  Turn of_keys, of_queries;  // adjacent pairs, or none
  float* k;
  const float* v;
  Places stored;
  float* q;
  int64_t heads;
  Places attended;
  Pool pool, window;
  float scale;
};
void store_and_attend(Device& device, const Layer& layer, int64_t tiles, float* out);

// A file's rows, laid out anew and copied to the device, a few at a time.
void upload_weight(Device& device, Format format, const uint8_t* data, int64_t rows, int64_t k, Address to);

}  // namespace cuda
}  // namespace qtensor
