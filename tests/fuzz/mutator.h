// The custom mutator of the fuzz targets.

#pragma once

#include "program.h"

#include <cstddef>
#include <cstdint>

// Changes an input with libFuzzer's mutator, or some of its numbers.
//   n_front      selecting bytes at the front
//   begin_of     returns an offset of numbers, close to which most changes are made
size_t mutate(uint8_t * data,
        size_t size,
        size_t max_size,
        unsigned seed,
        size_t n_front,
        size_t (*begin_of)(const uint8_t * data, size_t size, random_numbers & random));
