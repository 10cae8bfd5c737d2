#include "cache/h2o-device-rows.h"

#include <algorithm>

// Rows are rotated in so many parts, because those of a quantised cache need room as floats.
static constexpr int64_t N_PARTS = 8;

static uint32_t n_head_of(const llama_h2o_row_layout & layout) {
    return layout.n_embd / layout.n_embd_head;
}

static int64_t n_rows_of(const llama_h2o_row_layout & layout) {
    return int64_t(layout.n_cells) * n_head_of(layout);
}

//
// moves
//

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

//
// rotations
//

// Multiplies blocks of a row with the matrix that mixes the keys of a quantised cache.
static ggml_tensor * build_mix(ggml_context * ctx, ggml_tensor * cur, ggml_tensor * matrix) {
    if (!matrix) {
        return cur;
    }

    ggml_tensor * blocks = ggml_reshape_2d(ctx, cur, matrix->ne[0], ggml_nelements(cur) / matrix->ne[0]);

    return ggml_reshape_3d(ctx, ggml_mul_mat(ctx, matrix, blocks), cur->ne[0], cur->ne[1], cur->ne[2]);
}

// Rotates the elements of each row from `first` on with fn(those).
template <typename F>
static ggml_tensor * build_rope(ggml_context * ctx, ggml_tensor * rows, int64_t first, F fn) {
    if (first == 0) {
        return fn(rows);
    }

    ggml_tensor * begin = ggml_view_3d(ctx, rows, first, 1, rows->ne[2], rows->nb[1], rows->nb[2], 0);
    ggml_tensor * end   = ggml_view_3d(
            ctx, rows, rows->ne[0] - first, 1, rows->ne[2], rows->nb[1], rows->nb[2], first * sizeof(float));

    return ggml_concat(ctx, ggml_cont(ctx, begin), fn(ggml_cont(ctx, end)), 0);
}

void llama_h2o_build_turns(llama_h2o_cache_graph & graph,
        const llama_h2o_device_rows & rows,
        const llama_h2o_rope & rope,
        const std::vector<llama_h2o_turn> * turns) {
    if (rope.angles.empty()) {
        return;
    }

    ggml_context * ctx = graph.get_ctx();

    const llama_h2o_row_layout & layout = rows.layout;

    const uint32_t n_head = n_head_of(layout);
    const int64_t n_all   = n_rows_of(layout);
    const int64_t n_max   = (n_all + N_PARTS - 1) / N_PARTS;

    std::vector<int32_t> by(n_all, 0);
    for (uint32_t head = 0; head < n_head; ++head) {
        for (const auto & turn : turns[head]) {
            by[size_t(turn.cell) * n_head + head] = turn.by;
        }
    }

    // ggml divides the angle of a pair by its factor
    std::vector<float> factors;
    for (const double angle : rope.angles) {
        factors.push_back(float(1.0 / angle));
    }

    ggml_tensor * divisors  = graph.add_input(factors, int64_t(factors.size()), 1, 1);
    ggml_tensor * positions = graph.add_input(by);
    ggml_tensor * matrix =
            rope.n_hadamard > 0 ? graph.add_input(rope.hadamard, rope.n_hadamard, rope.n_hadamard, 1) : nullptr;

    const int mode    = rope.neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL;
    const int n_dims  = int(2 * rope.angles.size());
    const size_t size = ggml_row_size(layout.type, layout.n_embd_head);

    for (int64_t first = 0; first < n_all; first += n_max) {
        const int64_t n = std::min(n_max, n_all - first);

        // every row is a token of its own to ggml, with one head
        ggml_tensor * part = ggml_view_3d(
                ctx, rows.tensor, layout.n_embd_head, 1, n, size, size, rows.offset + size_t(first) * size);
        ggml_tensor * pos = ggml_view_1d(ctx, positions, n, size_t(first) * sizeof(int32_t));

        ggml_tensor * cur = build_mix(ctx, ggml_cast(ctx, part, GGML_TYPE_F32), matrix);

        cur = build_rope(ctx, cur, int64_t(rope.first), [&](ggml_tensor * end) {
            return ggml_rope_ext(ctx, end, pos, divisors, n_dims, mode, 0, 1.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
        });

        graph.add(ggml_cpy(ctx, build_mix(ctx, cur, matrix), part));
    }
}
