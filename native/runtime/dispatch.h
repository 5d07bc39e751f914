// Selects the kernel family: the best one that this CPU supports, or one given by name.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace qtensor {

// All families that are compiled in, best first, including those that this CPU does not support.
std::vector<std::string> known_kernels();
// The families that this CPU supports, best first. "generic" is always included.
std::vector<std::string> available_kernels();
// The current table. It is selected at the first call.
const KernelTable& kernels();
// Selects another family. Throws std::invalid_argument, listing the choices, for an unknown or unsupported name.
void use_kernels(const std::string& name);

// Whether attention with many queries over a cache of bytes uses AMX tiles by default, if the family has them. The
// results are bit-identical. Measurements: docs/kernels/attention.md.
inline constexpr bool kAttentionByTiles = true;
bool attention_by_tiles();
// `variant` is "auto" (the default), "vectors" or "tiles". Throws std::invalid_argument for other values, and for
// "tiles" if the current family has none.
void use_attention(const std::string& variant);
// The variant in use: "vectors" or "tiles".
std::string attention_variant();

}  // namespace qtensor
