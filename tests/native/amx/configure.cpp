// Configures the tiles by ggml's function, whose text the test writes into function.h, and prints what they are then.

#include "tiles.h"

#include <immintrin.h>

#include "function.h"

int main() {
    tiles::install_if_needed();
    ggml_tile_config_init();

    tiles::config c;
    _tile_storeconfig(&c);
    asm volatile("" : : "r"(&c) : "memory"); // GCC believes that it writes 8 bytes

    for (int i = 0; i < 8; ++i) {
        std::printf("%d %d\n", c.n_rows[i], c.n_bytes[i]);
    }
}
