// The scan of the installed library for ctypes.

#include "kernels/h2o-scan.h"

#include "kernels/h2o-kernel.h"

#include <cmath>
#include <vector>

extern "C" {

// elements that rows have to be a multiple of, or 0 if there is no such kernel on this machine
uint32_t lanes_of(const char * name) {
    const llama_h2o_kernel * kernel = llama_h2o_find_kernel(name);

    return kernel ? kernel->n_lanes : 0;
}

// sizes: n_embd, n_rows, n_keys, n_turn_dims, turn_neox, n_mix. Queries are [n_rows][n_embd]; first_row, turn and mix
// may be null.
void scan(const char * name,
        const uint32_t * sizes,
        int type,
        float scale,
        float cap,
        const float * queries,
        const char * keys,
        size_t nb_row,
        const uint32_t * first_row,
        const float * turn,
        const float * mix,
        float * max,
        float * sum) {
    llama_h2o_scan s = {};

    s.n_embd      = sizes[0];
    s.n_rows      = sizes[1];
    s.n_keys      = sizes[2];
    s.n_turn_dims = sizes[3];
    s.turn_neox   = sizes[4];
    s.n_mix       = sizes[5];

    // a number that nobody has written is not zero by chance
    std::vector<float> arranged(llama_h2o_arranged_size(s.n_rows, s.n_embd), NAN);
    std::vector<float> work(llama_h2o_scan_work_size(s.n_rows, s.n_embd), NAN);
    llama_h2o_arrange_queries(queries, s.n_rows, s.n_embd, scale, arranged.data());

    s.queries   = arranged.data();
    s.cap       = cap;
    s.type      = ggml_type(type);
    s.keys      = keys;
    s.nb_row    = nb_row;
    s.first_row = first_row;
    s.turn      = turn;
    s.mix       = mix;
    s.max       = max;
    s.sum       = sum;
    s.work      = work.data();

    llama_h2o_find_kernel(name)->scan(s);
}
}
