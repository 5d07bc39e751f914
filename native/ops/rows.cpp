#include "ops/rows.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "ops/packing.h"
#include "runtime/dispatch.h"
#include "runtime/work_sharing.h"

namespace qtensor {
namespace {

void check_ids(const int32_t* ids, int64_t count, int64_t limit, const char* what) {
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= limit)
      refuse(std::string(what) + " " + std::to_string(ids[i]) + " is outside 0.." + std::to_string(limit - 1));
}

}  // namespace

Step embed_rows(Weight table, const int32_t* ids, int64_t rows, float* out) {
  const int64_t row_bytes = bytes_per_row(table.format, table.k);
  return [=](ThreadPool& pool) {
    check_ids(ids, rows, table.rows, "row");
    parallel_for(pool, rows, 16, [&](int64_t begin, int64_t end) {
      std::vector<uint8_t> unpacked(table.slab_stride > 0 ? size_t(row_bytes) : 0);
      for (int64_t i = begin; i < end; i++) {
        const uint8_t* row = table.data + ids[i] * row_bytes;
        if (table.slab_stride > 0) {
          unpack_row(table, ids[i], unpacked.data());
          row = unpacked.data();
        }
        dequantize_row(table.format, row, table.k, out + i * table.k);
      }
    });
  };
}

Step gather_rows(const float* x, int64_t x_rows, int64_t width, const int32_t* ids, int64_t rows, float* out) {
  return [=](ThreadPool&) {
    check_ids(ids, rows, x_rows, "row");
    for (int64_t i = 0; i < rows; i++) std::memcpy(out + i * width, x + ids[i] * width, size_t(width) * sizeof(float));
  };
}

Step rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* out) {
  return [=](ThreadPool& pool) {
    const auto kernel = kernels().rms_norm;
    parallel_for(pool, rows, std::max<int64_t>(1, kSmall / width), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) kernel(x + i * width, weight, eps, width, out + i * width);
    });
  };
}

Step rope(float* x, int64_t rows, int64_t heads, int64_t dim, const int32_t* positions, const float* cosine,
          const float* sine, int64_t table_rows, bool adjacent) {
  return [=](ThreadPool& pool) {
    check_ids(positions, rows, table_rows, "position");
    const auto kernel = adjacent ? kernels().rope_adjacent : kernels().rope_halves;
    parallel_for(pool, rows, std::max<int64_t>(1, kSmall / (heads * dim)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < heads; h++)
          kernel(x + (i * heads + h) * dim, cosine + positions[i] * (dim / 2), sine + positions[i] * (dim / 2), dim);
    });
  };
}

Step silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  return [=](ThreadPool& pool) {
    const auto kernel = kernels().silu_mul;
    parallel_for(pool, n, kSmall, [&](int64_t a, int64_t b) { kernel(gate + a, up + a, b - a, out + a); });
  };
}

Step add(const float* a, const float* b, int64_t n, float* out) {
  return [=](ThreadPool& pool) {
    const auto kernel = kernels().add;
    parallel_for(pool, n, kSmall, [&](int64_t from, int64_t to) { kernel(a + from, b + from, to - from, out + from); });
  };
}

Step softmax(float* x, int64_t rows, int64_t width) {
  return [=](ThreadPool& pool) {
    const auto kernel = kernels().softmax;
    auto task = [&](int64_t row, int) { kernel(x + row * width, width); };
    pool.run(rows, task);
  };
}

Step argmax(const float* x, int64_t rows, int64_t width, int32_t* out) {
  return [=](ThreadPool&) {
    for (int64_t row = 0; row < rows; row++) {
      const float* values = x + row * width;
      out[row] = int32_t(std::max_element(values, values + width) - values);
    }
  };
}

}  // namespace qtensor
