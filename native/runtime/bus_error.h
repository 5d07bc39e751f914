// Handles faults in a mapped file that has been truncated or can no longer be read.
#pragma once

#include <string>

namespace qtensor {

// Installs a signal handler, which writes `line` (up to 255 bytes) to stderr and ends the process with `exit_code`,
// because a handler can do nothing else safely. For programs only, because the handler affects the whole process.
void end_on_bus_errors(int exit_code, const std::string& line);

}  // namespace qtensor
