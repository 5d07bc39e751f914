// Packing weights into slabs (packed_weights.h), and unpacking their rows.
#pragma once

#include <cstdint>

#include "ops/dequantize.h"

namespace qtensor {

// Whether a format has a packed layout and the current family has kernels for it.
bool is_packed(Format format);
// Bytes of a slab with `rows` rows.
int64_t slab_bytes(Format format, int64_t k, int64_t rows);
// Bytes from the first slab of a weight to its end.
int64_t packed_bytes(const Weight& packed);
// Packs `rows`, a weight in the layout of the file, into slabs that begin slab_stride bytes apart.
void pack_weight(const Weight& rows, uint8_t* to, int64_t slab_stride);
// Unpacks 32 rows of a packed weight, beginning at `row`, a multiple of 32; rows beyond the last one are zeros.
void unpack_group(const Weight& packed, int64_t row, uint8_t* to);
// Unpacks one row.
void unpack_row(const Weight& packed, int64_t row, uint8_t* to);

}  // namespace qtensor
