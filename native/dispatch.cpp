#include "dispatch.h"

#include <atomic>
#include <stdexcept>

#include "cpu_features.h"

namespace qtensor {
namespace {

struct Family {
  const KernelTable* table;
  bool supported;
};

const std::vector<Family>& families() {
  static const std::vector<Family> all = [] {
    [[maybe_unused]] const CpuFeatures cpu = detect_cpu_features();
    return std::vector<Family>{
#if defined(QTENSOR_X86)
        {&kAmxKernels, cpu.amx_int8},
        {&kAvx512Kernels, cpu.avx512_vnni},
        {&kAvx2Kernels, cpu.avx2},
#endif
        {&kGenericKernels, true},
    };
  }();
  return all;
}

std::atomic<const KernelTable*> in_force{nullptr};

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
      throw std::invalid_argument("this CPU cannot run the kernels '" + name +
                                  "'; choices here: " + joined(available_kernels()));
    in_force.store(family.table, std::memory_order_release);
    return;
  }
  throw std::invalid_argument("unknown kernels '" + name + "'; choices here: " + joined(available_kernels()));
}

}  // namespace qtensor
