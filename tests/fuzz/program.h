// Helpers of the fuzz targets.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

using bytes = std::vector<uint8_t>;

// Ends the program if a condition is false, so that libFuzzer keeps the input.
void expect(bool holds, const char * what);

// Random numbers, the same on every machine.
class random_numbers {
public:
    explicit random_numbers(uint64_t seed) : state(seed) {}

    // 0 <= number < n
    uint32_t next(uint32_t n) {
        state = state * 6364136223846793005 + 1442695040888963407;

        return uint32_t((state >> 33) % n);
    }

private:
    uint64_t state;
};
