#include "mutator.h"

#include <algorithm>

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

size_t mutate(uint8_t * data,
        size_t size,
        size_t max_size,
        unsigned seed,
        size_t n_front,
        size_t (*begin_of)(const uint8_t * data, size_t size, random_numbers & random)) {
    static constexpr size_t NEAR = 800;

    random_numbers random(seed);
    if (size <= n_front || random.next(4) == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    if (random.next(6) == 0) {
        data[random.next(uint32_t(n_front))] = uint8_t(random.next(256));
    }
    // what a parser reads as numbers is in front, and would hardly be met among all the rows
    const size_t begin = std::min(begin_of(data, size, random), size - 1);
    const size_t n     = std::min(size - begin, NEAR);
    LLVMFuzzerMutate(data + begin, n, n);

    return size;
}
