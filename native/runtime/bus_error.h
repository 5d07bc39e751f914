// Handles faults in a mapped file that has been truncated or can no longer be read.
#pragma once

#include <string>

namespace qtensor {

// From now on, such a fault writes this line (up to 255 bytes) to stderr and ends the process with `exit_code`, since
// a signal handler can do nothing else safely. For programs, not for libraries.
void end_on_bus_errors(int exit_code, const std::string& line);

}  // namespace qtensor
