#include "kernels/h2o-scan.h"

#include "kernels/h2o-kernel.h"

// blocks of queries
static size_t n_query_blocks(uint32_t n_rows) {
    return (n_rows + LLAMA_H2O_BLOCK - 1) / LLAMA_H2O_BLOCK;
}

size_t llama_h2o_arranged_size(uint32_t n_rows, uint32_t n_embd) {
    return n_query_blocks(n_rows) * n_embd * LLAMA_H2O_BLOCK;
}

// Every block of queries is [n_embd][LLAMA_H2O_BLOCK]; columns without a query are 0.
void llama_h2o_arrange_queries(const float * queries, uint32_t n_rows, uint32_t n_embd, float scale, float * res) {
    for (size_t b = 0; b < n_query_blocks(n_rows); ++b) {
        for (uint32_t r = 0; r < LLAMA_H2O_BLOCK; ++r) {
            const size_t row = b * LLAMA_H2O_BLOCK + r;
            for (uint32_t i = 0; i < n_embd; ++i) {
                res[(b * n_embd + i) * LLAMA_H2O_BLOCK + r] = row < n_rows ? queries[row * n_embd + i] * scale : 0.0f;
            }
        }
    }
}

// the queries turned and mixed, a block of keys, and its logits for a block of queries
size_t llama_h2o_scan_work_size(uint32_t n_rows, uint32_t n_embd) {
    return 2 * llama_h2o_arranged_size(n_rows, n_embd) + size_t(LLAMA_H2O_SCAN_BLOCK) * (n_embd + LLAMA_H2O_BLOCK);
}
