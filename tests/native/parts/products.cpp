// The products of the installed library for ctypes.

#include "products/h2o-product.h"

#include <vector>

extern "C" {

// rows per panel, or 0 if this processor does not have the kernel
uint32_t lanes_of(const char * name) {
    const llama_h2o_product_kernel * kernel = llama_h2o_find_product(name);

    return kernel ? kernel->n_lanes : 0;
}

// sizes: n_blocks, n_rows, n_tokens, and the panels [begin, end). out is [n_tokens][n_rows].
void multiply(const char * name, const uint32_t * sizes, const char * weights, const char * inputs, float * out) {
    llama_h2o_product p = {};

    p.n_blocks = sizes[0];
    p.n_rows   = sizes[1];
    p.n_tokens = sizes[2];
    p.nb_row   = p.n_blocks * sizeof(llama_h2o_q4_1);
    p.nb_out   = p.n_rows * sizeof(float);
    p.weights  = weights;
    p.inputs   = reinterpret_cast<const llama_h2o_q8_1 *>(inputs);
    p.out      = reinterpret_cast<char *>(out);

    std::vector<float> scales(size_t(2) * p.n_blocks * p.n_tokens);
    p.scales = scales.data();

    const llama_h2o_product_kernel * kernel = llama_h2o_find_product(name);
    kernel->read_scales(p);
    kernel->multiply(p, sizes[3], sizes[4]);
}
}
