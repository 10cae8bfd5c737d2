#include "cache/h2o-parts.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-window.h"

#include "llama-context.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <utility>

static std::unique_ptr<const llama_h2o_policy> new_policy(const llama_h2o_params & params) {
    return params.scorer ? llama_h2o_new_policy(params.policy, *params.scorer, params.recent)
                         : llama_h2o_new_policy(params.policy, params.recent);
}

static llama_h2o_params with_copies_of(llama_h2o_params params, const llama_h2o_policy & policy) {
    params.policy = policy.text.c_str();
    params.scorer = policy.scorer;

    return params;
}

llama_h2o_parts::llama_h2o_parts(llama_context & ctx,
        const llama_h2o_params & params,
        std::vector<llama_h2o_layer> layers,
        llama_h2o_cells cells,
        llama_h2o_graph_runner graphs) :
    ctx(ctx), policy(new_policy(params)), params(with_copies_of(params, *policy)), layers(std::move(layers)),
    cells(std::move(cells)), graphs(std::move(graphs)), n_cells(this->cells[0].size()) {
    for (auto & layer : this->layers) {
        layer.attention.collects = policy->has_need(LLAMA_H2O_NEEDS_ATTENTION);
    }
    for (size_t s = 0; s < this->cells.n_stream(); ++s) {
        streams.emplace_back(n_heads(), n_cells, policy->n_queries, params.pinned);
        llama_h2o_make_archive(*this, s);
    }
}

uint32_t llama_h2o_parts::n_heads() const {
    const auto & last = layers.back().shape;

    return last.first_head + last.n_head_kv;
}

uint32_t llama_h2o_parts::n_query_heads() const {
    uint32_t res = 0;
    for (const auto & layer : layers) {
        res += layer.shape.n_head;
    }

    return res;
}

llama_pos llama_h2o_parts::pos_removable(uint32_t s) const {
    llama_pos res = streams[s].pos_removable;
    if (window) {
        res = std::max(res, window->removable(s));
    }
    if (recurrent) {
        res = std::max(res, cells.newest(s) + 1 - llama_pos(recurrent->n_rs_seq));
    }

    return res;
}

void llama_h2o_parts::reset_stream(uint32_t s) {
    ctx.synchronize();
    streams[s].reset(params.pinned);
}

bool llama_h2o_parts::search_on_devices() const {
    return !device_texts.empty() && std::all_of(streams.begin(), streams.end(), [](const llama_h2o_stream & st) {
        return st.archive->is_shared() && st.index->has_room();
    });
}
