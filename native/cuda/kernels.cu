// All entry points; the only file that nvcc compiles.
#include "cuda/byte_attention.h"
#include "cuda/embed.h"
#include "cuda/half_attention.h"
#include "cuda/one_row.h"
#include "cuda/prepare.h"
#include "cuda/rows.h"
#include "cuda/store.h"
