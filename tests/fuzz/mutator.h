// What the custom mutators of the fuzz targets share.

#pragma once

#include "program.h"

#include <cstddef>
#include <cstdint>

// Changes an input by libFuzzer's own means, or a few of its numbers.
//   n_front      bytes in front that choose what is done with the rest
//   begin_of     where numbers are, for the data and its size: they are changed most often near that place
size_t mutate(uint8_t * data,
        size_t size,
        size_t max_size,
        unsigned seed,
        size_t n_front,
        size_t (*begin_of)(const uint8_t * data, size_t size, random_numbers & random));
