// Sums of products for attention over bytes (specified in generic/byte_dots.h), with the registers of byte_words.h.
#pragma once

#include "byte_words.h"
#include "kernels/portable/word_dots.h"
