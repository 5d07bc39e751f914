// The AMX kernels without their tiles, to be timed.
#include "skipped_tiles.h"

#define kAmxKernels kAmxSkippedKernels
#define kAmxKernelsWithMins kAmxSkippedKernelsWithMins
#define QTENSOR_TABLE_NAME "amx without tiles"
#include "kernels/amx/table.cpp"
#include "kernels/amx/tiles_with_mins.cpp"
