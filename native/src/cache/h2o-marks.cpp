#include "cache/h2o-marks.h"

#include "cache/h2o-cache.h"

#include "llama-context.h"

#include <algorithm>

void llama_h2o::mark(llama_seq_id seq_id) {
    const uint32_t s = kv.seq_to_stream[seq_id];

    auto & st = streams[s];

    const llama_pos pos = newest(s) + 1;
    if (pos == 0 || marked(seq_id, pos) == pos) {
        return;
    }

    ctx.synchronize();

    llama_h2o_text_mark res = { pos, st.pos_forgotten, kv.v_heads[s], kv.v_cells[s].used_max_p1(), st.queries, {} };
    for (const auto & layer : layers) {
        layer.for_each_collected(s, res.n_span, [&](ggml_tensor * tensor, size_t offset, size_t size) {
            res.collected.resize(res.collected.size() + size);
            ggml_backend_tensor_get(tensor, res.collected.data() + res.collected.size() - size, offset, size);
        });
    }

    if (st.marks.size() == LLAMA_H2O_MAX_MARKS) {
        st.marks.erase(st.marks.begin());
    }
    st.marks.push_back(std::move(res));
}

llama_pos llama_h2o::marked(llama_seq_id seq_id, llama_pos pos) const {
    llama_pos res = 0;
    for (const auto & mark : streams[kv.seq_to_stream[seq_id]].marks) {
        res = mark.pos <= pos ? mark.pos : res;
    }

    return res;
}

// Before the tail from p0 on is removed.
void llama_h2o::go_back_to_mark(uint32_t s, llama_pos p0) {
    auto & st = streams[s];

    while (!st.marks.empty() && st.marks.back().pos > p0) {
        st.marks.pop_back();
    }
    if (st.marks.empty() || st.marks.back().pos < p0) {
        return;
    }

    const auto & mark = st.marks.back();

    ctx.synchronize();

    const uint8_t * data = mark.collected.data();
    for (const auto & layer : layers) {
        layer.for_each_collected(s, mark.n_span, [&](ggml_tensor * tensor, size_t offset, size_t size) {
            ggml_backend_tensor_set(tensor, data, offset, size);
            data += size;
        });
    }
    st.pos_forgotten = mark.pos_forgotten;
    st.queries       = mark.queries;

    // here and not in llama.cpp, which would go on behind the first of the cells that it frees
    auto & cells = kv.v_cells[s];
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!cells.is_empty(i) && cells.pos_get(i) >= p0) {
            cells.rm(i);
        }
    }
    kv.v_heads[s] = mark.v_head;
}
