// Weights packed in slabs (packed_weights.h), and their rows as they were.
#pragma once

#include <cstdint>

#include "ops/dequantize.h"

namespace qtensor {

// Whether there is a packed layout of a format, and kernels for it in the family in force.
bool is_packed(Format format);
// Bytes of a slab with so many of its rows.
int64_t slab_bytes(Format format, int64_t k, int64_t rows);
// Bytes from the first slab of a weight to its end.
int64_t packed_bytes(const Weight& packed);
// Packs `rows`, a weight as in the file, into slabs that begin slab_stride bytes after one another.
void pack_weight(const Weight& rows, uint8_t* to, int64_t slab_stride);
// The 32 rows from `row` on (a multiple of 32) of a packed weight, as they were; zeros behind its last one.
void unpack_group(const Weight& packed, int64_t row, uint8_t* to);
// One row.
void unpack_row(const Weight& packed, int64_t row, uint8_t* to);

}  // namespace qtensor
