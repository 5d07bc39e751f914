#include "runtime/bus_error.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>

namespace qtensor {
namespace {

char last_words[256];
size_t last_words_size = 0;
int last_exit_code = 0;
constexpr uintptr_t kLowestMapped = uintptr_t(1) << 32;  // of 64-bit processes on macOS

// Signal handler: may run in any thread, at any instruction and with any lock held.
void tell_and_end(int signal, siginfo_t* fault, void*) {
  // macOS may report a lost page as SIGSEGV. An address below the first page that it maps is a wrong pointer instead.
  if (signal == SIGSEGV && reinterpret_cast<uintptr_t>(fault->si_addr) < kLowestMapped) {
    std::signal(SIGSEGV, SIG_DFL);
    return;  // the instruction runs again and ends the process
  }
  const ssize_t written = write(STDERR_FILENO, last_words, last_words_size);
  static_cast<void>(written);
  _exit(last_exit_code);
}

}  // namespace

void end_on_bus_errors(int exit_code, const std::string& line) {
  last_words_size = std::min(line.size(), sizeof last_words - 1);
  std::memcpy(last_words, line.data(), last_words_size);
  last_words[last_words_size++] = '\n';
  last_exit_code = exit_code;
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_sigaction = tell_and_end;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
#if defined(__APPLE__)
  sigaction(SIGSEGV, &action, nullptr);
#endif
}

}  // namespace qtensor
