// Which kernels run: the best this CPU has, or the family that was asked for by name.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace qtensor {

// Every family compiled in, best first, whether this CPU runs it or not.
std::vector<std::string> known_kernels();
// Those this CPU runs, best first. "generic" is always among them.
std::vector<std::string> available_kernels();
// The table in force. Chosen at first use.
const KernelTable& kernels();
// Puts another family in force. Throws std::invalid_argument, listing the choices, for an unknown or unsupported name.
void use_kernels(const std::string& name);

}  // namespace qtensor
