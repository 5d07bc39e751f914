// Measures the limits of the machine: reading memory and multiplying bytes.
#pragma once

#include <cstdint>

#include "runtime/threads.h"

namespace qtensor {

// Reads each whole cache line of `bytes` bytes once, in work items for the pool's threads. Each item is read in order
// (places = 1), or from 2 or 4 places alternately. Returns the exclusive or of all words.
uint64_t read_memory(ThreadPool& pool, const uint8_t* data, int64_t bytes, int places);

// Computes at least `products` byte products with the instructions of the current family and operands in registers.
// Returns their number.
int64_t multiply_bytes(ThreadPool& pool, int64_t products);

}  // namespace qtensor
