#include "program.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

// Of all the libraries, too: no flags are needed to repeat what was found.
extern "C" const char * __ubsan_default_options();
extern "C" const char * __ubsan_default_options() {
    return "halt_on_error=1:print_stacktrace=1:suppressions=" SUPPRESSIONS;
}

void expect(bool holds, const char * what) {
    if (!holds) {
        std::fprintf(stderr, "this does not hold: %s\n", what);
        std::abort();
    }
}

template <typename T>
static void change(uint8_t * place, const uint8_t * other, random_numbers & random) {
    static constexpr uint64_t NUMBERS[] = { 0, 1, 2, 63, 64, 65, 0x7fffffff, 0x80000000, 0xffffffff };

    T number;
    std::memcpy(&number, place, sizeof(number));
    switch (random.next(5)) {
        case 0:
            number = T(number + 1 + random.next(16));
            break;
        case 1:
            number = T(number - 1 - random.next(16));
            break;
        case 2:
            number = T(NUMBERS[random.next(std::size(NUMBERS))]);
            break;
        case 3:
            number = T(number ^ (uint64_t(1) << random.next(8 * sizeof(number))));
            break;
        default:
            std::memcpy(&number, other, sizeof(number));
    }
    std::memcpy(place, &number, sizeof(number));
}

void change_number(uint8_t * data, size_t first, size_t size, random_numbers & random) {
    static constexpr size_t NEAR = 800;

    if (size < first + sizeof(uint64_t)) {
        return;
    }

    const size_t n     = size - first - sizeof(uint64_t) + 1;
    const bool is_near = random.next(2) == 0;
    const size_t i     = random.next(uint32_t(is_near ? std::min(n, NEAR) : n)) & ~size_t(3);
    const size_t other = random.next(uint32_t(n)) & ~size_t(3);
    switch (random.next(4)) {
        case 0:
            change<uint8_t>(data + first + i + random.next(4), data + first + other, random);
            break;
        case 1:
            change<uint64_t>(data + first + i, data + first + other, random);
            break;
        default:
            change<uint32_t>(data + first + i, data + first + other, random);
    }
}
