// For what costs too much as a call, or keeps registers in memory around it, and what a compiler would not inline.
#pragma once

#define QTENSOR_INLINE inline __attribute__((always_inline))
