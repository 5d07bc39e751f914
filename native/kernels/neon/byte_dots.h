// Sums of products for attention over bytes (generic/byte_dots.h says which), by the registers of byte_words.h.
#pragma once

#include "byte_words.h"
#include "kernels/portable/word_dots.h"
