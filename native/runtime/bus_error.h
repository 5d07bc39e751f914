// What the process does when a file it has mapped is cut short, or can no longer be read.
#pragma once

#include <string>

namespace qtensor {

// From now on such a fault writes this line (of up to 255 bytes) to stderr and ends the process with `exit_code`. For
// programs, not for libraries: nothing else is safe there.
void end_on_bus_errors(int exit_code, const std::string& line);

}  // namespace qtensor
