// Compare every kernel family that this CPU supports with the generic one, kernel by kernel and bit for bit, in arrays
// that end at inaccessible pages. Covered are every block format, every float16 value, every cache format, and ordinary
// and extreme values.
//   family_bits SEED ROUNDS [FAULT]
// The digest covers the results of the generic kernels, so it is the same on every machine. FAULT (matmul, slabs,
// slabs_of_rows, rows or attention) flips a bit in the result of such a kernel in the tested families; the comparison
// must detect it.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "guarded.h"
#include "ops/packing.h"
#include "packed_weights.h"
#include "random_inputs.h"
#include "runtime/dispatch.h"

using namespace qtensor;

namespace {

const KernelTable* generic;
const KernelTable* real;  // the tested family
KernelTable tested;       // the same, possibly with a fault
uint64_t digest = 0xcbf29ce484222325, values = 0;

void turn_over(float* y) {
  uint32_t bits;
  std::memcpy(&bits, y, 4);
  bits ^= 1;
  std::memcpy(y, &bits, 4);
}
float* last_of(const MatmulTask& t) { return t.y + (t.m - 1) * t.y_stride + t.row_end - 1; }

template <auto SELECT>
Slabs wrong_slabs(Format f, int64_t m) {
  const Slabs slabs = (real->*SELECT)(f, m);
  if (f != Format::Q4_K || slabs.kernel == nullptr) return slabs;
  const SlabKernel wrong = [](const SlabTask& t) {
    (real->*SELECT)(Format::Q4_K, t.m).kernel(t);
    turn_over(t.y + (t.m - 1) * t.y_stride + t.rows - 1);
  };
  return {wrong, slabs.packing};
}

void plant(const std::string& fault) {
  tested = *real;
  if (fault == "matmul")
    tested.matmul = [](Format f) -> MatmulKernel {
      if (f != Format::Q6_K) return real->matmul(f);
      return [](const MatmulTask& t) {
        real->matmul(Format::Q6_K)(t);
        if (t.row_end > t.row_begin) turn_over(last_of(t));
      };
    };
  if (fault == "slabs" && real->slabs != nullptr) tested.slabs = wrong_slabs<&KernelTable::slabs>;
  if (fault == "slabs_of_rows" && real->slabs_of_rows != nullptr)
    tested.slabs_of_rows = wrong_slabs<&KernelTable::slabs_of_rows>;
  if (fault == "rows")
    tested.rms_norm = [](const float* x, const float* weight, float eps, int64_t n, float* out) {
      real->rms_norm(x, weight, eps, n, out);
      turn_over(out + n - 1);
    };
  if (fault == "attention")
    tested.attention_bytes = [](const ByteAttentionTask& t) {
      real->attention_bytes(t);
      turn_over(t.out[0]);
    };
}

// ---- comparison ----

void note(uint64_t bits) { digest = (digest ^ bits) * 0x100000001b3; }

[[noreturn]] void differs(const std::string& what, int64_t at) {
  std::printf("%s differs from generic: %s, place %lld\n", real->name, what.c_str(), static_cast<long long>(at));
  std::exit(1);
}
void same(const std::string& what, const float* a, const float* expected, int64_t n) {
  values += uint64_t(n);
  for (int64_t i = 0; i < n; i++) {
    const bool nan = std::isnan(expected[i]);
    if (nan ? !std::isnan(a[i]) : std::memcmp(a + i, expected + i, 4) != 0) differs(what, i);
    uint32_t bits = 0x7fc00000;  // processors create different NaN
    if (!nan) std::memcpy(&bits, expected + i, 4);
    note(bits);
  }
}
void same(const std::string& what, const int8_t* a, const int8_t* expected, int64_t n) {
  values += uint64_t(n);
  for (int64_t i = 0; i < n; i++) {
    if (a[i] != expected[i]) differs(what, i);
    note(uint8_t(a[i]));
  }
}
void same(const std::string& what, const half* a, const half* expected, int64_t n) {
  values += uint64_t(n);
  const auto is_nan = [](half h) { return (h & 0x7fff) > 0x7c00; };
  for (int64_t i = 0; i < n; i++) {
    if (is_nan(expected[i]) ? !is_nan(a[i]) : a[i] != expected[i]) differs(what, i);
    note(is_nan(expected[i]) ? 0x7e00 : expected[i]);
  }
}

// ---- inputs ----

// Ordinary values, values of any magnitude, signed zeros, any bits, ties of float16 rounding, and denormals.
void fill_nasty(Guarded<float>& x, Random& random) {
  const int kind = int(random.below(8));
  for (float& v : x) {
    const uint32_t bits = uint32_t(random.bits());
    const float real_number = random.real();
    if (kind == 1)
      v = std::ldexp(real_number, int(random.from(-148, 126)));
    else if (kind == 2)
      v = random.often(50) ? 0.0f : -0.0f;
    else if (kind == 3)
      std::memcpy(&v, &bits, 4);
    else if (kind == 4)
      v = float(random.from(-255, 255)) * 0.5f;
    else if (kind == 5)
      v = std::ldexp(real_number, -140);
    else
      v = real_number * 8;
  }
  if (random.often(8)) x[random.below(x.size())] = random.often(50) ? NAN : -INFINITY;
}

// Set the values that give the largest sums.
template <class Block>
void saturate(Guarded<Block>& blocks, int sign) {
  for (Block& b : blocks) {
    for (auto& q : b.q) q = int8_t(127 * sign);
    if constexpr (requires { b.sums16; }) {
      for (auto& sum : b.sums16) sum = int16_t(16 * 127 * sign);
      for (auto& sum : b.sums32) sum = int16_t(32 * 127 * sign);
    } else {
      for (auto& sum : b.sums) sum = 32 * 127 * sign;
    }
  }
}

// ---- cases ----

// Return whether any family has tiles for the format.
bool has_tiles(Format f) {
  for (const Format some : {Format::Q2_K, Format::Q3_K, Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::IQ4_XS})
    if (f == some) return true;
  return has_blocks_of_32(f);
}

bool has_packing(Format f) {
  return with_packing(f, [](auto) { return true; }, [] { return false; });
}

// Quantized batch rows, occasionally with the largest possible sums.
struct Activations {
  Guarded<BlockQ8K> q;
  Guarded<BlockQ8x32> q32;
  Activations(Guarded<float>& x, int64_t m, int64_t k, Random& random)
      : q(m * ((k + 255) / 256), random, 64), q32(m * ((k + 255) / 256), random, 64) {
    const int64_t blocks = (k + 255) / 256;
    for (int64_t j = 0; j < m; j++) {
      generic->quantize_q8k(x.data() + j * k, k, q.data() + j * blocks);
      generic->quantize_q8x32(x.data() + j * k, k, q32.data() + j * blocks);
    }
    if (!random.often(10)) return;
    const int sign = random.often(50) ? 1 : -1;
    saturate(q, sign);
    saturate(q32, sign);
  }
};

void same_numbers(const std::string& what, const float* y, const float* expected, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const bool nan = std::isnan(expected[i]);
    if (nan ? !std::isnan(y[i]) : std::memcmp(&y[i], &expected[i], 4) != 0) differs(what, i);
  }
}

// Weights in rows by the packed kernels, where the family has them for these.
void rows_packed_case(Format f, const MatmulTask& task, const float* expected, const std::string& what, Random later) {
  const Slabs slabs = tested.slabs_of_rows == nullptr ? Slabs() : tested.slabs_of_rows(f, task.m);
  if (slabs.kernel == nullptr || task.k % kSuperBlock != 0) return;
  const int64_t blocks = task.blocks_per_row, rows = task.row_end, count = task.m * rows;
  Guarded<uint8_t> batch(task.m * blocks * slabs.packing->block_bytes, later, 64),
      scratch(kPackedScratchBytes, later, 64);
  const PackTask packing{task.blocks, task.blocks_32, blocks, task.m, batch.data()};
  for (int64_t j = 0; j < task.m; j++) slabs.packing->row(packing, j);
  Guarded<float> sums(kSlabRows * task.m, later, 64), y(count, later);
  slabs.kernel({task.weight, 0, rows, blocks, batch.data(), task.m, y.data(), rows, sums.data(), task.row_bytes,
                scratch.data()});
  same_numbers(what + ", by packed kernels", y.data(), expected, count);
}

// Arbitrary sizes, or those of tiles, which a family without tiles multiplies row by row.
void matmul_case(Format f, bool tiles, Random& random) {
  const int64_t m = tiles ? random.from(5, 40) : random.often(60) ? random.from(1, 4) : random.from(5, 20);
  const int64_t rows = tiles ? 16 * random.from(1, 3) : random.from(1, 21);
  const int64_t most = std::max<int64_t>(1, (is_plain(f) ? 40'000 : 200'000) / (m * rows * 256));
  const int64_t k = tiles ? 256 * random.from(1, most) : std::min(row_length(f, random), 256 * most);
  const int64_t blocks = (k + 255) / 256, row_bytes = bytes_per_row(f, k);
  Guarded<uint8_t> weight(rows * row_bytes, random);
  Guarded<float> x(m * k, random), out(m * rows, random), expected(m * rows, random);
  fill(weight, f, random, random.often(10));
  fill_nasty(x, random);
  Activations a(x, m, k, random);
  MatmulTask task{weight.data(),   row_bytes, k, a.q.data(), a.q32.data(), blocks, x.data(), m,
                  expected.data(), rows,      0, rows};
  generic->matmul(f)(task);
  const std::string what = "format " + std::to_string(int(f)) + (tiles ? " tiles" : "") + ", M " + std::to_string(m) +
                           ", rows " + std::to_string(rows) + ", K " + std::to_string(k);
  Random later{random.bits()};  // families shall not differ in what they leave of the other
  rows_packed_case(f, task, expected.data(), what, later);
  const Tiles by_tiles = !tiles || tested.tiles == nullptr ? Tiles() : tested.tiles(f, m);
  if (by_tiles.kernel == nullptr) {
    task.y = out.data();
    task.row_end = later.below(rows);
    tested.matmul(f)(task);
    task.row_begin = task.row_end;
    task.row_end = rows;
    tested.matmul(f)(task);
    return same(what, out.data(), expected.data(), m * rows);
  }
  Guarded<uint8_t> packed(by_tiles.packing->bytes(blocks, m), later, 64);
  Guarded<uint8_t> scratch(tested.tile_scratch_bytes(m), later, 64);
  const PackTask packing{a.q.data(), a.q32.data(), blocks, m, packed.data()};
  for (int64_t tile = 0; tile < (m + 15) / 16; tile++)
    for (int64_t b = 0; b < blocks; b++) by_tiles.packing->block(packing, tile, b);
  by_tiles.kernel(
      {weight.data(), row_bytes, blocks, packed.data(), m, out.data(), rows, 0, rows, false, scratch.data()});
  same(what, out.data(), expected.data(), m * rows);
}

// A packed weight, alone or interleaved with another, with the generic kernels for rows and with those for slabs.
void slab_case(Format f, Random& random) {
  const int64_t m = random.often(60) ? random.from(1, 5) : random.from(6, 40), rows = random.from(1, 150);
  const int64_t blocks = random.from(1, std::max<int64_t>(1, 1000 / (m * rows) + 1)), k = blocks * kSuperBlock;
  Guarded<uint8_t> weight(rows * bytes_per_row(f, k), random);
  Guarded<float> x(m * k, random), out(m * rows, random), expected(m * rows, random);
  fill(weight, f, random, random.often(10));
  fill_nasty(x, random);
  Activations a(x, m, k, random);
  MatmulTask task{
      weight.data(), bytes_per_row(f, k), k, a.q.data(), a.q32.data(), blocks, x.data(), m, expected.data(), rows, 0,
      rows};
  generic->matmul(f)(task);
  const std::string what = "format " + std::to_string(int(f)) + " packed, M " + std::to_string(m) + ", rows " +
                           std::to_string(rows) + ", K " + std::to_string(k);
  rows_packed_case(f, task, expected.data(), what, random);
  const int64_t stride = slab_bytes(f, k, kSlabRows) * random.from(1, 2);
  const Weight packed_weight{f, nullptr, rows, k, stride};
  Guarded<uint8_t> slabs(packed_bytes(packed_weight), random, 64);
  pack_weight({f, weight.data(), rows, k}, slabs.data(), stride);
  task.weight = slabs.data();
  task.slab_stride = stride;
  task.y = out.data();
  generic->matmul(f)(task);
  same(what, out.data(), expected.data(), m * rows);
  Random later{random.bits()};
  const Slabs by_slabs = tested.slabs == nullptr ? Slabs() : tested.slabs(f, m);
  if (by_slabs.kernel == nullptr) return;
  Guarded<uint8_t> batch(m * blocks * by_slabs.packing->block_bytes, later, 64);
  const PackTask packing{a.q.data(), a.q32.data(), blocks, m, batch.data()};
  for (int64_t j = 0; j < m; j++) by_slabs.packing->row(packing, j);
  Guarded<float> sums(kSlabRows * m, later, 64), y(m * rows, later);
  by_slabs.kernel({slabs.data(), stride, rows, blocks, batch.data(), m, y.data(), rows, sums.data()});
  same_numbers(what, y.data(), expected.data(), m * rows);
}

void quantize_case(Random& random) {
  const int64_t k = random.from(1, 1100), blocks = (k + 255) / 256;
  Guarded<float> x(k, random);
  fill_nasty(x, random);
  Guarded<BlockQ8K> a(blocks, random, 64), b(blocks, random, 64);
  Guarded<BlockQ8x32> c(blocks, random, 64), d(blocks, random, 64);
  tested.quantize_q8k(x.data(), k, a.data());
  generic->quantize_q8k(x.data(), k, b.data());
  tested.quantize_q8x32(x.data(), k, c.data());
  generic->quantize_q8x32(x.data(), k, d.data());
  for (int64_t i = 0; i < blocks; i++) {
    same("quantize_q8k", a[i].q, b[i].q, 256);
    if (std::memcmp(a[i].sums16, b[i].sums16, sizeof a[i].sums16 + sizeof a[i].sums32) != 0) differs("its sums", i);
    same("quantize_q8k", &a[i].d, &b[i].d, 1);
    same("quantize_q8x32", c[i].q, d[i].q, 256);
    if (std::memcmp(c[i].sums, d[i].sums, sizeof c[i].sums) != 0) differs("its sums", i);
    same("quantize_q8x32", c[i].d, d[i].d, 8);
  }
}

void row_cases(Random& random) {
  const int64_t n = random.from(1, 400), pairs = n / 2;
  Guarded<float> a(n, random), b(n, random), out(n, random), expected(n, random);
  fill_nasty(a, random);
  fill_nasty(b, random);
  const auto compare = [&](const char* what, auto run) {
    for (Guarded<float>* y : {&out, &expected}) std::memcpy(y->data(), a.data(), size_t(n) * sizeof(float));
    run(tested, out.data());
    run(*generic, expected.data());
    same(what, out.data(), expected.data(), n);
  };
  compare("rms_norm", [&](const KernelTable& t, float* y) { t.rms_norm(a.data(), b.data(), 1e-6f, n, y); });
  compare("silu_mul", [&](const KernelTable& t, float* y) { t.silu_mul(a.data(), b.data(), n, y); });
  compare("add", [&](const KernelTable& t, float* y) { t.add(a.data(), b.data(), n, y); });
  compare("softmax", [&](const KernelTable& t, float* y) { t.softmax(y, n); });
  compare("rope_adjacent",
          [&](const KernelTable& t, float* y) { t.rope_adjacent(y, b.data(), b.data() + pairs, 2 * (pairs / 2)); });
  compare("rope_halves",
          [&](const KernelTable& t, float* y) { t.rope_halves(y, b.data(), b.data() + pairs, 2 * (pairs / 2)); });
  Guarded<half> halves(n, random), as_expected(n, random);
  tested.to_half(a.data(), n, halves.data());
  generic->to_half(a.data(), n, as_expected.data());
  same("to_half", halves.data(), as_expected.data(), n);
  const int64_t dim = 16 * random.from(1, 16);
  Guarded<float> head(dim, random);
  fill_nasty(head, random);
  for (const int bits : {8, 4, 3}) {
    Guarded<uint8_t> levels(dim, random), levels_expected(dim, random);
    half scale = 0, scale_expected = 0;
    tested.round_head(head.data(), dim, bits, levels.data(), &scale);
    generic->round_head(head.data(), dim, bits, levels_expected.data(), &scale_expected);
    same("round_head", reinterpret_cast<int8_t*>(levels.data()), reinterpret_cast<int8_t*>(levels_expected.data()),
         dim);
    same("round_head", &scale, &scale_expected, 1);
  }
}

// Interpret random bytes as a cache with `tiles` tiles. float16 fields have no extreme values unless `wild`, and scales
// are never negative.
void fill_cache(Guarded<uint8_t>& data, CacheFormat format, int64_t dim, bool wild, Random& random) {
  const bool plain = format == CacheFormat::f16;
  const int64_t head = head_bytes(format, dim), halves_at = plain ? 0 : scales_at(format, dim);
  const uint8_t mask = plain ? (wild ? 0xff : 0xbf) : wild ? 0x7f : 0x3f;
  for (int64_t at = 0; at < data.size(); at++) {
    data[at] = uint8_t(random.bits());
    if (at % head >= halves_at && at % 2 == 1) data[at] &= mask;
  }
}

void attention_case(CacheFormat format, Random& random) {
  const int64_t dim = 16 * random.from(1, 9), queries = random.from(1, 6), tiles = random.from(1, 3);
  const int64_t bytes = head_bytes(format, dim), window_bytes = head_bytes(CacheFormat::k8v8, dim);
  const bool wild = random.often(10);
  Guarded<uint8_t> data(tiles * bytes, random, 64), window(tiles * window_bytes, random, 64);
  fill_cache(data, format, dim, wild, random);
  fill_cache(window, CacheFormat::k8v8, dim, wild, random);
  Guarded<float> q(queries * dim, random), out(queries * dim, random), expected(queries * dim, random);
  fill_nasty(q, random);
  std::vector<const float*> from;
  std::vector<int64_t> limits;
  for (int64_t i = 0; i < queries; i++) {
    from.push_back(q.data() + i * dim);
    limits.push_back(i == 0 ? tiles * kTilePositions : random.from(1, tiles * kTilePositions));
  }
  std::vector<const uint8_t*> places, windows;
  std::vector<const half*> keys, of_values;
  for (int64_t i = 0; i < tiles; i++) {
    places.push_back(data.data() + i * bytes);
    windows.push_back(window.data() + i * window_bytes);
    keys.push_back(reinterpret_cast<const half*>(places.back()));
    of_values.push_back(keys.back() + kTilePositions * dim);
  }
  Guarded<uint8_t> scratch(byte_attention_scratch(queries, dim) / 64 * 64 + 64, random, 64);
  Guarded<float> floats(attention_scratch_floats(queries, dim), random);
  const auto attend = [&](const KernelTable& t, Guarded<float>& y) {
    std::vector<float*> to;
    for (int64_t i = 0; i < queries; i++) to.push_back(y.data() + i * dim);
    if (format == CacheFormat::f16)
      t.attention(
          {from.data(), to.data(), limits.data(), queries, dim, keys.data(), of_values.data(), 0.1f, floats.data()});
    else
      t.attention_bytes({from.data(), to.data(), limits.data(), queries, dim, format, places.data(), windows.data(),
                         0.1f, false, scratch.data()});
  };
  attend(tested, out);
  attend(*generic, expected);
  same("attention, cache " + std::to_string(int(format)), out.data(), expected.data(), queries * dim);
}

// Convert every float16 value to float, and every value, its neighbors and the midpoint to the next one back.
void every_half() {
  constexpr int64_t all = 65536;
  std::vector<half> halves(all), rounded(all), as_expected(all);
  std::vector<float> y(all), floats(all), near(all);
  for (int64_t i = 0; i < all; i++) halves[size_t(i)] = half(i);
  const float one = 1.0f;
  MatmulTask task{};
  task.weight = reinterpret_cast<const uint8_t*>(halves.data());
  task.row_bytes = 2;
  task.k = task.m = 1;
  task.floats = &one;
  task.y_stride = task.row_end = all;
  task.y = y.data();
  tested.matmul(Format::F16)(task);
  task.y = floats.data();
  generic->matmul(Format::F16)(task);
  same("a half", y.data(), floats.data(), all);
  for (const uint32_t step : {~0u, 0u, 1u, 0xfffu, 0x1000u, 0x1001u}) {
    for (size_t i = 0; i < size_t(all); i++) {
      uint32_t bits;
      std::memcpy(&bits, &floats[i], 4);
      bits += step;
      std::memcpy(&near[i], &bits, 4);
    }
    tested.to_half(near.data(), all, rounded.data());
    generic->to_half(near.data(), all, as_expected.data());
    same("to_half near a half", rounded.data(), as_expected.data(), all);
  }
}

void all_cases(uint64_t seed, uint64_t rounds) {
  every_half();
  for (uint64_t round = 0; round < rounds; round++) {
    Random random{seed + round};
    for (const Format f : kFormats) {
      matmul_case(f, false, random);
      if (has_tiles(f)) matmul_case(f, true, random);
      if (has_packing(f)) slab_case(f, random);
    }
    for (int format = 0; format < kCacheFormats; format++) attention_case(CacheFormat(format), random);
    quantize_case(random);
    row_cases(random);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: family_bits SEED ROUNDS [matmul|tiles|slabs|rows|attention]\n");
    return 2;
  }
  const uint64_t seed = std::strtoull(arguments[1], nullptr, 10), rounds = std::strtoull(arguments[2], nullptr, 10);
  use_kernels("generic");
  generic = &kernels();
  for (const auto& family : available_kernels()) {
    use_kernels(family);
    real = &kernels();
    plant(count > 3 ? arguments[3] : "");
    digest = 0xcbf29ce484222325;
    values = 0;
    all_cases(seed, rounds);
    std::printf("%s: %llu values, digest %016llx\n", real->name, static_cast<unsigned long long>(values),
                static_cast<unsigned long long>(digest));
  }
  return 0;
}
