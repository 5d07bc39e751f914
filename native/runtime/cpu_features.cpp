#include "runtime/cpu_features.h"

#include <cstdint>

#if defined(QTENSOR_X86)
#include <cpuid.h>
#endif
#if defined(QTENSOR_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(QTENSOR_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qtensor {

#if defined(__APPLE__)
namespace {

bool has(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

}  // namespace
#endif

#if defined(QTENSOR_X86)
namespace {

uint64_t enabled_state() {  // XCR0: which registers the operating system saves
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}
// Linux saves tile registers only for processes that request it; a container may refuse.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
// macOS saves zmm registers only after a thread has used them; until then, XCR0 does not include them.
bool saves_zmm(uint64_t state) {
#if defined(__APPLE__)
  (void)state;
  return has("hw.optional.avx512f");
#else
  return (state & 0xe6) == 0xe6;
#endif
}
bool bit(uint32_t word, int index) { return word >> index & 1; }

}  // namespace

CpuFeatures detect_cpu_features() {
  CpuFeatures f;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return f;  // without OSXSAVE, no wide registers can be used
  const bool fma = bit(c, 12), f16c = bit(c, 29);
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = saves_zmm(state), tiles = (state & 0x60000) == 0x60000;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  f.avx2 = ymm && fma && f16c && bit(b, 5);
  uint32_t a1, b1, c1, d1;
  f.avx_vnni = f.avx2 && a >= 1 && __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1) && bit(a1, 4);
  f.avx512_vnni = f.avx2 && zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && bit(c, 11);
  f.amx_int8 = f.avx512_vnni && bit(c, 1) && tiles && bit(d, 24) && bit(d, 25) && bit(d, 22) && tiles_granted();
  return f;
}
#elif defined(QTENSOR_ARM64)
CpuFeatures detect_cpu_features() {
  CpuFeatures f;
#if defined(__linux__)
  constexpr unsigned long dotprod = 1ul << 20, i8mm = 1ul << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM; not in old headers
  f.dotprod = getauxval(AT_HWCAP) & dotprod;
  f.i8mm = f.dotprod && (getauxval(AT_HWCAP2) & i8mm);
#elif defined(__APPLE__)
  f.dotprod = has("hw.optional.arm.FEAT_DotProd");
  f.i8mm = f.dotprod && has("hw.optional.arm.FEAT_I8MM");
#endif
  return f;
}
#else
CpuFeatures detect_cpu_features() { return {}; }
#endif

std::vector<std::string> CpuFeatures::names() const {
  std::vector<std::string> all;
  if (avx2) all.emplace_back("avx2");
  if (avx_vnni) all.emplace_back("avx_vnni");
  if (avx512_vnni) all.emplace_back("avx512_vnni");
  if (amx_int8) all.emplace_back("amx_int8");
  if (dotprod) all.emplace_back("dotprod");
  if (i8mm) all.emplace_back("i8mm");
  return all;
}

}  // namespace qtensor
