#include "runtime/dispatch.h"

#include <atomic>
#include <stdexcept>

#include "runtime/cpu_features.h"

namespace qtensor {
#if defined(QTENSOR_EMULATED_TILES)
extern const KernelTable kAmxEmulatedKernels;  // tests/native/amx_emulated.cpp
#endif
#if defined(QTENSOR_EMULATED_LANES)
extern const KernelTable kCudaEmulatedKernels;  // tests/native/cuda_emulated.cpp
#endif
namespace {

struct Family {
  const KernelTable* table;
  bool supported;
};

#if defined(QTENSOR_X86)
// AVX-512's table, with some entries replaced by those of a family with tiles.
KernelTable upon_avx512(const KernelTable& tiles) {
  KernelTable t = kAvx512Kernels;
  const auto take = [&](auto... entry) { ((t.*entry = tiles.*entry), ...); };
  using T = KernelTable;
  take(&T::name, &T::attention_bytes, &T::byte_peak, &T::peak_products, &T::attention_tile_rows, &T::slabs,
       &T::packs_by_default, &T::tiles, &T::tile_rows, &T::tile_scratch_bytes);
  return t;
}
#endif

const std::vector<Family>& families() {
  static const std::vector<Family> all = [] {
    [[maybe_unused]] const CpuFeatures cpu = detect_cpu_features();
#if defined(QTENSOR_X86)
    static const KernelTable amx = upon_avx512(kAmxKernels);
#endif
#if defined(QTENSOR_EMULATED_TILES)
    static const KernelTable amx_emulated = upon_avx512(kAmxEmulatedKernels);
#endif
    return std::vector<Family>{
#if defined(QTENSOR_X86)
        {&amx, cpu.amx_int8},
        {&kAvx512Kernels, cpu.avx512_vnni},
        {&kAvxVnniKernels, cpu.avx_vnni},
        {&kAvx2Kernels, cpu.avx2},
#endif
#if defined(QTENSOR_ARM64)
        {&kNeonI8mmKernels, cpu.i8mm},
        {&kNeonKernels, cpu.dotprod},
#endif
#if defined(QTENSOR_EMULATED_TILES)
        {&amx_emulated, cpu.avx512_vnni},  // never the default, because avx512 precedes it
#endif
        {&kGenericKernels, true},
#if defined(QTENSOR_EMULATED_LANES)
        {&kCudaEmulatedKernels, true},  // never the default
#endif
    };
  }();
  return all;
}

std::atomic<const KernelTable*> in_force{nullptr};
std::atomic<bool> tiles_wanted{kAttentionByTiles};

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<std::string> known_kernels() {
  std::vector<std::string> names;
  for (const auto& family : families()) names.emplace_back(family.table->name);
  return names;
}

std::vector<std::string> available_kernels() {
  std::vector<std::string> names;
  for (const auto& family : families())
    if (family.supported) names.emplace_back(family.table->name);
  return names;
}

const KernelTable& kernels() {
  const KernelTable* table = in_force.load(std::memory_order_acquire);
  if (table == nullptr) {
    use_kernels(available_kernels().front());
    table = in_force.load(std::memory_order_acquire);
  }
  return *table;
}

void use_kernels(const std::string& name) {
  for (const auto& family : families()) {
    if (name != family.table->name) continue;
    if (!family.supported)
      throw std::invalid_argument("this CPU does not support the kernels '" + name +
                                  "'; available: " + joined(available_kernels()));
    in_force.store(family.table, std::memory_order_release);
    return;
  }
  throw std::invalid_argument("unknown kernels '" + name + "'; available: " + joined(available_kernels()));
}

bool attention_by_tiles() { return tiles_wanted.load(std::memory_order_relaxed) && kernels().attention_tile_rows > 0; }

void use_attention(const std::string& variant) {
  if (variant != "auto" && variant != "vectors" && variant != "tiles")
    throw std::invalid_argument("unknown attention '" + variant +
                                "'; choices for NOTSO_ATTENTION: auto, vectors and tiles");
  if (variant == "tiles" && kernels().attention_tile_rows == 0)
    throw std::invalid_argument(std::string("the kernels '") + kernels().name + "' have no tiles for attention");
  tiles_wanted.store(variant == "auto" ? kAttentionByTiles : variant == "tiles", std::memory_order_relaxed);
}

std::string attention_variant() { return attention_by_tiles() ? "tiles" : "vectors"; }

}  // namespace qtensor
