#include "mutator.h"

#include <algorithm>
#include <cstring>
#include <iterator>

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

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

// Changes a number of 1, 4 or 8 bytes at or after data[first], most often close to it: the numbers that a parser reads are at
// the front, and random offsets would rarely reach them among the rows.
static void change_number(uint8_t * data, size_t first, size_t size, random_numbers & random) {
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

size_t mutate(uint8_t * data,
        size_t size,
        size_t max_size,
        unsigned seed,
        size_t n_front,
        size_t (*begin_of)(const uint8_t * data, size_t size, random_numbers & random)) {
    random_numbers random(seed);

    if (size <= n_front || random.next(8) == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    if (random.next(6) == 0) {
        data[random.next(uint32_t(n_front))] = uint8_t(random.next(256));
    }
    for (uint32_t n = 1 + random.next(3); n > 0; --n) {
        change_number(data, std::min(begin_of(data, size, random), size), size, random);
    }

    return size;
}
