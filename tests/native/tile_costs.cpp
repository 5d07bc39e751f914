// Measure the cost of tiles and of vector instructions in the AMX kernels and in the method of bfloat16_matmul.h, on
// one thread. The emulation counts tile instructions; all other costs are measured without tile instructions. For
// comparison, AVX-512 is measured, and real tiles if the processor has them. Prints a table; benchmarks/tile_costs.py
// builds and runs this program.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "bfloat16_matmul.h"
#include "guarded.h"
#include "kernel_table.h"
#include "runtime/cpu_features.h"
#include "tile_counts.h"

namespace qtensor {
extern const KernelTable kAmxEmulatedKernels, kAmxSkippedKernels;
}
using namespace qtensor;

namespace {

// Cycles according to performance.md 4.1: 16 for a product, 8 for a load from L1, and one per row for a store.
constexpr double kProductCycles = 16, kLoadCycles = 8, kStoreCycles = 16;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Measure the clock rate with wide vectors, which may be lower: dependent additions take a cycle each.
double clock_ghz() {
  double best = 0;
  for (int i = 0; i < 2000; i++) {  // short, so that some runs are not interrupted
    constexpr int64_t kRounds = 20'000;
    const auto start = Clock::now();
    for (int64_t j = 0; j < kRounds; j++)
      __asm__ volatile(
          "vpaddd %%zmm0, %%zmm0, %%zmm0\n\tvpaddd %%zmm0, %%zmm0, %%zmm0\n\t"
          "vpaddd %%zmm0, %%zmm0, %%zmm0\n\tvpaddd %%zmm0, %%zmm0, %%zmm0" ::
              : "xmm0");
    best = std::max(best, 4.0 * kRounds / seconds_since(start) / 1e9);
  }
  return best;
}

double least_seconds(const std::function<void()>& call) {
  call();
  double best = 1e9;
  const auto begin = Clock::now();
  for (int i = 0; i < 7 || seconds_since(begin) < 0.2; i++) {
    const auto start = Clock::now();
    call();
    best = std::min(best, seconds_since(start));
  }
  return best;
}

// A kernel family, and the bfloat16 method with the same kind of tiles (null if there is none).
struct Variant {
  const KernelTable& table;
  const Bfloat16Matmul* bfloat16;
};
struct Case {
  std::string name;
  double units;       // number of units that figures refer to
  double operations;  // per unit; a multiply-add counts as two
  std::function<void(const Variant&)> prepare, run;
};

struct Memory {
  uint8_t* at;
  explicit Memory(int64_t bytes)
      : at(static_cast<uint8_t*>(std::aligned_alloc(4096, size_t(bytes + 8191) / 4096 * 4096))) {
    if (at == nullptr) std::abort();
  }
};

// Parts of 128 rows of 1,024 x 2,048 weights, which fit in L2; per 16 rows and block of 256.
Case product(const char* name, Format format, int64_t m, bool other_scheme = false) {
  constexpr int64_t kRows = 1024, kBlocks = 8;
  const int64_t bytes = format == Format::Q4_K ? sizeof(BlockQ4_K) : sizeof(BlockQ6_K), row_bytes = kBlocks * bytes;
  Random random{7};
  uint8_t* const weight = Memory(kRows * row_bytes + (1 << 20)).at;
  for (int64_t i = 0; i < kRows * row_bytes; i += 8) {
    const uint64_t word = random.bits();
    std::memcpy(weight + i, &word, 8);
  }
  for (int64_t i = 0; i < kRows * kBlocks; i++) {
    const half ordinary[2] = {0x2c00, 0x2c00};
    std::memcpy(weight + i * bytes + (format == Format::Q4_K ? 0 : 208), ordinary, format == Format::Q4_K ? 4 : 2);
  }
  auto* const x = reinterpret_cast<BlockQ8K*>(Memory(m * kBlocks * int64_t(sizeof(BlockQ8K))).at);
  std::vector<float> floats(size_t(m * kBlocks * 256));
  for (float& v : floats) v = random.real();
  for (int64_t c = 0; c < m; c++)
    kGenericKernels.quantize_q8k(floats.data() + c * kBlocks * 256, kBlocks * 256, x + c * kBlocks);
  float* const y = reinterpret_cast<float*>(Memory(m * kRows * 4).at);
  uint8_t *const packed = Memory(1 << 24).at, *const scratch = Memory(1 << 24).at;
  std::memset(scratch, 0, 1 << 24);
  const PackTask packing{x, nullptr, kBlocks, m, packed};
  auto* const bfloats = reinterpret_cast<uint16_t*>(Memory(m * kBlocks * 512).at);
  const auto by_bytes = [=](const KernelTable& t) {
    for (int64_t row = 0; row < kRows; row += 128) {
      TileTask task{};
      task.weight = weight + row * row_bytes;
      task.row_bytes = row_bytes;
      task.blocks = kBlocks;
      task.packed = packed;
      task.m = m;
      task.y = y + row;
      task.y_stride = kRows;
      task.row_end = std::min<int64_t>(128, kRows - row);
      task.past_cache = m >= 128;
      task.scratch = scratch;
      t.tiles(format, m).kernel(task);
    }
  };
  const auto by_bfloats = [=](const Bfloat16Matmul& bfloat16) {
    bfloat16.product(weight, kRows, kBlocks * 256, bfloats, m, y, kRows, scratch);
  };
  return {std::string(name) + ", " + std::to_string(m) + " batch rows", double(kRows / 16 * kBlocks),
          2.0 * 16 * 256 * double(m),
          [=](const Variant& variant) {
            if (other_scheme && variant.bfloat16 != nullptr)
              variant.bfloat16->pack(floats.data(), kBlocks * 256, m, bfloats);
            else
              for (int64_t tile = 0; tile < (m + 15) / 16; tile++)
                for (int64_t block = 0; block < kBlocks; block++)
                  variant.table.tiles(format, m).packing->block(packing, tile, block);
          },
          [=](const Variant& variant) {
            if (other_scheme && variant.bfloat16 != nullptr)
              by_bfloats(*variant.bfloat16);
            else
              by_bytes(variant.table);
          }};
}

// Rows of a prompt that are processed together at a depth of 4,096, with four query heads and a KV head of 128; per
// query and tile of 128 positions.
Case attention(CacheFormat format, const char* name, int64_t rows) {
  constexpr int64_t kDim = 128, kTiles = 32, kShared = 4;
  const int64_t queries = rows * kShared, bytes = head_bytes(format, kDim);
  Random random{8};
  uint8_t *const cache = Memory(2 * kTiles * bytes).at, *const window = Memory(head_bytes(CacheFormat::k8v8, kDim)).at;
  const auto fill = [&](uint8_t* at, CacheFormat f) {
    for (int64_t i = 0; i < head_bytes(f, kDim); i++) at[i] = uint8_t(random.bits());
    for (int64_t i = 0; i < 2 * kTilePositions; i++) {
      const half ordinary = 0x2400;
      std::memcpy(at + scales_at(f, kDim) + 2 * i, &ordinary, 2);
    }
  };
  fill(window, CacheFormat::k8v8);
  auto* const tiles = new std::vector<const uint8_t*>;
  auto* const others = new std::vector<const uint8_t*>(size_t(kTiles), window);
  for (int64_t i = 0; i < kTiles; i++) {
    fill(cache + 2 * i * bytes, format);
    tiles->push_back(cache + 2 * i * bytes);
  }
  auto* const q = new std::vector<float>(size_t(queries * kDim));
  auto* const out = new std::vector<float>(size_t(queries * kDim));
  auto* const limits = new std::vector<int64_t>;
  auto* const from = new std::vector<const float*>;
  auto* const to = new std::vector<float*>;
  for (float& v : *q) v = random.real();
  for (int64_t i = 0; i < queries; i++) {
    limits->push_back(kTiles * kTilePositions - rows + 1 + i / kShared);
    from->push_back(q->data() + i * kDim);
    to->push_back(out->data() + i * kDim);
  }
  uint8_t* const scratch = Memory(byte_attention_scratch(queries, kDim)).at;
  std::memset(scratch, 0, size_t(byte_attention_scratch(queries, kDim)));
  return {std::string("attention ") + name + ", " + std::to_string(rows) + " rows", double(queries * kTiles),
          4.0 * kDim * kTilePositions, [](const Variant&) {},
          [=](const Variant& variant) {
            const KernelTable& t = variant.table;
            ByteAttentionTask task{};
            task.q = from->data();
            task.out = to->data();
            task.limits = limits->data();
            task.queries = queries;
            task.dim = kDim;
            task.format = format;
            task.tiles = tiles->data();
            task.window = others->data();
            task.scale = 0.09f;
            task.by_tiles = t.attention_tile_rows > 0;
            task.scratch = scratch;
            t.attention_bytes(task);
          }};
}

}  // namespace

int main() {
  const CpuFeatures cpu = detect_cpu_features();
  if (!cpu.avx512_vnni) {
    std::fprintf(stderr, "tile_costs: this CPU has no AVX-512 VNNI\n");
    return 2;
  }
  const double ghz = clock_ghz();
  std::printf(
      "Cycles at %.2f GHz, one thread. Products, loads and stores are counted; their cycles are 16, 8 and 16 each.\n\n",
      ghz);
  std::printf(
      "| per 16 rows and block, or query and tile | products | loads | stores | tile unit | all but tiles | avx512 | "
      "amx | TF/s |\n");
  std::printf("|---|---:|---:|---:|---:|---:|---:|---:|---:|\n");
  std::vector<Case> cases;
  for (int64_t m : {8, 16, 18, 24, 32, 48, 64, 512}) cases.push_back(product("Q4_K", Format::Q4_K, m));
  for (int64_t m : {32, 64, 512}) cases.push_back(product("Q4_K by bfloat16 N tiles", Format::Q4_K, m, true));
  for (int64_t m : {8, 16, 18, 24, 32, 48, 64, 512}) cases.push_back(product("Q6_K", Format::Q6_K, m));
  for (int64_t rows : {4, 16, 32}) cases.push_back(attention(CacheFormat::k8v8, "k8v8", rows));
  cases.push_back(attention(CacheFormat::k4v4, "k4v4", 32));
  for (const Case& c : cases) {
    TileCounts& counts = tile_counts();
    const int64_t before[] = {counts.byte_products + counts.float_products, counts.loads, counts.stores};
    c.prepare({kAmxEmulatedKernels, &kBfloat16MatmulEmulated});
    c.run({kAmxEmulatedKernels, &kBfloat16MatmulEmulated});
    const double products = double(counts.byte_products + counts.float_products - before[0]) / c.units;
    const double loads = double(counts.loads - before[1]) / c.units,
                 stores = double(counts.stores - before[2]) / c.units;
    const double unit = std::max(products * kProductCycles, loads * kLoadCycles);
    const auto cycles = [&](const Variant& variant) {
      c.prepare(variant);
      return least_seconds([&] { c.run(variant); }) * ghz * 1e9 / c.units;
    };
    std::printf("| %s | %.3g | %.3g | %.3g | %.0f | %.0f | %.0f | ", c.name.c_str(), products, loads, stores, unit,
                cycles({kAmxSkippedKernels, &kBfloat16MatmulSkipped}), cycles({kAvx512Kernels, nullptr}));
    if (cpu.amx_int8) {
      const double real = cycles({kAmxKernels, &kBfloat16Matmul});
      std::printf("%.0f | %.3g |\n", real, c.operations / real * ghz / 1000);
    } else {
      std::printf("no AMX | |\n");
    }
    std::fflush(stdout);
  }
  return 0;
}
