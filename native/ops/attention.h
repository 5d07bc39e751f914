// The two steps that touch the cache: storing new keys and values, and attention over what is stored.
#pragma once

#include <cstdint>

#include "cache_format.h"
#include "ops/program.h"

namespace qtensor {

// Where rows of a batch stand: row i continues sequences[i] at positions[i]; tables[s][t] is the pool block that holds
// positions [128 t, 128 t + 128) of sequence s.
struct RowPlaces {
  const int32_t* positions;
  const int32_t* sequences;
  const int32_t* tables;
  int64_t rows, table_count, table_length;
};
// Blocks of kv_heads heads each, as cache_format.h lays them out.
struct KeyValuePool {
  uint8_t* data;
  int64_t blocks, run, kv_heads, dim;  // run: blocks whose heads lie together, see cache_format.h
  CacheFormat format;
};
// Below 8 bits a second pool, of 8 bits, holds the first tile of a sequence and the one it is writing; its tables have
// the shape of the others. In both, -1 says that a tile is not there.
struct WindowTiles {
  const int32_t* tables;  // null: the pool has 8 bits or more
  KeyValuePool pool;
};

// Keys and values go to both pools where both have a block for the tile, and must find one.
Step store_key_values(const float* k, const float* v, RowPlaces places, KeyValuePool pool, WindowTiles window);
// A row at position p reads its tiles from the pool; with window tiles, tile 0 and tile p / 128 from those.
Step attention(const float* q, int64_t heads, RowPlaces places, KeyValuePool pool, WindowTiles window, float scale,
               float* out);

}  // namespace qtensor
