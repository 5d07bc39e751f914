// The part of the GPU driver's own library that is used, opened when it is asked for. No header of the vendor's and no
// runtime library: names, numbers and signatures are those of the driver's stable interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace qtensor {
namespace cuda {

// Why the device cannot be used, now and later: no library, too old, no device, no machine code for it.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// It has not the memory; everything else goes on.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A call failed, and nothing on the device can be relied on any more.
struct Lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Result = int;
using Address = unsigned long long;  // in the device's memory
using Handle = void*;                // a context, stream, module, function or graph
constexpr Result kSuccess = 0, kOutOfMemory = 2;

constexpr int kSharedBytesOfFunction = 8;     // attribute of a function: most dynamic shared memory
constexpr int kMostSharedBytesOfDevice = 97;  // attributes of a device: shared memory that a thread block may ask for,
constexpr int kMajorOfDevice = 75, kMinorOfDevice = 76;  // and its architecture
constexpr unsigned kNonBlockingStream = 1;               // not ordered with what others do
constexpr int kRelaxedCapture = 2;                       // memory may be had while a stream is captured

// How a kernel is started, as the driver lays it out.
struct alignas(8) LaunchOption {
  int id, padding = 0;
  int value = 0;
  char rest[60] = {};
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Handle stream;
  const LaunchOption* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchOption) == 72 && sizeof(LaunchConfig) == 56);
constexpr int kProgrammaticStart = 6;      // attribute of a launch: it may begin before the launch before has ended
constexpr int kPtxVersionOfFunction = 5;   // attribute of a function: the architecture its code was written for
constexpr int kAwaitingArchitecture = 90;  // from which on kernels have code that awaits the kernel before

// Every function that is called: what it is called here, its name in the library, its arguments.
#define QTENSOR_DRIVER_FUNCTIONS(F)                                                          \
  F(init, "cuInit", (unsigned))                                                              \
  F(driver_version, "cuDriverGetVersion", (int*))                                            \
  F(device_count, "cuDeviceGetCount", (int*))                                                \
  F(device_get, "cuDeviceGet", (int*, int))                                                  \
  F(device_name, "cuDeviceGetName", (char*, int, int))                                       \
  F(device_attribute, "cuDeviceGetAttribute", (int*, int, int))                              \
  F(context_retain, "cuDevicePrimaryCtxRetain", (Handle*, int))                              \
  F(context_release, "cuDevicePrimaryCtxRelease_v2", (int))                                  \
  F(context_use, "cuCtxSetCurrent", (Handle))                                                \
  F(memory_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                      \
  F(allocate, "cuMemAlloc_v2", (Address*, size_t))                                           \
  F(free, "cuMemFree_v2", (Address))                                                         \
  F(host_allocate, "cuMemHostAlloc", (void**, size_t, unsigned))                             \
  F(host_free, "cuMemFreeHost", (void*))                                                     \
  F(set_bytes, "cuMemsetD8Async", (Address, unsigned char, size_t, Handle))                  \
  F(copy_up, "cuMemcpyHtoDAsync_v2", (Address, const void*, size_t, Handle))                 \
  F(copy_down, "cuMemcpyDtoHAsync_v2", (void*, Address, size_t, Handle))                     \
  F(copy_within, "cuMemcpyDtoDAsync_v2", (Address, Address, size_t, Handle))                 \
  F(stream_create, "cuStreamCreate", (Handle*, unsigned))                                    \
  F(stream_destroy, "cuStreamDestroy_v2", (Handle))                                          \
  F(stream_wait, "cuStreamSynchronize", (Handle))                                            \
  F(capture_begin, "cuStreamBeginCapture_v2", (Handle, int))                                 \
  F(capture_end, "cuStreamEndCapture", (Handle, Handle*))                                    \
  F(graph_instantiate, "cuGraphInstantiateWithFlags", (Handle*, Handle, unsigned long long)) \
  F(graph_launch, "cuGraphLaunch", (Handle, Handle))                                         \
  F(graph_exec_destroy, "cuGraphExecDestroy", (Handle))                                      \
  F(graph_destroy, "cuGraphDestroy", (Handle))                                               \
  F(module_load, "cuModuleLoadData", (Handle*, const void*))                                 \
  F(module_unload, "cuModuleUnload", (Handle))                                               \
  F(module_function, "cuModuleGetFunction", (Handle*, Handle, const char*))                  \
  F(function_set, "cuFuncSetAttribute", (Handle, int, int))                                  \
  F(function_attribute, "cuFuncGetAttribute", (int*, int, Handle))                           \
  F(launch, "cuLaunchKernelEx", (const LaunchConfig*, Handle, void**, void**))               \
  F(error_name, "cuGetErrorName", (Result, const char**))                                    \
  F(error_text, "cuGetErrorString", (Result, const char**))

class DriverApi {
 public:
  // Opens the library and finds every function. Throws Unavailable.
  explicit DriverApi(const std::string& library);
  ~DriverApi();
  DriverApi(const DriverApi&) = delete;
  DriverApi& operator=(const DriverApi&) = delete;

#define QTENSOR_DECLARE(name, symbol, arguments) Result(*name) arguments = nullptr;
  QTENSOR_DRIVER_FUNCTIONS(QTENSOR_DECLARE)
#undef QTENSOR_DECLARE

  // What a result is called, and what the driver says of it.
  std::string words_for(Result result) const;
  // Throws OutOfMemory or Lost unless the call succeeded. what: which call, for people.
  void require(Result result, const char* what) const;

 private:
  void* library_;
};

}  // namespace cuda
}  // namespace qtensor
