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

// Whether many queries read a cache of bytes by tiles, where the family in force has any: docs/kernels/attention.md
// tells what that was predicted to gain. The bits are the same.
inline constexpr bool kAttentionByTiles = true;
bool attention_by_tiles();
// "auto" (the constant), "vectors" or "tiles". Throws std::invalid_argument for anything else, and for tiles where the
// family in force has none.
void use_attention(const std::string& variant);
// The one of the two that is taken.
std::string attention_variant();

}  // namespace qtensor
