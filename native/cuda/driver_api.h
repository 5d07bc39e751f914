// The functions of the GPU driver's library that are used. The library is opened at run time. No vendor headers and no
// runtime library are needed: names, numbers and signatures are those of the driver's stable interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace qtensor {
namespace cuda {

// The device cannot be used, now or later: the library is missing or too old, or there is no device, or no machine code
// for the device.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The device does not have enough memory. Other work is not affected.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A call failed, and the state of the device is unknown.
struct Lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Result = int;
using Address = unsigned long long;  // in device memory
using Handle = void*;                // a context, stream, module, function or graph
constexpr Result kSuccess = 0, kOutOfMemory = 2;

constexpr int kSharedBytesOfFunction = 8;     // attribute of a function: most dynamic shared memory
constexpr int kMostSharedBytesOfDevice = 97;  // attributes of a device: most shared memory of a thread block,
constexpr int kMajorOfDevice = 75, kMinorOfDevice = 76;  // and its architecture
constexpr unsigned kNonBlockingStream = 1;               // not ordered with other streams
constexpr int kRelaxedCapture = 2;                       // memory may be allocated while a stream is captured

// The parameters of a launch, in the layout of the driver.
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
constexpr int kProgrammaticStart = 6;      // attribute of a launch: it may begin before the previous launch ends
constexpr int kPtxVersionOfFunction = 5;   // attribute of a function: the architecture of its PTX
constexpr int kAwaitingArchitecture = 90;  // from this one on, kernels await the previous one themselves

// All functions that are called: the name here, the name in the library, the arguments.
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
  // Opens the library and looks up all functions. Throws Unavailable.
  explicit DriverApi(const std::string& library);
  ~DriverApi();
  DriverApi(const DriverApi&) = delete;
  DriverApi& operator=(const DriverApi&) = delete;

#define QTENSOR_DECLARE(name, symbol, arguments) Result(*name) arguments = nullptr;
  QTENSOR_DRIVER_FUNCTIONS(QTENSOR_DECLARE)
#undef QTENSOR_DECLARE

  // The name of a result and the driver's description of it.
  std::string words_for(Result result) const;
  // Throws OutOfMemory or Lost if the call failed. what: describes the call in the message.
  void require(Result result, const char* what) const;

 private:
  void* library_;
};

}  // namespace cuda
}  // namespace qtensor
