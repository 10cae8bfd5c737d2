// Configures the tiles by ggml's function, whose text the test writes into function.h.

#include "tiles.h"

#include <immintrin.h>

#include "function.h"

int main() {
    tiles::install();
    ggml_tile_config_init();
    for (int i = 0; i < 8; ++i) {
        std::printf("%d %d\n", tiles::now.n_rows[i], tiles::now.n_bytes[i]);
    }
}
