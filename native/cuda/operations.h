// Operations of several launches: products fused with the operations around them, and attention in parts.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device.h"

namespace qtensor {
namespace cuda {

// As in ops/matmul.h, with addresses of the device.
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

// Attention of all rows, as many at a time as the limit of scratch memory allows. `tiles`: an upper bound of the tiles
// that a row sees.
void attend(Device& device, const float* q, int64_t heads, const Places& places, const Pool& pool, const Pool& window,
            float scale, int64_t tiles, float* out);

// The operations of a layer between its products: keys and queries are rotated, keys and values are stored, and rows
// are attended. The rows that are stored and those that are attended may differ.
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

// Converts rows of a file to the device's layout and uploads them, a few at a time.
void upload_weight(Device& device, Format format, const uint8_t* data, int64_t rows, int64_t k, Address to);

}  // namespace cuda
}  // namespace qtensor
