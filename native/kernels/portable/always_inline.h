// For functions that compilers would not inline, but for which a call is too slow or moves registers to memory.
#pragma once

#define QTENSOR_INLINE inline __attribute__((always_inline))
