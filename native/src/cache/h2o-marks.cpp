#include "cache/h2o-marks.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-parts.h"

#include "llama-context.h"

#include <utility>

// At the present end, where the next token is that at pos.
static llama_h2o_text_mark make_mark(llama_h2o_parts & parts, uint32_t s, llama_pos pos) {
    const auto & st = parts.streams[s];

    parts.ctx.synchronize();

    llama_h2o_text_mark res = { pos, st.pos_forgotten, parts.cells.head(s), parts.cells[s].used_max_p1(), st.queries,
        {}, st.index ? st.index->gains() : llama_h2o_gains() };
    for (const auto & layer : parts.layers) {
        layer.tensors.for_each_collected(s, res.n_span, [&](ggml_tensor * tensor, size_t offset, size_t size) {
            res.collected.resize(res.collected.size() + size);
            ggml_backend_tensor_get(tensor, res.collected.data() + res.collected.size() - size, offset, size);
        });
    }

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
    for (const auto & layer : parts.layers) {
        layer.tensors.for_each_collected(s, mark.n_span, [&](ggml_tensor * tensor, size_t offset, size_t size) {
            ggml_backend_tensor_set(tensor, data, offset, size);
            data += size;
        });
    }
    st.pos_forgotten = mark.pos_forgotten;
    st.queries       = mark.queries;
    if (st.index && !st.index->set_gains(mark.gains)) {
        llama_h2o_update_index(parts, s);
    }

    // here and not in llama.cpp, which would go on behind the first of the cells that it frees
    std::vector<uint32_t> freed;
    for (const uint32_t cell : parts.cells.used(s)) {
        if (parts.cells[s].pos_get(cell) >= p0) {
            freed.push_back(cell);
        }
    }
    parts.cells.free(s, freed);
    parts.cells.set_head(s, mark.v_head);
}
