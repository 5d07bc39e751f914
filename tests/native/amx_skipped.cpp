// The AMX kernels without their tiles, to be timed.
#include "skipped_tiles.h"

#define kAmxKernels kAmxSkippedKernels
#define amx_tiles_q4_k amx_tiles_q4_k_skipped
#define amx_tiles_q5_k amx_tiles_q5_k_skipped
#define QTENSOR_TABLE_NAME "amx without tiles"
#include "kernels/amx/table.cpp"
#include "kernels/amx/tiles_with_mins.cpp"
