// The AMX kernels without tile instructions, for measuring the remaining time.
#include "skipped_tiles.h"

#define kAmxKernels kAmxSkippedKernels
#define kAmxKernelsWithMins kAmxSkippedKernelsWithMins
#define QTENSOR_TABLE_NAME "amx without tiles"
#include "kernels/amx/table.cpp"
#include "kernels/amx/tiles_with_mins.cpp"
