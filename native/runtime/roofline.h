// What bounds the kernels on this machine: how fast its memory is read and its bytes are multiplied.
#pragma once

#include <cstdint>

#include "runtime/threads.h"

namespace qtensor {

// Reads every whole cache line of `bytes` bytes once, the pool's threads taking work items, each in order (1) or in 2
// or 4 places at a time; the exclusive or of all words.
uint64_t read_memory(ThreadPool& pool, const uint8_t* data, int64_t bytes, int places);

// At least `products` products of bytes with the instructions of the family in force, operands in registers; how many.
int64_t multiply_bytes(ThreadPool& pool, int64_t products);

}  // namespace qtensor
