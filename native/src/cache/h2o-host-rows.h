// Host access to the rows of one stream of a cache tensor, and moving rows within it.

#pragma once

#include "ggml.h"

#include "cache/h2o-cache-graph.h"
#include "cache/h2o-plan.h"

#include <cstdint>
#include <optional>
#include <vector>

// One stream of a cache tensor, read and written by the host: in place if the buffer is in host memory, otherwise in a copy
// that commit() writes back.
class llama_h2o_host_rows {
public:
    //   tensor  [*, *, n_stream], each stream contiguous
    //   space   memory for the copy; may be null
    llama_h2o_host_rows(ggml_tensor * tensor, uint32_t stream, void * space = nullptr);

    uint8_t * data() { return bytes; }
    float * f32() { return reinterpret_cast<float *>(bytes); }

    void commit();

private:
    ggml_tensor * tensor;
    size_t offset;
    size_t size;
    std::vector<uint8_t> copy; // empty if the tensor is in host memory, or if the caller passed space
    uint8_t * bytes;
};

// Memory layout of the rows in one stream of a K or V tensor.
struct llama_h2o_row_layout {
    ggml_type type;
    uint32_t n_embd_head; // elements of a row
    uint32_t n_embd;      // elements of a cell: all KV heads of the layer
    uint32_t n_cells;
    bool transposed; // V without flash attention: [n_cells] for every element of a cell
};

// Layout of scores or squares, [n_cells, n_head_kv, n_stream].
inline llama_h2o_row_layout llama_h2o_layout_of_sums(const ggml_tensor * sums) {
    return { GGML_TYPE_F32, 1, uint32_t(sums->ne[1]), uint32_t(sums->ne[0]), true };
}

// The rows of some cells, read and written by the host: in place if the buffer is in host memory, otherwise in a copy that
// commit() writes back. If the cells are few, only these are copied.
class llama_h2o_cell_rows {
public:
    // tensor [*, *, n_stream], contiguous
    llama_h2o_cell_rows(const llama_h2o_graph_runner & graphs,
            ggml_tensor * tensor,
            const llama_h2o_row_layout & layout,
            uint32_t stream,
            const std::vector<uint32_t> & cells);

    // only if the layout is not transposed
    uint8_t * at(uint32_t head, uint32_t cell) { return bytes + size_cell * place(cell) + size_row * head; }

    // One row as floats, [n_embd_head]; write() rounds once to the type of the tensor.
    void read(uint32_t head, uint32_t cell, float * row) const;
    void write(uint32_t head, uint32_t cell, const float * row);

    void commit();

private:
    ggml_tensor * tensor;
    size_t offset; // of the stream
    const llama_h2o_row_layout & layout;
    size_t size_row;
    size_t size_cell;

    std::optional<llama_h2o_host_rows> all; // the whole stream; otherwise:
    std::vector<int32_t> cells;             // the cells in the copy
    std::vector<int32_t> places;            // [n_cells] index in the copy
    std::vector<float> copy;
    uint8_t * bytes = nullptr;

    uint32_t place(uint32_t cell) const { return all ? cell : uint32_t(places[cell]); }
};

// Copies cells of a stream, with all KV heads, to the first cells of another tensor.
void llama_h2o_copy_cells(ggml_tensor * dst,
        const llama_h2o_row_layout & dst_layout,
        ggml_tensor * src,
        const llama_h2o_row_layout & src_layout,
        uint32_t stream,
        const std::vector<uint32_t> & cells);

// Copies the rows of one KV head from cell to cell, in order. Sources and destinations are disjoint.
void llama_h2o_move_rows(
        uint8_t * data, const llama_h2o_row_layout & layout, uint32_t head, const std::vector<llama_h2o_move> & moves);
