#include "runtime/roofline.h"

#include <algorithm>
#include <atomic>

#include "kernel_table.h"
#include "runtime/dispatch.h"

namespace qtensor {
namespace {

constexpr int64_t kItemBytes = int64_t(1) << 20;
constexpr int64_t kLine = 64;
constexpr int64_t kTasksPerThread = 8;  // so that the others can take items of a delayed thread

}  // namespace

uint64_t read_memory(ThreadPool& pool, const uint8_t* data, int64_t bytes, int places) {
  const KernelTable& table = kernels();
  std::atomic<uint64_t> all{0};
  auto task = [&](int64_t item, int) {
    const int64_t start = item * kItemBytes;
    const int64_t lines = std::min(kItemBytes, bytes - start) / kLine;
    all.fetch_xor(table.read_lines(data + start, lines, places), std::memory_order_relaxed);
  };
  pool.run((bytes + kItemBytes - 1) / kItemBytes, task);
  return all.load();
}

int64_t multiply_bytes(ThreadPool& pool, int64_t products) {
  const KernelTable& table = kernels();
  alignas(64) int8_t random[4096];
  uint32_t state = 1;
  for (int8_t& value : random) value = int8_t((state = state * 1664525 + 1013904223) >> 24);
  const int64_t tasks = kTasksPerThread * pool.size();
  const int64_t rounds = (products + tasks * table.peak_products - 1) / (tasks * table.peak_products);
  std::atomic<uint32_t> sum{0};  // used, so that the compiler cannot omit the products
  auto task = [&](int64_t, int) {
    sum.fetch_add(uint32_t(table.byte_peak(random, rounds)), std::memory_order_relaxed);
  };
  pool.run(tasks, task);
  return tasks * rounds * table.peak_products;
}

}  // namespace qtensor
