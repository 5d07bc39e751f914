// Tile instructions that do nothing, for measuring the other costs of the AMX kernels on any machine with AVX-512
// (tile_costs.cpp). Results are meaningless.
#pragma once

#include <immintrin.h>

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_release
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#undef _tile_dpbf16ps
#define QTENSOR_SKIPPED_TILE __asm__ volatile("" ::: "memory")
#define QTENSOR_LOAD_TILE_CONFIG(config) (void)config
#define _tile_zero(to) QTENSOR_SKIPPED_TILE
#define _tile_loadd(to, from, stride) QTENSOR_SKIPPED_TILE
#define _tile_stored(from, to, stride) QTENSOR_SKIPPED_TILE
#define _tile_release() QTENSOR_SKIPPED_TILE
#define _tile_dpbssd(sum, a, b) QTENSOR_SKIPPED_TILE
#define _tile_dpbsud(sum, a, b) QTENSOR_SKIPPED_TILE
#define _tile_dpbusd(sum, a, b) QTENSOR_SKIPPED_TILE
#define _tile_dpbuud(sum, a, b) QTENSOR_SKIPPED_TILE
#define _tile_dpbf16ps(sum, a, b) QTENSOR_SKIPPED_TILE
