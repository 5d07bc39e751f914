// The two steps that use the cache: storing new keys and values, and attention.
#pragma once

#include <cstdint>

#include "cache_format.h"
#include "ops/program.h"

namespace qtensor {

// The places of batch rows: row i is at positions[i] of sequences[i]. tables[s][t] is the pool block that holds
// positions [128 t, 128 t + 128) of sequence s.
struct RowPlaces {
  const int32_t* positions;
  const int32_t* sequences;
  const int32_t* tables;
  int64_t rows, table_count, table_length;
};
// Blocks of kv_heads heads each, in the layout of cache_format.h.
struct KeyValuePool {
  uint8_t* data;
  int64_t blocks, run, kv_heads, dim;  // run: blocks per run, see cache_format.h
  CacheFormat format;
};
// For formats below 8 bits, a second pool (k8v8) holds the first tile of each sequence and the tile being written. Its
// tables have the same shape. In both tables, -1 means that the tile is not in the pool.
struct WindowTiles {
  const int32_t* tables;  // null: the pool has 8 bits or more
  KeyValuePool pool;
};

// Stores keys and values in each pool that has a block for the tile. Throws if neither has one.
Step store_key_values(const float* k, const float* v, RowPlaces places, KeyValuePool pool, WindowTiles window);
// A row at position p reads its tiles from the pool. With window tiles, it reads tiles 0 and p / 128 from their pool.
Step attention(const float* q, int64_t heads, RowPlaces places, KeyValuePool pool, WindowTiles window, float scale,
               float* out);

}  // namespace qtensor
