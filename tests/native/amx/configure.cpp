// Configures tiles by ggml's function, whose text the test writes into function.h, and prints what was loaded.
// The load needs no AMX: it copies what it was given, and tells the compiler as little as GCC's before 12.4.

#include <cstdint>
#include <cstdio>

static uint8_t loaded[64];

static inline void _tile_loadconfig(const void * config) {
    void * to = loaded;
    long n    = sizeof(loaded);
    asm volatile("lea %2, %%rsi\n\trep movsb"
            : "+D"(to), "+c"(n)
            : "m"(*static_cast<const void * const *>(config))
            : "rsi");
}

#include "function.h"

int main() {
    ggml_tile_config_init();
    asm volatile("" : : : "memory");
    for (int i = 0; i < 8; ++i) {
        std::printf("%d %d\n", loaded[48 + i], loaded[16 + 2 * i]);
    }
}
