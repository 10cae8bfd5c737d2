#include "cache/h2o-device-rows.h"

static uint32_t n_head_of(const llama_h2o_row_layout & layout) {
    return layout.n_embd / layout.n_embd_head;
}

static int64_t n_rows_of(const llama_h2o_row_layout & layout) {
    return int64_t(layout.n_cells) * n_head_of(layout);
}

// The rows of a stream, [., n_cells*n_head], the heads of a cell one after the other.
static ggml_tensor * view_rows(ggml_context * ctx, const llama_h2o_device_rows & rows) {
    const llama_h2o_row_layout & layout = rows.layout;

    const size_t size = ggml_row_size(layout.type, layout.n_embd_head);

    ggml_tensor * res = ggml_view_2d(ctx, rows.tensor, layout.n_embd_head, n_rows_of(layout), size, rows.offset);

    // as words of four bytes they are copied as they are, whatever they mean. Few types have rows that are no such
    // words, and all of these give the same bytes when a row is converted to floats and back
    if (size % sizeof(float) == 0) {
        res->type  = GGML_TYPE_F32;
        res->ne[0] = int64_t(size / sizeof(float));
        res->nb[0] = sizeof(float);
    }

    return res;
}

static void build_moves(
        llama_h2o_cache_graph & graph, const llama_h2o_device_rows & rows, ggml_tensor * src, ggml_tensor * dst) {
    ggml_context * ctx = graph.get_ctx();

    const llama_h2o_row_layout & layout = rows.layout;
    if (!layout.transposed) {
        ggml_tensor * all = view_rows(ctx, rows);
        graph.add(ggml_set_rows(ctx, all, ggml_get_rows(ctx, all, src), dst));
        return;
    }

    // an element of a row is a place in each line of the tensor, so all lines are turned into rows and back
    const size_t size_line = ggml_row_size(layout.type, layout.n_cells);

    ggml_tensor * lines = ggml_view_2d(ctx, rows.tensor, layout.n_cells, layout.n_embd, size_line, rows.offset);
    ggml_tensor * all   = ggml_cont(ctx, ggml_transpose(ctx, lines));

    all = ggml_reshape_2d(ctx, all, layout.n_embd_head, n_rows_of(layout));
    all = ggml_set_rows(ctx, all, ggml_get_rows(ctx, all, src), dst);
    all = ggml_reshape_2d(ctx, all, layout.n_embd, layout.n_cells);

    graph.add(ggml_cpy(ctx, ggml_transpose(ctx, all), lines));
}

// V may lie with room for more heads than a layer has, where layers have different ones.
void llama_h2o_build_moves(llama_h2o_cache_graph & graph,
        const llama_h2o_device_rows & rows,
        uint32_t n_head,
        const std::vector<llama_h2o_move> * moves) {
    std::vector<int32_t> src;
    std::vector<int32_t> dst;
    for (uint32_t head = 0; head < n_head; ++head) {
        for (const auto & move : moves[head]) {
            src.push_back(int32_t(move.src * n_head_of(rows.layout) + head));
            dst.push_back(int32_t(move.dst * n_head_of(rows.layout) + head));
        }
    }
    if (src.empty()) {
        return;
    }

    ggml_tensor * from = graph.add_input(src);
    ggml_tensor * to   = graph.add_input(dst);

    build_moves(graph, rows, from, to);
}
