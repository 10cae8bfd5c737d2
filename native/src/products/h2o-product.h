// Products of Q4_1 weights with many tokens on x86, for which ggml reads the weights once per token. Here the rows of a panel are
// unpacked once for all tokens, one row per lane of a vector.
//
// Sums over the blocks of a row have a fixed order, so results do not depend on the number of tokens and threads, nor on other
// texts in a batch.

#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_backend;

// as in ggml-common.h
struct llama_h2o_q4_1 {
    uint16_t d; // F16, as m: elements are q*d + m
    uint16_t m;
    uint8_t qs[16]; // element i in the low half, i + 16 in the high half of byte i
};

struct llama_h2o_q8_1 {
    uint16_t d;
    uint16_t s; // d * sum of qs
    int8_t qs[32];
};

constexpr uint32_t LLAMA_H2O_BLOCK_SIZE = 32;

struct llama_h2o_product {
    const char * weights;          // Q4_1 [n_blocks * 32, n_rows]
    const llama_h2o_q8_1 * inputs; // [n_blocks, n_tokens]
    float * scales;                // [2, n_blocks, n_tokens]: d and s of the inputs
    char * out;                    // F32 [n_rows, n_tokens]

    size_t nb_row; // bytes from row to row of the weights
    size_t nb_out; // bytes from token to token of the result

    uint32_t n_blocks;
    uint32_t n_rows;
    uint32_t n_tokens;
};

struct llama_h2o_product_kernel {
    const char * name;
    bool (*can_run)(); // whether this processor has its instructions
    uint32_t n_lanes;  // rows per panel, which divides the number of rows

    void (*read_scales)(const llama_h2o_product & p);
    void (*multiply)(const llama_h2o_product & p, uint32_t panel_begin, uint32_t panel_end);
};

// one per instruction set; null if the compiler does not support it
extern const llama_h2o_product_kernel * const llama_h2o_product_avx512vnni;
extern const llama_h2o_product_kernel * const llama_h2o_product_avx2;

// The kernel with this name, or null if this build or this processor does not have it. name = null: the best one.
const llama_h2o_product_kernel * llama_h2o_find_product(const char * name);

// Lets this backend compute products with our kernel where possible.
void llama_h2o_use_products(ggml_backend * backend_cpu);
