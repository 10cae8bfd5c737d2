#include "cache/h2o-host-rows.h"

#include "kernels/h2o-row-types.h"

#include "ggml-backend.h"

#include <cstring>

llama_h2o_host_rows::llama_h2o_host_rows(ggml_tensor * tensor, uint32_t stream, void * space) :
    tensor(tensor), offset(stream * tensor->nb[2]), size(tensor->nb[1] * tensor->ne[1]) {
    if (ggml_backend_buffer_is_host(tensor->buffer)) {
        bytes = static_cast<uint8_t *>(tensor->data) + offset;
        return;
    }

    copy.resize(space ? 0 : size);
    bytes = space ? static_cast<uint8_t *>(space) : copy.data();
    ggml_backend_tensor_get(tensor, bytes, offset, size);
}

void llama_h2o_host_rows::commit() {
    if (!ggml_backend_buffer_is_host(tensor->buffer)) {
        ggml_backend_tensor_set(tensor, bytes, offset, size);
    }
}

// Element by element, so that all moves of an element hit the processor cache.
template <typename T>
static void move_transposed(T * rows, uint32_t n_rows, uint32_t n_cells, const std::vector<llama_h2o_move> & moves) {
    for (uint32_t i = 0; i < n_rows; ++i) {
        T * row = rows + size_t(i) * n_cells;
        for (const auto & move : moves) {
            row[move.dst] = row[move.src];
        }
    }
}

void llama_h2o_move_rows(
        uint8_t * data, const llama_h2o_row_layout & layout, uint32_t head, const std::vector<llama_h2o_move> & moves) {
    if (layout.transposed) {
        const size_t first = size_t(head) * layout.n_embd_head * layout.n_cells;
        if (ggml_type_size(layout.type) == sizeof(uint16_t)) {
            move_transposed(reinterpret_cast<uint16_t *>(data) + first, layout.n_embd_head, layout.n_cells, moves);
        } else {
            move_transposed(reinterpret_cast<uint32_t *>(data) + first, layout.n_embd_head, layout.n_cells, moves);
        }
        return;
    }

    const size_t size_row  = ggml_row_size(layout.type, layout.n_embd_head);
    const size_t size_cell = ggml_row_size(layout.type, layout.n_embd);

    uint8_t * rows = data + head * size_row;
    for (const auto & move : moves) {
        std::memcpy(rows + move.dst * size_cell, rows + move.src * size_cell, size_row);
    }
}

// Calls fn(offset, element, n) for each contiguous part of a row: the whole row, or one element at a time.
template <typename F>
static void for_each_piece(const llama_h2o_row_layout & layout, uint32_t head, uint32_t cell, F fn) {
    if (!layout.transposed) {
        fn(ggml_row_size(layout.type, layout.n_embd) * cell + ggml_row_size(layout.type, layout.n_embd_head) * head, 0,
                layout.n_embd_head);
        return;
    }

    const size_t first = size_t(head) * layout.n_embd_head;
    for (uint32_t i = 0; i < layout.n_embd_head; ++i) {
        fn(((first + i) * layout.n_cells + cell) * ggml_type_size(layout.type), i, 1);
    }
}

void llama_h2o_cell_rows::read(uint32_t head, uint32_t cell, float * row) const {
    for_each_piece(layout, head, place(cell), [&](size_t offset, uint32_t i, uint32_t n) {
        llama_h2o_to_floats(layout.type, bytes + offset, row + i, n);
    });
}

void llama_h2o_cell_rows::write(uint32_t head, uint32_t cell, const float * row) {
    for_each_piece(layout, head, place(cell), [&](size_t offset, uint32_t i, uint32_t n) {
        llama_h2o_from_floats(layout.type, row + i, bytes + offset, n);
    });
}

llama_h2o_cell_rows::llama_h2o_cell_rows(const llama_h2o_graph_runner & graphs,
        ggml_tensor * tensor,
        const llama_h2o_row_layout & layout,
        uint32_t stream,
        const std::vector<uint32_t> & wanted) :
    tensor(tensor), offset(stream * tensor->nb[2]), layout(layout),
    size_row(ggml_row_size(layout.type, layout.n_embd_head)), size_cell(ggml_row_size(layout.type, layout.n_embd)) {
    const bool on_host = ggml_backend_buffer_is_host(tensor->buffer);

    places.resize(on_host ? 0 : layout.n_cells, -1);
    for (size_t i = 0; i < wanted.size() && !on_host; ++i) {
        int32_t & place = places[wanted[i]];
        if (place < 0) {
            place = int32_t(cells.size());
            cells.push_back(int32_t(wanted[i]));
        }
    }
    if (on_host || layout.transposed || size_cell % sizeof(int32_t) != 0 || 2 * cells.size() > layout.n_cells) {
        all.emplace(tensor, stream);
        bytes = all->data();
        return;
    }
    if (cells.empty()) {
        return;
    }

    llama_h2o_cache_graph graph(1);
    ggml_context * ctx = graph.get_ctx();

    // head by head if possible: ggml's Vulkan backend ignores words of a row after the 512th
    const uint32_t n = size_row % sizeof(int32_t) == 0 ? layout.n_embd / layout.n_embd_head : 1;

    // copied bitwise as 4-byte integers
    ggml_tensor * rows = ggml_view_2d(ctx, tensor, layout.n_embd / n, layout.n_cells * n, size_cell / n, offset);
    rows->type         = GGML_TYPE_I32;
    rows->nb[0]        = sizeof(int32_t);
    rows->ne[0]        = int64_t(size_cell / n / sizeof(int32_t));

    std::vector<int32_t> parts;
    for (const int32_t cell : cells) {
        for (uint32_t i = 0; i < n; ++i) {
            parts.push_back(int32_t(cell * n + i));
        }
    }

    ggml_tensor * list = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, int64_t(parts.size()));
    ggml_set_input(list);
    graph.lists[list] = parts;
    graph.add_result(ggml_get_rows(ctx, rows, list));

    copy  = graphs.run(graph).front();
    bytes = reinterpret_cast<uint8_t *>(copy.data());
}

void llama_h2o_cell_rows::commit() {
    if (all) {
        all->commit();
    }
    for (size_t i = 0; i < cells.size() && !all; ++i) {
        ggml_backend_tensor_set(tensor, bytes + i * size_cell, offset + cells[i] * size_cell, size_cell);
    }
}

void llama_h2o_copy_cells(ggml_tensor * dst,
        const llama_h2o_row_layout & dst_layout,
        ggml_tensor * src,
        const llama_h2o_row_layout & src_layout,
        uint32_t stream,
        const std::vector<uint32_t> & cells) {
    llama_h2o_host_rows to(dst, stream);
    llama_h2o_host_rows from(src, stream);

    // a transposed tensor has one row per element, and one column per cell
    const size_t n_rows = dst_layout.transposed ? dst_layout.n_embd : 1;
    const size_t size =
            dst_layout.transposed ? ggml_type_size(dst_layout.type) : ggml_row_size(dst_layout.type, dst_layout.n_embd);

    for (size_t row = 0; row < n_rows; ++row) {
        for (size_t i = 0; i < cells.size(); ++i) {
            std::memcpy(to.data() + (row * dst_layout.n_cells + i) * size,
                    from.data() + (row * src_layout.n_cells + cells[i]) * size, size);
        }
    }

    to.commit();
}
