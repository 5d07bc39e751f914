// Run every kernel of every family and every operation with random sizes in exactly sized arrays, for sanitizers, and
// compare the bits of the families. `driver kernels SEED SECONDS` or `driver threads SEED SECONDS`.
#include <atomic>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "guarded.h"
#include "ops/attention.h"
#include "ops/dequantize.h"
#include "ops/matmul.h"
#include "ops/packing.h"
#include "ops/rope_table.h"
#include "ops/rows.h"
#include "packed_weights.h"
#include "random_inputs.h"
#include "runtime/cpu_features.h"
#include "runtime/dispatch.h"
#if defined(QTENSOR_EMULATED_TILES)
#include "bfloat16_matmul.h"
#include "tile_counts.h"
#endif

using namespace qtensor;

namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "driver: %s (kernels %s)\n", what.c_str(), kernels().name);
  std::exit(1);
}

bool same_bits(Guarded<float>& a, Guarded<float>& b) {
  for (int64_t i = 0; i < a.size(); i++)
    if (!(std::isnan(a[i]) && std::isnan(b[i])) && std::memcmp(&a[i], &b[i], 4) != 0) return false;
  return true;
}

// Run the step with generic kernels into `expected`, then with every family and several threads into `out`.
template <class Make>
void compare(const char* what, Guarded<float>& out, Guarded<float>& expected, Make make, Random& random) {
  use_kernels("generic");
  make(expected.data())(thread_pool());
  for (const auto& family : available_kernels()) {
    use_kernels(family);
    set_thread_count(int(random.from(1, 3)));
    for (const char* variant : {"vectors", "tiles"}) {
      if (kernels().attention_tile_rows > 0)
        use_attention(variant);
      else if (std::string(variant) == "tiles")
        continue;
      make(out.data())(thread_pool());
      if (!same_bits(out, expected)) fail(std::string(what) + " differs from generic");
    }
    use_attention("auto");
#if defined(QTENSOR_EMULATED_TILES)
    if (tile_counts().in_use != 0) fail(std::string(what) + " left tiles configured");
#endif
  }
}

void matmul_case(Random& random) {
  const Format f = any_format(random);
  const int64_t work = is_plain(f) ? 200'000 : 2'000'000;  // generic fused multiply-adds are slow
  int64_t m, rows, k;
  do {
    m = random.often(20) ? random.from(30, 140) : random.from(1, 24);
    rows = random.often(20) ? random.from(100, 300) : random.from(1, 50);
    k = row_length(f, random);
  } while (rows * m * k > work);
  Guarded<float> x(m * k, random), out(m * rows, random), expected(m * rows, random);
  Guarded<uint8_t> weight(rows * bytes_per_row(f, k), random);
  fill(x, random);
  fill(weight, f, random);
  compare(
      "matmul", out, expected, [&](float* y) { return matmul({x.data(), m, k, {{{f, weight.data(), rows, k}, y}}}); },
      random);
  Guarded<float> norm(k, random);
  Guarded<uint8_t> second(weight.size(), random);
  fill(norm, random);
  fill(second, f, random);
  compare(
      "matmul with a norm, added", out, expected,
      [&](float* y) -> Step {
        const Step step =
            matmul({x.data(), m, k, {{{f, weight.data(), rows, k}, y}}, norm.data(), 1e-6f, Combine::add});
        return [&, y, step](ThreadPool& pool) {
          for (int64_t i = 0; i < m * rows; i++) y[i] = float(i % 7);
          step(pool);
        };
      },
      random);
  compare(
      "matmul, gated", out, expected,
      [&](float* y) {
        return matmul({x.data(),
                       m,
                       k,
                       {{{f, weight.data(), rows, k}, y}, {{f, second.data(), rows, k}, y}},
                       norm.data(),
                       1e-6f,
                       Combine::silu_mul});
      },
      random);
  if (f == Format::Q4_K || f == Format::Q5_K || f == Format::Q6_K) {  // packed, with gate and up interleaved
    const int64_t slab = slab_bytes(f, k, kSlabRows), bytes = packed_bytes({f, nullptr, rows, k, 2 * slab});
    Guarded<uint8_t> both(bytes + slab, random, 64);
    pack_weight({f, weight.data(), rows, k}, both.data(), 2 * slab);
    pack_weight({f, second.data(), rows, k}, both.data() + slab, 2 * slab);
    const Weight gate{f, both.data(), rows, k, 2 * slab}, up{f, both.data() + slab, rows, k, 2 * slab};
    Guarded<float> packed(m * rows, random);
    for (const bool gated : {true, false})
      for (const auto& family : available_kernels()) {
        use_kernels(family);
        const Combine combine = gated ? Combine::silu_mul : Combine::none;
        Matmul op{x.data(), m, k, {{gate, packed.data()}}, norm.data(), 1e-6f, combine};
        if (gated) op.products.push_back({up, packed.data()});
        matmul(op)(thread_pool());
        if (!gated)
          matmul({x.data(), m, k, {{{f, weight.data(), rows, k}, out.data()}}, norm.data(), 1e-6f})(thread_pool());
        if (!same_bits(packed, out)) fail("a packed matmul differs from rows");
      }
  }
  compare(  // the kernel alone, with exactly sized activations
      "matmul kernel", out, expected,
      [&](float* y) -> Step {
        return [&, y](ThreadPool&) {
          const KernelTable& t = kernels();
          const int64_t blocks = (k + 255) / 256, begin = random.below(rows);
          Guarded<BlockQ8K> q(m * blocks, random, 64);
          Guarded<BlockQ8x32> q32(m * blocks, random, 64);
          for (int64_t c = 0; c < m; c++) {
            t.quantize_q8k(x.data() + c * k, k, q.data() + c * blocks);
            t.quantize_q8x32(x.data() + c * k, k, q32.data() + c * blocks);
          }
          MatmulTask task{weight.data(), bytes_per_row(f, k), k, q.data(), q32.data(), blocks, x.data(), m, y, rows, 0,
                          begin};
          const MatmulKernel kernel = t.matmul(f);
          kernel(task);
          task.row_begin = begin;
          task.row_end = rows;
          kernel(task);
        };
      },
      random);
}

void row_cases(Random& random) {
  const int64_t rows = random.from(1, 3), width = random.often(5) ? random.from(16000, 20000) : random.from(1, 100);
  Guarded<float> a(rows * width, random), b(rows * width, random), weight(width, random);
  Guarded<float> out(rows * width, random), expected(rows * width, random);
  fill(a, random);
  fill(b, random);
  fill(weight, random);
  const auto keep = [&](float* y, Step step) -> Step {  // for in-place operations
    return [&, y, step](ThreadPool& pool) {
      std::memcpy(y, a.data(), size_t(rows * width) * 4);
      step(pool);
    };
  };
  compare("add", out, expected, [&](float* y) { return add(a.data(), b.data(), rows * width, y); }, random);
  compare("silu_mul", out, expected, [&](float* y) { return silu_mul(a.data(), b.data(), rows * width, y); }, random);
  compare(
      "rms_norm", out, expected, [&](float* y) { return rms_norm(a.data(), weight.data(), 1e-6f, rows, width, y); },
      random);
  compare("softmax", out, expected, [&](float* y) { return keep(y, softmax(y, rows, width)); }, random);
  Guarded<int32_t> best(rows, random);
  argmax(a.data(), rows, width, best.data())(thread_pool());
  for (int32_t i : best)
    if (i < 0 || i >= width) fail("argmax is outside its row");
}

void rope_case(Random& random) {
  const int64_t rows = random.from(1, 9), heads = random.from(1, 5), half = random.from(1, 70);
  const int64_t positions = random.from(1, 40);
  Guarded<double> frequency(half, random);
  for (double& f : frequency) f = random.real() * 3;
  Guarded<float> cosine(positions * half, random), sine(positions * half, random);
  Guarded<int32_t> every(positions, random);
  for (int64_t p = 0; p < positions; p++) every[p] = int32_t(p);
  rope_table(frequency.data(), half, every.data(), positions, 1.0, cosine.data(), sine.data())(thread_pool());
  Guarded<int32_t> at(rows, random);
  for (int32_t& p : at) p = int32_t(random.below(positions));
  Guarded<float> x(rows * heads * 2 * half, random), out(x.size(), random), expected(x.size(), random);
  fill(x, random);
  const bool adjacent = random.often(50);
  compare(
      "rope", out, expected,
      [&](float* y) -> Step {
        const Step step = rope(y, rows, heads, 2 * half, at.data(), cosine.data(), sine.data(), positions, adjacent);
        return [&, y, step](ThreadPool& pool) {
          std::memcpy(y, x.data(), size_t(x.size()) * 4);
          step(pool);
        };
      },
      random);
}

void embedding_case(Random& random) {
  const Format f = any_format(random);
  const int64_t k = row_length(f, random), rows = random.from(1, 20), count = random.from(1, 40);
  Guarded<uint8_t> weight(rows * bytes_per_row(f, k), random);
  fill(weight, f, random);
  Guarded<int32_t> ids(count, random);
  for (int32_t& id : ids) id = int32_t(random.below(rows));
  Guarded<float> out(count * k, random), expected(count * k, random), gathered(count * k, random);
  compare(
      "embed_rows", out, expected,
      [&](float* y) { return embed_rows({f, weight.data(), rows, k}, ids.data(), count, y); }, random);
  for (int32_t& id : ids) id = int32_t(random.below(count));
  gather_rows(out.data(), count, k, ids.data(), count, gathered.data())(thread_pool());
}

template <class Call>
void must_refuse(const char* what, Call call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return;
  }
  fail(std::string(what) + " was not refused");
}

// A pool with random bytes, in which float16 fields have no extreme values.
struct RandomPool {
  Guarded<uint8_t> data;
  KeyValuePool pool;
  RandomPool(CacheFormat format, int64_t blocks, int64_t kv_heads, int64_t dim, Random& random)
      : data(blocks * kv_heads * head_bytes(format, dim), random, 64),
        pool{data.data(), blocks, blocks % 2 == 0 ? 2 : 1, kv_heads, dim, format} {
    const int64_t head = head_bytes(format, dim), halves = format == CacheFormat::f16 ? 0 : scales_at(format, dim);
    for (int64_t at = 0; at < data.size(); at++) {
      data[at] = uint8_t(random.bits());
      if (at % head >= halves && at % 2 == 1) data[at] &= format == CacheFormat::f16 ? 0xbf : 0x3f;
    }
  }
};

void attention_case(Random& random) {
  const bool is_prompt = random.often(40);  // consecutive rows of one sequence
  const int64_t kv_heads = random.from(1, is_prompt ? 2 : 3), shared = random.from(1, 5), dim = 16 * random.from(1, 8);
  const int64_t sequences = is_prompt ? 1 : random.from(1, 3), tiles = random.from(1, 3), blocks = sequences * tiles;
  const int64_t rows = random.from(1, is_prompt ? 40 : 6), floats = rows * kv_heads * shared * dim;
  const auto format = static_cast<CacheFormat>(random.below(kCacheFormats));
  RandomPool main(format, blocks, kv_heads, dim, random), other(CacheFormat::k8v8, blocks, kv_heads, dim, random);
  Guarded<int32_t> positions(rows, random), owners(rows, random), tables(sequences * tiles, random);
  Guarded<int32_t> window_tables(sequences * tiles, random);
  for (int64_t i = 0; i < rows; i++) {
    owners[i] = int32_t(random.below(sequences));
    positions[i] = int32_t(random.below(tiles * 128));
  }
  if (is_prompt)
    for (int64_t i = 0, first = random.below(tiles * 128 - rows); i < rows; i++) positions[i] = int32_t(first + i);
  for (int32_t& block : tables) block = int32_t(random.below(blocks));
  for (int32_t& block : window_tables) block = int32_t(random.below(blocks));
  const RowPlaces places{positions.data(), owners.data(), tables.data(), rows, sequences, tiles};
  WindowTiles window{};
  if (format > CacheFormat::k8v8) window = {window_tables.data(), other.pool};
  Guarded<float> k(rows * kv_heads * dim, random), v(k.size(), random);
  fill(k, random);
  fill(v, random);
  store_key_values(k.data(), v.data(), places, main.pool, window)(thread_pool());
  Guarded<float> q(floats, random), out(floats, random), expected(floats, random);
  fill(q, random);
  compare(
      "attention", out, expected,
      [&](float* y) { return attention(q.data(), kv_heads * shared, places, main.pool, window, 0.1f, y); }, random);
  Guarded<uint8_t> bytes(dim, random), levels(dim, random);
  const int bits = value_bits(format) < 16 ? value_bits(format) : 8;
  half scale = 0, expected_scale = 0;
  use_kernels("generic");
  kernels().round_head(k.data(), dim, bits, levels.data(), &expected_scale);
  for (const auto& family : available_kernels()) {
    use_kernels(family);
    kernels().round_head(k.data(), dim, bits, bytes.data(), &scale);
    if (std::memcmp(bytes.data(), levels.data(), size_t(dim)) != 0 || scale != expected_scale)
      fail("round_head differs from generic");
  }

  int32_t* const wrong[] = {&positions[random.below(rows)], &owners[random.below(rows)]};
  const int32_t values_wrong[] = {-1, int32_t(tiles * 128), INT32_MIN, INT32_MAX};
  int32_t& victim = *wrong[random.below(2)];
  const int32_t kept = victim;
  victim = values_wrong[random.below(4)];
  const Step step = attention(q.data(), kv_heads * shared, places, main.pool, window, 0.1f, out.data());
  const Step storing = store_key_values(k.data(), v.data(), places, main.pool, window);
  must_refuse("a row that is nowhere", [&] { step(thread_pool()); });
  must_refuse("storing a row that is nowhere", [&] { storing(thread_pool()); });
  victim = kept;
}

#if defined(QTENSOR_EMULATED_TILES)
// The bfloat16 method for comparison: close to the product in double precision, within the error of two roundings.
void bfloat16_case(Random& random) {
  const int64_t k = 256 * random.from(1, 5), m = 32 * random.from(1, 3), rows = 32 * random.from(1, 6);
  Guarded<uint8_t> weight(rows * bytes_per_row(Format::Q4_K, k), random, 16);
  Guarded<float> x(m * k, random), y(m * rows, random, 64), row(k, random);
  Guarded<uint16_t> packed(m * k, random, 64);
  Guarded<uint8_t> scratch(bfloat16_scratch(m), random, 64);
  fill(weight, Format::Q4_K, random);
  for (float& v : x) v = random.real();
  kBfloat16MatmulEmulated.pack(x.data(), k, m, packed.data());
  kBfloat16MatmulEmulated.product(weight.data(), rows, k, packed.data(), m, y.data(), rows, scratch.data());
  for (int64_t n = 0; n < rows; n += random.from(1, 7)) {
    dequantize_row(Format::Q4_K, weight.data() + n * bytes_per_row(Format::Q4_K, k), k, row.data());
    for (int64_t c = 0; c < m; c++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < k; i++) {
        sum += double(row[i]) * double(x[c * k + i]);
        size += std::abs(double(row[i]) * double(x[c * k + i]));
      }
      if (!(std::abs(sum - double(y[c * rows + n])) <= size / 240)) fail("bfloat16 N tiles are off");
    }
  }
  if (tile_counts().in_use != 0) fail("bfloat16 N tiles left tiles configured");
}
#endif

void run_kernels(Random& random) {
  for (int i = 0; i < 4; i++) matmul_case(random);
  row_cases(random);
  rope_case(random);
  embedding_case(random);
  attention_case(random);
#if defined(QTENSOR_EMULATED_TILES)
  if (detect_cpu_features().avx512_vnni) bfloat16_case(random);
#endif
}

using Clock = std::chrono::steady_clock;

// Concurrent callers as in the bindings: each takes the engine's lock for its step, while others replace the pool,
// change the kernels and query both.
void run_threads(uint64_t seed, Clock::time_point until) {
  std::atomic<int64_t> steps{0};
  auto caller = [&](uint64_t mine) {
    Random random{mine};
    const int64_t n = 40000, k = 256, rows = 200;
    Guarded<float> a(n, random), out(n, random), x(3 * k, random), y(3 * rows, random);
    Guarded<uint8_t> weight(rows * bytes_per_row(Format::Q4_K, k), random);
    for (float& value : a) value = random.real();
    for (float& value : x) value = random.real();
    fill(weight, Format::Q4_K, random);
    Program program;
    program.add(add(a.data(), a.data(), n, out.data()));
    program.add(matmul({x.data(), 3, k, {{{Format::Q4_K, weight.data(), rows, k}, y.data()}}}));
    while (Clock::now() < until) {
      program.run();
      for (int64_t i = 0; i < n; i += 997)
        if (out[i] != a[i] + a[i]) fail("a sum is wrong");
      steps++;
      if (random.often(10)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
    }
  };
  std::vector<std::thread> callers;
  for (uint64_t i = 0; i < 3; i++) callers.emplace_back(caller, seed + i);
  callers.emplace_back([&] {
    Random random{seed + 99};
    const auto families = available_kernels();
    while (Clock::now() < until) {
      set_thread_count(int(random.from(1, 4)));
      use_kernels(families[size_t(random.below(int64_t(families.size())))]);
      if (thread_count() < 1 || kernels().name == nullptr) fail("no threads or no kernels");
      std::this_thread::sleep_for(std::chrono::microseconds(random.below(2000)));
    }
  });
  for (auto& thread : callers) thread.join();
  set_thread_count(1);
  std::printf("threads: %lld steps\n", static_cast<long long>(steps.load()));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: driver kernels|threads SEED SECONDS\n");
    return 2;
  }
  const uint64_t seed = std::strtoull(arguments[2], nullptr, 10);
  const auto until = Clock::now() + std::chrono::milliseconds(int64_t(1000 * std::atof(arguments[3])));
  if (std::string(arguments[1]) == "threads") {
    run_threads(seed, until);
    return 0;
  }
  uint64_t rounds = 0;
  for (; rounds < 12 || Clock::now() < until; rounds++) {
    Random random{seed + rounds};
    if (std::getenv("DRIVER_VERBOSE") != nullptr)
      std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed + rounds));
    run_kernels(random);
  }
  std::printf("kernels:");
  for (const auto& family : available_kernels()) std::printf(" %s", family.c_str());
  std::printf(", %llu rounds\n", static_cast<unsigned long long>(rounds));
  return 0;
}
