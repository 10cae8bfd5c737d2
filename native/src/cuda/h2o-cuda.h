// Our kernels in the CUDA backend. For ggml our ops are custom ops, which only the CPU can run. The CUDA backend gets the function
// pointers of these ops and launches our kernels instead.

#pragma once

#include "kernels/h2o-kernel.h"
#include "kernels/h2o-search.h"

#include "ggml.h"

#include <algorithm>
#include <array>
#include <cstdint>

// Adds probabilities to the scores of one layer. Strides are in bytes.
struct llama_h2o_sum {
    llama_h2o_attention::operand probs;  // F32 [n_kv, n_tokens, n_head, n_stream]
    llama_h2o_attention::operand credit; // F32 [n_kv, n_tokens, 1, n_stream], their weights; may be null

    float * sums; // [n_kv, n_head_kv, n_stream]
    size_t nb_sum_head;
    size_t nb_sum_stream;

    uint32_t n_kv;
    uint32_t n_tokens;
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t n_stream;

    constexpr uint32_t n_pairs() const { return n_stream * n_head_kv; } // (stream, KV head)
};

// Chooses the rows to keep in the layers of a device, for one stream: those with the highest sum / divisor of their age.
struct llama_h2o_device_choice {
    const float * sums;      // [n_heads][n_cells]
    const double * divisors; // [n_ages] by the number of queries that could attend to a row; the last one for more
    const int32_t * pos; // [n_heads][n_cells] of competing rows, or a constant below; then n_keep and the next position
    uint32_t * bits;     // [n_heads][n_words + 1] of kept cells; the last word: whether a sum is NaN

    uint32_t n_cells;
    uint32_t n_heads;
    uint32_t n_ages;

    constexpr uint32_t n_words() const { return (n_cells + 31) / 32; }
};

// values of pos for other rows
constexpr int32_t LLAMA_H2O_DEVICE_SAFE   = -1; // always kept
constexpr int32_t LLAMA_H2O_DEVICE_UNUSED = -2; // no row

// Rotates keys of a layer in place.
struct llama_h2o_key_rotations {
    char * keys;
    ggml_type type;
    size_t nb_row;
    uint32_t n_embd;
    uint32_t n_mix; // block size of the Hadamard transform of keys; 0: none

    llama_h2o_rotation how;
    const float * factors; // [.][2][n_dims], see h2o-rotation.h

    const int32_t * rows;      // [n] indices of keys
    const int32_t * rotations; // [n] indices of their factors
    uint32_t n;
};

// Writes rows of consecutive tokens of a layer to the archive, where K and V of a token are adjacent.
struct llama_h2o_archived_rows {
    struct source {
        const char * data;
        ggml_type type;
        size_t nb_cell;
        size_t nb_head;
        uint32_t n_embd;
        uint64_t offset; // in an archived row
    };

    source k;
    source v;

    uint32_t n_mix; // block size of the Hadamard transform of keys; 0: none
    llama_h2o_rotation how;
    const float * factors;     // [.][2][n_dims]
    const int32_t * rotations; // [n_head_kv][n_tokens] index of the factors, or -1
    const int32_t * cells;     // [n_tokens]

    char * const * pages; // in host memory, from the page of the first token on
    uint64_t offset;      // of the first head's rows in a page
    uint64_t stride;      // from head to head
    ggml_type type;
    size_t nb_row;

    const int32_t * first; // position; a pointer, because CUDA graphs keep the arguments of a kernel
    uint32_t n_tokens;
    uint32_t n_head_kv;
};

// The work space of attention on the device, in floats. The cells are split into parts, one per block.
struct llama_h2o_cuda_workspace {
    // over all KV heads: more than any device runs at once
    static constexpr uint32_t MAX_BLOCKS = 1024;
    // Maximum queries of a KV head per block. If there are more, several blocks read the same cells.
    static constexpr uint32_t MAX_ROWS = 8;
    // Cells that a block reads at a time, the minimum size of a part.
    static constexpr uint32_t N_CELLS = 128;

    uint32_t n_groups;
    uint32_t n_parts;

    size_t logits = 0; // [n_pairs][n_rows][n_kv]
    size_t shares;     // [n_pairs][n_rows][n_parts][n_embd_head_v]
    size_t maxima;     // [n_pairs][n_rows][n_parts]
    size_t sums;       // the same, of exp(logit - maximum)
    size_t retrieved; // [n_stream][n_tokens][n_head][n_embd_head_v + 1] as in llama_h2o_kernel::alongside, with an archive
    size_t size;      // of all above

    constexpr explicit llama_h2o_cuda_workspace(const llama_h2o_attention & a) :
        n_groups((a.n_rows() + MAX_ROWS - 1) / MAX_ROWS),
        n_parts(std::clamp(a.n_slots / (a.n_pairs() * n_groups), 1u, (a.n_kv + N_CELLS - 1) / N_CELLS)),
        shares(size_t(a.n_pairs()) * a.n_rows() * a.n_kv),
        maxima(shares + place(a.n_pairs() * a.n_rows(), 0) * a.n_embd_head_v),
        sums(maxima + place(a.n_pairs() * a.n_rows(), 0)), retrieved(sums + place(a.n_pairs() * a.n_rows(), 0)),
        size(retrieved + (a.search ? size_t(a.n_pairs()) * a.n_rows() * (a.n_embd_head_v + 1) : 0)) {}

    // index by query, over all heads and streams, and part
    constexpr size_t place(uint32_t row, uint32_t part) const { return size_t(row) * n_parts + part; }
};

// The log-sum-exp of each query, per part of the cells. The number of parts keeps a large device busy.
struct llama_h2o_cuda_lse {
    static constexpr uint32_t N_ROWS   = 128; // queries of a KV head per block
    static constexpr uint32_t N_BLOCKS = 264; // target number of blocks

    uint32_t n;       // queries of all heads and streams
    uint32_t n_parts; // the first part has the place of the result
    uint32_t n_cells; // per part, except the last

    constexpr explicit llama_h2o_cuda_lse(const llama_h2o_attention & a) :
        n(a.n_pairs() * a.n_rows()),
        n_parts(std::clamp(N_BLOCKS / (a.n_pairs() * n_blocks(a)), 1u, a.n_kv / LLAMA_H2O_TILE)),
        n_cells((a.n_kv / LLAMA_H2O_TILE + n_parts - 1) / n_parts * LLAMA_H2O_TILE) {}

    // per KV head
    static constexpr uint32_t n_blocks(const llama_h2o_attention & a) { return (a.n_rows() + N_ROWS - 1) / N_ROWS; }
};

// The work space of search and attention to retrieved rows, in floats, after that of the cells or alone. Queries of a KV head that
// search together have a block: [n_pairs][n_groups].
struct llama_h2o_cuda_search_space {
    static constexpr uint32_t N_TILE = 32; // retrieved rows that are read at a time

    bool is_alongside;    // alone, as in llama_h2o_kernel::alongside; the result precedes the work space
    uint32_t n_asking;    // maximum queries that search together
    uint32_t n_groups;    // groups of these, per KV head
    uint32_t n_blocks;    // groups of all KV heads
    uint32_t n_stride;    // between elements of the queries: n_asking, padded to vectors
    uint32_t n_parts;     // of the pages, in the search
    uint32_t n_retrieved; // retrieved rows per head, including those in focus
    uint32_t n_splits;    // of the retrieved rows, in attention

    size_t rows;    // [n_blocks][1 + n_retrieved] of 32 bits: number and indices
    size_t queries; // [n_blocks][n_embd_head_k][n_stride], without Hadamard transform
    size_t lse;     // [n_pairs][n_rows] of the cells
    size_t logits;  // [n_pairs][n_rows][n_retrieved]
    size_t shares;  // [n_blocks][n_splits][n_asking][n_embd_head_v]
    size_t maxima;  // [n_blocks][n_splits][n_asking]
    size_t sums;    // likewise, of exp(logit - maximum)
    size_t size;

    llama_h2o_cuda_search_space(const llama_h2o_attention & a, bool is_alongside) :
        is_alongside(is_alongside), n_asking(a.is_few() ? a.n_rows() : a.n_together() * a.n_group()),
        n_groups((a.n_rows() + n_asking - 1) / n_asking), n_blocks(a.n_pairs() * n_groups),
        n_stride(uint32_t(in_whole(n_asking))), n_parts(n_blocks >= 512 ? 1
                                                        : n_blocks <= 8 ? 64
                                                                        : 512 / n_blocks),
        n_retrieved((a.search->n_find + LLAMA_H2O_PASSAGE + N_TILE - 1) / N_TILE * N_TILE),
        n_splits(std::clamp(1024 / n_blocks, 1u, n_retrieved / N_TILE)),
        rows(is_alongside ? 0 : in_whole(llama_h2o_cuda_workspace(a).size)),
        queries(rows + in_whole(size_t(n_blocks) * (1 + n_retrieved))),
        lse(queries + size_t(n_blocks) * a.n_embd_head_k * n_stride), logits(lse + size_t(a.n_pairs()) * a.n_rows()),
        shares(logits + size_t(a.n_pairs()) * a.n_rows() * n_retrieved),
        maxima(shares + size_t(n_blocks) * n_splits * n_asking * a.n_embd_head_v),
        sums(maxima + size_t(n_blocks) * n_splits * n_asking), size(sums + size_t(n_blocks) * n_splits * n_asking) {}

private:
    // padded to four floats
    static constexpr size_t in_whole(size_t n) { return (n + 3) / 4 * 4; }
};

// maximum row size, and elements that are read at once
constexpr uint32_t LLAMA_H2O_CUDA_MAX_EMBD = 256;
constexpr uint32_t LLAMA_H2O_CUDA_ELEMENTS = 8;

constexpr bool llama_h2o_cuda_fits(int64_t n_embd) {
    return n_embd % LLAMA_H2O_CUDA_ELEMENTS == 0 && n_embd <= LLAMA_H2O_CUDA_MAX_EMBD;
}

// The custom ops with CUDA kernels.
enum llama_h2o_cuda_op {
    LLAMA_H2O_CUDA_ATTEND,
    LLAMA_H2O_CUDA_SEARCH, // for few queries, between ATTEND and COMBINE
    LLAMA_H2O_CUDA_COMBINE,
    LLAMA_H2O_CUDA_ALONGSIDE,
    LLAMA_H2O_CUDA_ADD,
    LLAMA_H2O_CUDA_LSE,
    LLAMA_H2O_CUDA_COLUMNS,
    LLAMA_H2O_CUDA_CHOOSE,
    LLAMA_H2O_CUDA_ROTATE,
    LLAMA_H2O_CUDA_ARCHIVE,
    LLAMA_H2O_CUDA_N_OPS,
};

// Function pointers of the ops, and functions that read their arguments from tensors.
struct llama_h2o_cuda_ops {
    std::array<ggml_custom_op_t, LLAMA_H2O_CUDA_N_OPS> funs;

    llama_h2o_attention (*read_attend)(const ggml_tensor * op, const void * userdata);  // also for LSE
    llama_h2o_attention (*read_combine)(const ggml_tensor * op, const void * userdata); // also for SEARCH
    llama_h2o_attention (*read_alongside)(const ggml_tensor * op, const void * userdata);
    llama_h2o_attention (*read_columns)(const ggml_tensor * op, const void * userdata);
    llama_h2o_sum (*read_add)(const ggml_tensor * op, const void * userdata);
    llama_h2o_device_choice (*read_choose)(const ggml_tensor * op);
    llama_h2o_key_rotations (*read_rotation)(const ggml_tensor * op, const void * userdata);
    llama_h2o_archived_rows (*read_archive)(const ggml_tensor * op, const void * userdata);
};

// name of llama_h2o_cuda_set_ops() in ggml_backend_reg_get_proc_address()
constexpr const char * LLAMA_H2O_CUDA_SET_OPS = "llama_h2o_cuda_set_ops";

using llama_h2o_cuda_set_ops_t = bool (*)(const llama_h2o_cuda_ops & ops);

//
// implemented in the CUDA backend
//

// Returns whether all devices have tensor cores, which LSE and COLUMNS need.
bool llama_h2o_cuda_set_ops(const llama_h2o_cuda_ops & ops);

bool llama_h2o_cuda_has_op(const ggml_tensor * op);

// stream: a cudaStream_t
void llama_h2o_cuda_compute(const ggml_tensor * op, void * stream);
