// Configures tiles with ggml's function, which the test writes to function.h, and prints the loaded bytes. The load needs no AMX:
// it copies its input, and declares as little to the compiler as GCC's intrinsic before 12.4.

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
