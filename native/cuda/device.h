// One GPU: its memory, its kernels, one stream of work, and work captured as a graph. The device of launches.h.
//
// Any thread may call; calls are executed one at a time. A thread that captures has exclusive access until the capture
// ends. Failures are thrown as the exceptions in driver_api.h, and the destructor releases all resources after them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/driver_api.h"
#include "cuda/machine_code.h"

#define QTENSOR_KERNEL(name) #name  // the name by which the driver finds it
#include "cuda/launches.h"

namespace qtensor {
namespace cuda {

constexpr int kOldestArchitecture = 80;  // kernels need its byte products and reductions

constexpr size_t kLandingBytes = size_t(1) << 20;

class Device {
 public:
  // Opens the driver and device `number`. Throws Unavailable, OutOfMemory or Lost.
  Device(const std::string& library, int number, const MachineCode& code);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& name() const { return name_; }
  int architecture() const { return architecture_; }  // 10 * major + minor
  struct Memory {
    size_t free, total;
  };
  Memory memory();

  // Memory of the device
  Address allocate(size_t bytes, bool zeroed);
  void free(Address address) noexcept;
  void upload(Address to, const void* from, size_t bytes);  // `from` may change after this returns
  void download(void* to, Address from, size_t bytes);      // waits for all work
  void copy(Address to, Address from, size_t bytes);
  void wait();

  // For launches.h
  template <class Arguments>
  void launch(const char* kernel, Grid grid, unsigned threads, size_t shared_bytes, const Arguments& arguments) {
    Arguments given = arguments;
    launch_bytes(kernel, grid, threads, shared_bytes, &given);
  }
  void* scratch(Scratch use, int64_t bytes);
  const Grids* grids();  // uploaded at the first call, for the first weight that needs it

  // Work between these two calls is captured instead of executed. capture_end returns it as a graph.
  void capture_begin();
  Handle capture_end();
  void capture_drop() noexcept;
  void run_graph(Handle graph);
  void free_graph(Handle graph) noexcept;
  // Incremented when scratch memory moves, because graphs captured earlier point to the old address.
  uint64_t scratch_moves() const { return scratch_moves_; }

 private:
  struct Use {  // locks the device and makes its context current
    explicit Use(Device& device);
    std::unique_lock<std::recursive_mutex> lock;
  };
  void open(const MachineCode& code, int number);
  void close() noexcept;
  void launch_bytes(const char* kernel, Grid grid, unsigned threads, size_t shared_bytes, void* arguments);
  struct Function {
    Handle handle = nullptr;
    bool awaits = false;  // the kernel awaits the previous one itself
  };
  const Function& function(const char* kernel);
  void free_retired() noexcept;

  DriverApi api_;
  std::recursive_mutex mutex_;
  int device_ = 0, architecture_ = 0, most_shared_bytes_ = 0;
  bool has_context_ = false, capturing_ = false;
  std::string name_;
  Handle context_ = nullptr, module_ = nullptr, stream_ = nullptr;
  std::unordered_map<const char*, Function> functions_;
  struct Room {
    Address address = 0;
    size_t bytes = 0;
  };
  std::array<Room, size_t(Scratch::count)> scratch_;
  void* landing_ = nullptr;  // kLandingBytes of pinned memory, through which small downloads pass
  Address grids_ = 0;
  std::vector<Address> retired_;  // scratch that work in flight may still use
  uint64_t scratch_moves_ = 0;
};

}  // namespace cuda
}  // namespace qtensor
