// A file that is read as memory, while memory runs out, for ctypes.

#include "recall/h2o-archive-map.h"

#include <cstdint>
#include <cstdlib>
#include <new>

static int64_t n_left = -1; // allocations before one fails; none does where it is negative

void * operator new(size_t size) {
    void * data = n_left >= 0 && n_left-- == 0 ? nullptr : malloc(size);
    if (data == nullptr) {
        throw std::bad_alloc();
    }

    return data;
}

void operator delete(void * data) noexcept {
    free(data);
}

void operator delete(void * data, size_t) noexcept {
    free(data);
}

extern "C" {

// Opens a file, reads it as memory and closes it; whether that failed for want of the allocation with this number, from 0.
int32_t mapped_file_fails(const char * path, int64_t number) {
    bool has_failed = false;

    n_left = number;
    try {
        llama_h2o_mapped_file file(path);
        file.map(0, 1);
        file.map(0, 1);
    } catch (const std::bad_alloc &) {
        has_failed = true;
    }
    n_left = -1;

    return has_failed;
}
}
