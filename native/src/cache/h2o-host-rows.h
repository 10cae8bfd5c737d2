// Rows where they lie: host access to a stream of a cache tensor, and moving rows inside it.

#pragma once

#include "ggml.h"

#include "cache/h2o-plan.h"

#include <cstdint>
#include <vector>

// One stream of a cache tensor, to be read and written by the host: in place where the buffer is in
// host memory, else in a copy that commit() writes back.
class llama_h2o_host_rows {
public:
    //   tensor  [*, *, n_stream], contiguous but for the streams
    //   space   for the copy; or null
    llama_h2o_host_rows(ggml_tensor * tensor, uint32_t stream, void * space = nullptr);

    uint8_t * data() { return bytes; }
    float * f32() { return reinterpret_cast<float *>(bytes); }

    void commit();

private:
    ggml_tensor * tensor;
    size_t offset;
    size_t size;
    std::vector<uint8_t> copy; // empty if the tensor is in host memory, or if there is space for it
    uint8_t * bytes;
};

// How the rows of the KV heads lie in one stream of a K or V tensor.
struct llama_h2o_row_layout {
    ggml_type type;
    uint32_t n_embd_head; // elements of a row
    uint32_t n_embd;      // elements of a cell: all KV heads of the layer
    uint32_t n_cells;
    bool transposed; // V without flash attention: [n_cells] for every element of a cell
};

// One row as floats, [n_embd_head]; written with one rounding to the type of the tensor.
void llama_h2o_read_row(
        const uint8_t * data, const llama_h2o_row_layout & layout, uint32_t head, uint32_t cell, float * row);
void llama_h2o_write_row(
        uint8_t * data, const llama_h2o_row_layout & layout, uint32_t head, uint32_t cell, const float * row);

// The rows of some cells, to be read by the host: in place where the buffer is in host memory, else in a copy of the cells
// from the first of these to the last.
class llama_h2o_cell_rows {
public:
    // tensor [*, *, n_stream], contiguous; with at least one cell
    llama_h2o_cell_rows(const ggml_tensor * tensor,
            const llama_h2o_row_layout & layout,
            uint32_t stream,
            const std::vector<uint32_t> & cells);

    // all heads of a cell, where they are not transposed
    const uint8_t * at(uint32_t cell) const {
        return bytes + ggml_row_size(layout.type, layout.n_embd) * (cell - first_cell);
    }

    // [n_embd_head]
    void read(uint32_t head, uint32_t cell, float * row) const {
        llama_h2o_read_row(bytes, layout, head, cell - first_cell, row);
    }

private:
    const llama_h2o_row_layout & layout;
    uint32_t first_cell = 0;
    std::vector<uint8_t> copy; // empty if the tensor is in host memory
    const uint8_t * bytes;
};

// Copies cells of a stream, all KV heads, to the first cells of another tensor.
void llama_h2o_copy_cells(ggml_tensor * dst,
        const llama_h2o_row_layout & dst_layout,
        ggml_tensor * src,
        const llama_h2o_row_layout & src_layout,
        uint32_t stream,
        const std::vector<uint32_t> & cells);

// Copies, in order, the rows of one KV head from cell to cell. Sources and destinations are distinct.
void llama_h2o_move_rows(
        uint8_t * data, const llama_h2o_row_layout & layout, uint32_t head, const std::vector<llama_h2o_move> & moves);
