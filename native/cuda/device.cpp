#include "cuda/device.h"

#include <algorithm>
#include <cstring>

namespace qtensor {
namespace cuda {

Device::Use::Use(Device& device) : lock(device.mutex_) {
  device.api_.require(device.api_.context_use(device.context_), "using the GPU");
}

Device::Device(const std::string& library, int number, const MachineCode& code) : api_(library) {
  try {
    open(code, number);
  } catch (...) {
    close();
    throw;
  }
}

Device::~Device() { close(); }

void Device::open(const MachineCode& code, int number) {
  if (code.data == nullptr) throw Unavailable("this build has no machine code for GPUs: it was built without nvcc");
  int version = 0, count = 0, major = 0, minor = 0;
  if (const Result r = api_.init(0); r != kSuccess)
    throw Unavailable("the GPU driver cannot be initialized: " + api_.words_for(r));
  api_.require(api_.driver_version(&version), "querying the driver's version");
  const auto shown = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  if (version < code.oldest_driver)
    throw Unavailable("the GPU driver is too old: it supports CUDA " + shown(version) + ", but CUDA " +
                      shown(code.oldest_driver) + " is required");
  api_.require(api_.device_count(&count), "counting GPUs");
  if (count == 0) throw Unavailable("the GPU driver found no GPU");
  if (number >= count)
    throw Unavailable("there is no GPU " + std::to_string(number) + "; available: 0" +
                      (count == 1 ? std::string() : " to " + std::to_string(count - 1)));
  api_.require(api_.device_get(&device_, number), "finding the GPU");
  char name[256] = {};
  api_.require(api_.device_name(name, int(sizeof name) - 1, device_), "querying the GPU's name");
  name_ = name;
  api_.require(api_.device_attribute(&major, kMajorOfDevice, device_), "querying the GPU's architecture");
  api_.require(api_.device_attribute(&minor, kMinorOfDevice, device_), "querying the GPU's architecture");
  api_.require(api_.device_attribute(&most_shared_bytes_, kMostSharedBytesOfDevice, device_),
               "querying the GPU's shared memory");
  architecture_ = 10 * major + minor;
  if (architecture_ < kOldestArchitecture)
    throw Unavailable(name_ + " is too old: its architecture is " + std::to_string(architecture_) + ", but " +
                      std::to_string(kOldestArchitecture) + " or later is required");
  api_.require(api_.context_retain(&context_, device_), "acquiring the GPU");
  has_context_ = true;
  const Use use(*this);
  api_.require(api_.stream_create(&stream_, kNonBlockingStream), "creating a stream");
  api_.require(api_.host_allocate(&landing_, kLandingBytes, 0), "allocating memory for downloads");
  if (const Result r = api_.module_load(&module_, code.data); r == kOutOfMemory)
    api_.require(r, "loading the kernels");
  else if (r != kSuccess)
    throw Unavailable("the kernels cannot be loaded: " + api_.words_for(r));
}

void Device::close() noexcept {
  if (!has_context_) return;
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  api_.context_use(context_);
  if (stream_ != nullptr) api_.stream_wait(stream_);
  free_retired();
  for (Room& room : scratch_)
    if (room.address != 0) api_.free(room.address);
  if (grids_ != 0) api_.free(grids_);
  if (landing_ != nullptr) api_.host_free(landing_);
  if (module_ != nullptr) api_.module_unload(module_);
  if (stream_ != nullptr) api_.stream_destroy(stream_);
  api_.context_use(nullptr);
  api_.context_release(device_);
  has_context_ = false;
}

Device::Memory Device::memory() {
  const Use use(*this);
  Memory memory{};
  api_.require(api_.memory_info(&memory.free, &memory.total), "querying the GPU's memory");
  return memory;
}

Address Device::allocate(size_t bytes, bool zeroed) {
  const Use use(*this);
  Address address = 0;
  api_.require(api_.allocate(&address, std::max<size_t>(bytes, 1)), "allocating GPU memory");
  if (!zeroed) return address;
  const Result set = api_.set_bytes(address, 0, bytes, stream_);
  if (set != kSuccess) api_.free(address);
  api_.require(set, "clearing GPU memory");
  return address;
}

void Device::free(Address address) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  api_.context_use(context_);
  if (!capturing_) {
    api_.stream_wait(stream_);
    api_.free(address);
    return;
  }
  try {
    retired_.push_back(address);
  } catch (...) {  // leaked until the driver frees the context
  }
}

void Device::upload(Address to, const void* from, size_t bytes) {
  const Use use(*this);
  api_.require(api_.copy_up(to, from, bytes, stream_), "copying to the GPU");
}
void Device::download(void* to, Address from, size_t bytes) {
  const Use use(*this);
  const bool lands = bytes <= kLandingBytes;
  api_.require(api_.copy_down(lands ? landing_ : to, from, bytes, stream_), "copying from the GPU");
  wait();
  if (lands) std::memcpy(to, landing_, bytes);
}
void Device::copy(Address to, Address from, size_t bytes) {
  const Use use(*this);
  api_.require(api_.copy_within(to, from, bytes, stream_), "copying on the GPU");
}
void Device::wait() {
  const Use use(*this);
  api_.require(api_.stream_wait(stream_), "waiting for the GPU");
  free_retired();
}

void Device::free_retired() noexcept {
  for (const Address address : retired_) api_.free(address);
  retired_.clear();
}

const Device::Function& Device::function(const char* kernel) {
  Function& found = functions_[kernel];
  if (found.handle != nullptr) return found;
  Handle made = nullptr;
  int written_for = 0;
  api_.require(api_.module_function(&made, module_, kernel), "looking up a kernel");
  const int most = std::min(most_shared_bytes_, kSmallMSharedLimit);
  api_.require(api_.function_set(made, kSharedBytesOfFunction, most), "setting a kernel's shared memory");
  api_.require(api_.function_attribute(&written_for, kPtxVersionOfFunction, made), "querying a kernel's architecture");
  found = {made, written_for >= kAwaitingArchitecture};
  return found;
}

void Device::launch_bytes(const char* kernel, Grid grid, unsigned threads, size_t shared_bytes, void* arguments) {
  const Use use(*this);
  void* pointers[] = {arguments};
  const Function& started = function(kernel);
  const LaunchOption early{kProgrammaticStart, 0, 1, {}};
  const LaunchConfig config{{grid.x, grid.y, grid.z}, {threads, 1, 1}, unsigned(shared_bytes), stream_, &early,
                            started.awaits ? 1u : 0u};
  api_.require(api_.launch(&config, started.handle, pointers, nullptr), "starting a kernel");
}

void* Device::scratch(Scratch which, int64_t bytes) {
  Room& room = scratch_[size_t(which)];
  if (room.bytes < size_t(bytes)) {
    const Use use(*this);
    const Address made = allocate(size_t(bytes), false);
    if (room.address != 0) retired_.push_back(room.address);
    room = {made, size_t(bytes)};
    scratch_moves_++;
  }
  return reinterpret_cast<void*>(room.address);
}

const Grids* Device::grids() {
  if (grids_ == 0) {
    const Address made = allocate(sizeof kGrids, false);
    try {
      upload(made, &kGrids, sizeof kGrids);
    } catch (...) {
      free(made);
      throw;
    }
    grids_ = made;
  }
  return reinterpret_cast<const Grids*>(grids_);
}

void Device::capture_begin() {
  mutex_.lock();  // until the capture ends
  const Result used = api_.context_use(context_);
  const Result begun = used == kSuccess ? api_.capture_begin(stream_, kRelaxedCapture) : used;
  if (begun != kSuccess) mutex_.unlock();
  api_.require(begun, "capturing a step");
  capturing_ = true;
}
Handle Device::capture_end() {
  Handle graph = nullptr, made = nullptr;
  const Result ended = api_.capture_end(stream_, &graph);
  capturing_ = false;
  const std::unique_lock<std::recursive_mutex> lock(mutex_, std::adopt_lock);
  api_.require(ended, "capturing a step");
  const Result instantiated = api_.graph_instantiate(&made, graph, 0);
  api_.graph_destroy(graph);
  api_.require(instantiated, "instantiating a captured step");
  return made;
}
void Device::capture_drop() noexcept {
  Handle graph = nullptr;
  api_.capture_end(stream_, &graph);
  capturing_ = false;
  if (graph != nullptr) api_.graph_destroy(graph);
  mutex_.unlock();
}
void Device::run_graph(Handle graph) {
  const Use use(*this);
  api_.require(api_.graph_launch(graph, stream_), "starting a step");
}
void Device::free_graph(Handle graph) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  api_.context_use(context_);
  if (!capturing_) api_.stream_wait(stream_);
  api_.graph_exec_destroy(graph);
}

}  // namespace cuda
}  // namespace qtensor
