#include "cache/h2o-marks.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-parts.h"

#include "llama-context.h"

#include <utility>

// Calls fn(tensor, offset, size, n) for everything that the policy has collected in a stream's first n_span cells: n blocks of
// `size` bytes at a stride of nb[1]. Each call costs a device as much as a large copy, so there are few.
template <typename F>
static void for_each_piece(const llama_h2o_parts & parts, uint32_t s, uint32_t n_span, F fn) {
    for (const auto & layer : parts.layers) {
        if (layer.tensors.scores->view_offs == 0) {
            ggml_tensor * sums = layer.tensors.scores->view_src; // of all layers on this device
            fn(sums, sums->nb[2] * s, n_span * sizeof(float), sums->ne[1]);
        }
        if (ggml_tensor * queries = layer.tensors.queries) {
            fn(queries, queries->nb[3] * s, queries->nb[3], 1);
        }
    }
}

// Makes a mark at the end of the text, where the next token has position pos.
static llama_h2o_text_mark make_mark(llama_h2o_parts & parts, uint32_t s, llama_pos pos) {
    const auto & st = parts.streams[s];

    parts.ctx.synchronize();

    llama_h2o_text_mark res = { pos, st.pos_decayed, parts.cells.head(s), parts.cells[s].used_max_p1(), st.queries, {},
        st.index ? st.index->gains() : llama_h2o_gains() };
    for_each_piece(parts, s, res.n_span, [&](ggml_tensor * tensor, size_t offset, size_t size, size_t n) {
        const size_t first = res.collected.size();
        res.collected.resize(first + n * size);
        ggml_backend_tensor_get_2d(tensor, res.collected.data() + first, offset, size, n, tensor->nb[1], size);
    });

    return res;
}

void llama_h2o_set_mark(llama_h2o_parts & parts, uint32_t s) {
    auto & marks = parts.streams[s].marks;

    const llama_pos pos = parts.cells.newest(s) + 1;
    if (pos == 0 || llama_h2o_last_mark(parts, s, pos) == pos) {
        return;
    }

    llama_h2o_text_mark mark = make_mark(parts, s, pos);
    if (marks.size() == LLAMA_H2O_MAX_MARKS) {
        marks.erase(marks.begin());
    }
    marks.push_back(std::move(mark));
}

void llama_h2o_keep_before(llama_h2o_parts & parts, uint32_t s, llama_pos p_first) {
    auto & st = parts.streams[s];

    st.before.reset();
    if (st.marks.empty() || st.marks.back().pos != p_first) {
        st.before = make_mark(parts, s, p_first);
    }
}

llama_pos llama_h2o_last_mark(const llama_h2o_parts & parts, uint32_t s, llama_pos pos) {
    llama_pos res = 0;
    for (const auto & mark : parts.streams[s].marks) {
        res = mark.pos <= pos ? mark.pos : res;
    }

    return res;
}

void llama_h2o_go_back_to_mark(llama_h2o_parts & parts, uint32_t s, llama_pos p0) {
    auto & st = parts.streams[s];

    while (!st.marks.empty() && st.marks.back().pos > p0) {
        st.marks.pop_back();
    }

    const bool is_before = st.before && st.before->pos == p0;
    if (!is_before && (st.marks.empty() || st.marks.back().pos < p0)) {
        return;
    }

    const auto & mark = is_before ? *st.before : st.marks.back();

    parts.ctx.synchronize();

    const uint8_t * data = mark.collected.data();
    for_each_piece(parts, s, mark.n_span, [&](ggml_tensor * tensor, size_t offset, size_t size, size_t n) {
        ggml_backend_tensor_set_2d(tensor, data, offset, size, n, tensor->nb[1], size);
        data += n * size;
    });
    st.pos_decayed = mark.pos_decayed;
    st.queries     = mark.queries;
    if (st.index && !st.index->set_gains(mark.gains)) {
        llama_h2o_update_index(parts, s);
    }

    // not in llama.cpp, which would set the head to the first freed cell
    std::vector<uint32_t> freed;
    for (const uint32_t cell : parts.cells.used(s)) {
        if (parts.cells[s].pos_get(cell) >= p0) {
            freed.push_back(cell);
        }
    }
    parts.cells.free(s, freed);
    parts.cells.set_head(s, mark.v_head);
}
