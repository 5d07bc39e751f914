// A GPU driver for tests: the functions of libcuda.so.1 that native/cuda/driver_api.h uses, with host memory and the
// machine of emulated_lanes.h. So the loader, the device and all code above run without a GPU, with the kernels' real
// results.
//
// Tests configure faults with stub_set, or before loading with the environment variable STUB_DRIVER="devices=0
// version=11040".
//   devices, version, architecture, memory     reported properties
//   fail_at, fail_with                         number of the next call that fails (from 1), and its result
// A failure other than 2 (out of memory) is permanent, as on a lost device. stub_live counts objects that were created
// and not destroyed. The stub is stricter than a driver: it aborts with a message for addresses outside of allocated
// memory, and for copies between the kernels of a captured stream.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda/driver_api.h"
#include "emulated_device.h"

#define STUB extern "C" __attribute__((visibility("default")))

namespace {

using namespace qtensor::cuda;
using Address = unsigned long long;
using Handle = void*;
using Work = std::function<void()>;

constexpr int kOk = 0, kInvalid = 1, kNotFound = 500;

struct Settings {
  std::map<std::string, long long> values{{"devices", 1},        {"version", 13000}, {"architecture", 90},
                                          {"memory", 4ll << 30}, {"fail_at", 0},     {"fail_with", 700}};
  Settings() {
    const char* const given = std::getenv("STUB_DRIVER");
    std::string text = given == nullptr ? "" : given;
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find(' ', at), text.size()), equals = text.find('=', at);
      if (equals < end) values[text.substr(at, equals - at)] = std::atoll(text.c_str() + equals + 1);
      at = end + 1;
    }
  }
};

struct Graph {
  std::vector<Work> work;
};
struct Driver {
  Settings settings;
  std::recursive_mutex mutex;
  long long calls = 0;
  int lost = kOk;
  std::map<Address, size_t> memory;  // begin and size
  long long used = 0;
  std::set<Handle> live;                           // contexts, streams, modules, graphs
  std::map<int, std::pair<Handle, int>> contexts;  // of each device, with a reference count
  Graph* capture = nullptr;
  uint64_t launches = 0, graph_launches = 0;
};
Driver& driver() {
  static Driver* const made = new Driver;  // never destroyed, because objects may be freed at exit
  return *made;
}

// Called first by every function: counts the call, and returns the configured failure. Objects are freed in any case.
struct Call {
  std::lock_guard<std::recursive_mutex> lock;
  int result;
  Call() : lock(driver().mutex), result(kOk) {
    Driver& d = driver();
    d.calls++;
    auto& at = d.settings.values["fail_at"];
    if (d.lost != kOk) {
      result = d.lost;
    } else if (at > 0 && --at == 0) {
      result = int(d.settings.values["fail_with"]);
      if (result != kOutOfMemory) d.lost = result;
    }
  }
};
#define BEGIN_CALL      \
  const Call call;      \
  Driver& d = driver(); \
  (void)d;              \
  if (call.result != kOk) return call.result

template <class T>
Handle keep(T* made) {
  driver().live.insert(made);
  return made;
}
bool within(Address at, size_t bytes) {
  auto found = driver().memory.upper_bound(at);
  if (found == driver().memory.begin()) return false;
  --found;
  return at + bytes <= found->first + found->second;
}
void require_within(Address at, size_t bytes) {
  if (bytes > 0 && !within(at, bytes)) lanes::refuse("an address outside of the device's memory");
}
void require_no_capture() {
  if (driver().capture != nullptr) lanes::refuse("a copy while a stream is captured");
}

struct Start {
  Grid grid;
  unsigned threads;
  size_t shared_bytes;
};
using Kernel = std::function<Work(const Start&, const void*)>;

template <class Arguments>
Kernel kernel_of(void (*kernel)(Arguments)) {
  return [kernel](const Start& start, const void* given) -> Work {
    Arguments arguments;
    std::memcpy(&arguments, given, sizeof arguments);
    return [=] {
      const uint64_t seed = 0x9e3779b9u * ++driver().launches;
      lanes::launch(seed, {start.grid.x, start.grid.y, start.grid.z}, start.threads, start.shared_bytes, kernel,
                    arguments);
    };
  };
}
const std::map<std::string, Kernel>& kernels() {
#define K(name) {#name, kernel_of(name)}
#define P(name) K(one_row_##name), K(small_m_##name##_8), K(small_m_##name##_16), K(large_m_##name)
  static const std::map<std::string, Kernel> all{
      K(quantize),
      K(quantize_by_32),
      P(q4_k),
      P(q5_k),
      P(q6_k),
      P(q8_0),
      P(q4_0),
      P(q4_1),
      P(unpacked_256),
      P(unpacked_32),
      K(product_f32),
      K(product_f16),
      K(product_bf16),
      K(rms_norm),
      K(silu_mul),
      K(add),
      K(softmax),
      K(rope),
      K(rope_table),
      K(argmax),
      K(gather_rows),
      K(embed_rows),
      K(store_key_values),
      K(attend_halves),
      K(attend_begin),
      K(attend_scores),
      K(attend_weights),
      K(attend_join),
      K(attend_query),
      K(prepare_attention),
  };
#undef P
#undef K
  return all;
}

}  // namespace

STUB void stub_set(const char* name, long long value) {
  const std::lock_guard<std::recursive_mutex> lock(driver().mutex);
  driver().settings.values[name] = value;
  if (std::strcmp(name, "fail_at") == 0) driver().lost = kOk;
}
STUB long long stub_calls() { return driver().calls; }
STUB long long stub_live() { return (long long)(driver().memory.size() + driver().live.size()); }
STUB long long stub_graph_launches() { return (long long)(driver().graph_launches); }
STUB long long stub_kernels() { return (long long)(kernels().size()); }

STUB int cuInit(unsigned) {
  BEGIN_CALL;
  return d.settings.values["devices"] < 0 ? 100 : kOk;
}
STUB int cuDriverGetVersion(int* version) {
  BEGIN_CALL;
  return *version = int(d.settings.values["version"]), kOk;
}
STUB int cuDeviceGetCount(int* count) {
  BEGIN_CALL;
  return *count = int(d.settings.values["devices"]), kOk;
}
STUB int cuDeviceGet(int* device, int number) {
  BEGIN_CALL;
  return *device = number, kOk;
}
STUB int cuDeviceGetName(char* name, int length, int device) {
  BEGIN_CALL;
  return std::snprintf(name, size_t(length), "Emulated GPU %d", device), kOk;
}
STUB int cuDeviceGetAttribute(int* value, int which, int) {
  BEGIN_CALL;
  const int architecture = int(d.settings.values["architecture"]);
  *value = which == 75 ? architecture / 10 : which == 76 ? architecture % 10 : 99 << 10;
  return kOk;
}
STUB int cuDevicePrimaryCtxRetain(Handle* context, int device) {
  BEGIN_CALL;
  auto& [made, users] = d.contexts[device];
  if (users++ == 0) made = keep(new int(0));
  return *context = made, kOk;
}
STUB int cuDevicePrimaryCtxRelease_v2(int device) {
  const Call call;
  auto& [made, users] = driver().contexts[device];
  if (users > 0 && --users == 0) {
    driver().live.erase(made);
    delete static_cast<int*>(made);
  }
  return call.result;
}
STUB int cuCtxSetCurrent(Handle) {
  BEGIN_CALL;
  return kOk;
}
STUB int cuMemGetInfo_v2(size_t* free, size_t* total) {
  BEGIN_CALL;
  *total = size_t(d.settings.values["memory"]);
  return *free = size_t(std::max(0ll, d.settings.values["memory"] - d.used)), kOk;
}
STUB int cuMemAlloc_v2(Address* address, size_t bytes) {
  BEGIN_CALL;
  if (d.used + (long long)bytes > d.settings.values["memory"]) return kOutOfMemory;
  void* const made = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(made, 0x5a, bytes);
  *address = reinterpret_cast<Address>(made);
  d.memory[*address] = bytes;
  d.used += (long long)bytes;
  return kOk;
}
STUB int cuMemFree_v2(Address address) {
  const Call call;
  const auto found = driver().memory.find(address);
  if (found == driver().memory.end()) lanes::refuse("memory is freed that is none");
  driver().used -= (long long)found->second;
  driver().memory.erase(found);
  std::free(reinterpret_cast<void*>(address));
  return call.result;
}
STUB int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  BEGIN_CALL;
  return *memory = keep(new char[bytes]), kOk;
}
STUB int cuMemFreeHost(void* memory) {
  const Call call;
  if (driver().live.erase(memory) != 1) lanes::refuse("host memory is freed that is none");
  delete[] static_cast<char*>(memory);
  return call.result;
}
STUB int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Handle) {
  BEGIN_CALL;
  require_no_capture();
  require_within(to, bytes);
  return std::memset(reinterpret_cast<void*>(to), value, bytes), kOk;
}
STUB int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Handle) {
  BEGIN_CALL;
  require_no_capture();
  require_within(to, bytes);
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), kOk;
}
STUB int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Handle) {
  BEGIN_CALL;
  require_no_capture();
  require_within(from, bytes);
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), kOk;
}
STUB int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Handle) {
  BEGIN_CALL;
  require_no_capture();
  require_within(to, bytes);
  require_within(from, bytes);
  return std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), kOk;
}
STUB int cuStreamCreate(Handle* stream, unsigned) {
  BEGIN_CALL;
  return *stream = keep(new int(0)), kOk;
}
STUB int cuStreamDestroy_v2(Handle stream) {
  const Call call;
  if (driver().live.erase(stream) == 1) delete static_cast<int*>(stream);
  return call.result;
}
STUB int cuStreamSynchronize(Handle) {
  BEGIN_CALL;
  if (d.capture != nullptr) lanes::refuse("waiting for a stream that is captured");
  return kOk;
}
STUB int cuStreamBeginCapture_v2(Handle, int) {
  BEGIN_CALL;
  if (d.capture != nullptr) return kInvalid;
  d.capture = new Graph;
  keep(d.capture);
  return kOk;
}
STUB int cuStreamEndCapture(Handle, Handle* graph) {
  const Call call;
  Graph* const captured = driver().capture;
  driver().capture = nullptr;
  *graph = nullptr;
  if (call.result == kOk) return *graph = captured, captured == nullptr ? kInvalid : kOk;
  if (captured != nullptr) driver().live.erase(captured), delete captured;
  return call.result;
}
STUB int cuGraphInstantiateWithFlags(Handle* made, Handle graph, unsigned long long) {
  BEGIN_CALL;
  return *made = keep(new Graph(*static_cast<Graph*>(graph))), kOk;
}
STUB int cuGraphLaunch(Handle graph, Handle) {
  BEGIN_CALL;
  if (d.live.count(graph) == 0) lanes::refuse("a graph that is none");
  d.graph_launches++;
  for (const Work& work : static_cast<Graph*>(graph)->work) work();
  return kOk;
}
STUB int cuGraphExecDestroy(Handle graph) {
  const Call call;
  if (driver().live.erase(graph) == 1) delete static_cast<Graph*>(graph);
  return call.result;
}
STUB int cuGraphDestroy(Handle graph) { return cuGraphExecDestroy(graph); }
STUB int cuModuleLoadData(Handle* module, const void*) {
  BEGIN_CALL;
  return *module = keep(new int(0)), kOk;
}
STUB int cuModuleUnload(Handle module) { return cuStreamDestroy_v2(module); }
STUB int cuModuleGetFunction(Handle* function, Handle, const char* name) {
  BEGIN_CALL;
  const auto found = kernels().find(name);
  if (found == kernels().end()) return kNotFound;
  return *function = const_cast<Kernel*>(&found->second), kOk;
}
STUB int cuFuncSetAttribute(Handle, int, int) {
  BEGIN_CALL;
  return kOk;
}
STUB int cuFuncGetAttribute(int* value, int, Handle) {
  BEGIN_CALL;
  return *value = int(d.settings.values["architecture"]), kOk;
}
STUB int cuLaunchKernelEx(const LaunchConfig* config, Handle function, void** arguments, void**) {
  BEGIN_CALL;
  const unsigned *const grid = config->grid, y = grid[1], z = grid[2];
  if (grid[0] == 0 || y == 0 || z == 0 || y > 65535 || z > 65535) lanes::refuse("a grid that a GPU would not take");
  Work work =
      (*static_cast<const Kernel*>(function))({{grid[0], y, z}, config->block[0], config->shared_bytes}, arguments[0]);
  if (d.capture != nullptr)
    d.capture->work.push_back(std::move(work));
  else
    work();
  return kOk;
}
STUB int cuGetErrorName(int result, const char** name) {
  *name = result == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == 100        ? "CUDA_ERROR_NO_DEVICE"
                                 : "CUDA_ERROR_ILLEGAL_ADDRESS";
  return kOk;
}
STUB int cuGetErrorString(int result, const char** text) {
  *text = result == kOutOfMemory ? "out of memory" : result == 100 ? "no device" : "the device is lost";
  return kOk;
}
