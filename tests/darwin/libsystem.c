// Stand-in for the part of macOS's libSystem that notso.system.libsystem calls, written from the public headers
// (sys/sysctl.h, mach/mach_host.h, mach/vm_statistics.h, libproc.h, pthread/qos.h). Describes a machine with 2
// performance and 2 efficiency cores and 16 GiB. Linked to no library, so that no Linux symbol is found through it.
#include <stddef.h>
#include <stdint.h>

#define KERN_FAILURE 5

size_t vm_kernel_page_size = 16384;

static int same(const char* a, const char* b) {
  while (*a && *a == *b) a++, b++;
  return *a == *b;
}

static const struct {
  const char* name;
  uint64_t value;
  size_t size;
} numbers[] = {
    {"hw.memsize", 17179869184u, 8},        {"hw.physicalcpu", 4, 4},
    {"hw.perflevel0.physicalcpu", 2, 4},    {"hw.perflevel1.physicalcpu", 2, 4},
    {"kern.maxfilesperproc", 10240, 4},     {"kern.memorystatus_vm_pressure_level", 1, 4},
    {"hw.optional.arm.FEAT_DotProd", 1, 4}, {"hw.optional.arm.FEAT_I8MM", 1, 4},
};

int sysctlbyname(const char* name, void* old, size_t* length, void* new_value, size_t new_length) {
  if (new_value || new_length) return -1;
  const char brand[] = "Apple M2";
  const char* from = NULL;
  size_t size = 0;
  if (same(name, "machdep.cpu.brand_string")) from = brand, size = sizeof brand;
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    if (same(name, numbers[i].name)) from = (const char*)&numbers[i].value, size = numbers[i].size;
  if (!from || *length < size) return -1;
  for (size_t i = 0; i < size; i++) ((char*)old)[i] = from[i];
  *length = size;
  return 0;
}

unsigned mach_host_self(void) { return 1; }

struct vm_statistics64 {
  uint32_t free_count, active_count, inactive_count, wire_count;
  uint64_t zero_fill_count, reactivations, pageins, pageouts, faults, cow_faults, lookups, hits, purges;
  uint32_t purgeable_count, speculative_count;
  uint64_t decompressions, compressions, swapins, swapouts;
  uint32_t compressor_page_count, throttled_count, external_page_count, internal_page_count;
  uint64_t total_uncompressed_pages_in_compressor;
} __attribute__((aligned(8)));

int host_statistics64(unsigned host, int flavor, struct vm_statistics64* info, unsigned* count) {
  if (host != 1 || flavor != 4 || *count < sizeof *info / sizeof(int)) return KERN_FAILURE;
  *info = (struct vm_statistics64){.free_count = 200000,
                                   .active_count = 300000,
                                   .inactive_count = 300000,
                                   .wire_count = 100000,
                                   .speculative_count = 50000,
                                   .internal_page_count = 350000};
  *count = sizeof *info / sizeof(int);
  return 0;
}

struct rusage_info_v0 {
  uint8_t uuid[16];
  uint64_t user_time, system_time, pkg_idle_wkups, interrupt_wkups, pageins, wired_size, resident_size, phys_footprint,
      proc_start_abstime, proc_exit_abstime;
};

int proc_pid_rusage(int pid, int flavor, struct rusage_info_v0* usage) {
  if (pid <= 0 || flavor != 0) return -1;
  *usage = (struct rusage_info_v0){.resident_size = 300 << 20, .phys_footprint = 200 << 20};
  return 0;
}

struct proc_bsdshortinfo {
  uint32_t pid, ppid, pgid, status;
  char comm[16];
  uint32_t flags, uid, gid, ruid, rgid, svuid, svgid, reserved;
};

// Process 4 is stopped; all others sleep.
int proc_pidinfo(int pid, int flavor, uint64_t arg, struct proc_bsdshortinfo* info, int size) {
  if (pid <= 0 || flavor != 13 || arg || size < (int)sizeof *info) return 0;
  *info = (struct proc_bsdshortinfo){.pid = (uint32_t)pid, .status = pid == 4 ? 4 : 3};
  return sizeof *info;
}

size_t malloc_zone_pressure_relief(void* zone, size_t goal) { return zone || goal ? 0 : 4096; }

int pthread_set_qos_class_self_np(unsigned qos, int relative) {
  const int known = qos == 0x21 || qos == 0x19 || qos == 0x15 || qos == 0x11 || qos == 0x09;
  return known && relative <= 0 && relative > -16 ? 0 : 22;  // EINVAL
}
