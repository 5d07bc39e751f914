#include "cuda/driver_api.h"

#include <dlfcn.h>

namespace qtensor {
namespace cuda {

DriverApi::DriverApi(const std::string& library) : library_(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ == nullptr) throw Unavailable("no GPU driver is installed (" + library + " cannot be loaded)");
#define QTENSOR_FIND(name, symbol, arguments)                            \
  name = reinterpret_cast<Result(*) arguments>(dlsym(library_, symbol)); \
  if (name == nullptr) {                                                 \
    dlclose(library_);                                                   \
    throw Unavailable("the GPU driver is too old: it has no " symbol);   \
  }
  QTENSOR_DRIVER_FUNCTIONS(QTENSOR_FIND)
#undef QTENSOR_FIND
}

DriverApi::~DriverApi() { dlclose(library_); }

std::string DriverApi::words_for(Result result) const {
  const char *called = nullptr, *text = nullptr;
  error_name(result, &called);
  error_text(result, &text);
  return (called != nullptr ? std::string(called) : "error " + std::to_string(result)) +
         (text != nullptr ? std::string(": ") + text : "");
}

void DriverApi::require(Result result, const char* what) const {
  if (result == kSuccess) return;
  const std::string message = std::string(what) + ": " + words_for(result);
  if (result == kOutOfMemory) throw OutOfMemory(message);
  throw Lost(message);
}

}  // namespace cuda
}  // namespace qtensor
