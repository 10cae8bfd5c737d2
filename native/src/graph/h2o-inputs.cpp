#include "graph/h2o-inputs.h"

#include "cache/h2o-cache.h"
#include "cache/h2o-caches.h"
#include "graph/h2o-fused.h"
#include "graph/h2o-input-pos.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <algorithm>

//
// positions
//

namespace {

class input_pos : public llm_graph_input_pos {
public:
    input_pos(uint32_t n_pos_per_embd, const llama_h2o * h2o) : llm_graph_input_pos(n_pos_per_embd), h2o(h2o) {}

    void set_input(const llama_ubatch * ubatch) override {
        if (!ubatch->pos || !pos) {
            return;
        }

        const uint32_t n_tokens = ubatch->n_tokens;

        std::vector<llama_pos> data(size_t(n_pos_per_embd) * n_tokens);
        for (uint32_t i = 0; i < n_tokens; ++i) {
            const uint32_t s    = h2o->stream_of(ubatch->seq_id[i][0]);
            const llama_pos pos = h2o->parts.streams[s].rows.rope_pos(ubatch->pos[i]);

            // M-RoPE: text has three equal positions and a 0, audio four equal ones; images add row and column
            const bool is_embd     = n_pos_per_embd > 1 && !ubatch->token;
            const bool in_picture  = is_embd && ubatch->pos[n_tokens + i] >= 0;
            const llama_pos number = in_picture ? ubatch->pos[n_tokens + i] : 0;
            const llama_pos width  = in_picture ? ubatch->pos[2 * n_tokens + i] : 1;

            const llama_pos all[] = { pos, pos + number / width, pos + number % width,
                is_embd && !in_picture ? pos : 0 };
            for (uint32_t section = 0; section < n_pos_per_embd; ++section) {
                data[section * n_tokens + i] = all[section];
            }
        }

        ggml_backend_tensor_set(pos, data.data(), 0, data.size() * sizeof(llama_pos));
    }

private:
    const llama_h2o * h2o; // outlives the graphs
};

} // namespace

std::unique_ptr<llm_graph_input_pos> llama_h2o_new_input_pos(const llm_graph_context & graph) {
    const uint32_t n_pos_per_embd = graph.hparams.n_pos_per_embd();

    const llama_h2o * h2o = llama_h2o::of(graph.mctx);
    if (h2o) {
        return std::make_unique<input_pos>(n_pos_per_embd, h2o);
    }

    return std::make_unique<llm_graph_input_pos>(n_pos_per_embd);
}

//
// credit: weights of queries
//

namespace {

class input_credit : public llm_graph_input_i {
public:
    explicit input_credit(const llama_h2o * h2o) : h2o(h2o) {}

    void set_input(const llama_ubatch * ubatch) override {
        const auto & policy    = *h2o->parts.policy;
        const int64_t n_tokens = credit->ne[1];

        // tokens of a sequence are adjacent; floats are exact for positions relative to the first one
        std::vector<float> data;
        for (int64_t i = 0; i < ubatch->n_tokens; i += n_tokens) {
            const uint32_t s      = h2o->stream_of(ubatch->seq_id[i][0]);
            const llama_pos * pos = ubatch->pos + i;
            const auto & st       = h2o->parts.streams[s];
            const auto & cells    = h2o->parts.cells[s];

            for (int64_t cell = 0; cell < credit->ne[0]; ++cell) {
                data.push_back(cells.is_empty(cell) ? 0.0f : float(pos[0] - cells.pos_get(cell)));
            }
            // rows that were not recent at the last compaction may be in any cell
            for (int64_t t = 0; t < n_tokens; ++t) {
                data.push_back(
                        float(std::max<int64_t>(int64_t(pos[t]) - policy.n_near, st.pos_removable - 2) + 1 - pos[0]));
            }
            for (int64_t t = 0; t < n_tokens; ++t) {
                data.push_back(float(1.0 / policy.remaining(int64_t(pos[t]) - st.pos_decayed)));
            }
        }

        ggml_backend_tensor_set(given, data.data(), 0, data.size() * sizeof(float));
    }

    bool can_reuse(const llm_graph_params & params) override {
        const auto * mctx = llama_h2o_caches::growing_of(params.mctx);

        return params.ubatch.n_tokens == credit->ne[1] * credit->ne[3] && mctx->get_n_kv() == credit->ne[0];
    }

    // F32 [n_kv + 2*n_tokens, 1, 1, n_stream]: the distance of each cell to the first token, then for each token the position up
    // to which rows count, and the weight
    ggml_tensor * given  = nullptr;
    ggml_tensor * credit = nullptr; // F32 [n_kv, n_tokens, 1, n_stream]

private:
    const llama_h2o * h2o; // outlives the graphs
};

} // namespace

ggml_tensor * llama_h2o_build_credit(
        const llm_graph_context & graph, int64_t n_kv, int64_t n_tokens, int64_t n_stream, int il) {
    llama_h2o * h2o    = llama_h2o::of(graph.mctx);
    ggml_context * ctx = graph.ctx0;
    if (!h2o->parts.policy->weighs()) {
        return nullptr;
    }
    if (!h2o->parts.is_first(il)) {
        return h2o->credit; // made by the first layer of a graph
    }

    auto input = std::make_unique<input_credit>(h2o);

    input->given = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, n_kv + 2 * n_tokens, 1, 1, n_stream);
    ggml_set_input(input->given);

    ggml_tensor * all = ggml_cont(ctx, input->given); // one copy to a device
    const auto part   = [&](int64_t ne0, int64_t ne1, int64_t first) {
        const size_t size = sizeof(float);
        return ggml_view_4d(ctx, all, ne0, ne1, 1, n_stream, size * ne0, all->nb[3], all->nb[3], size * first);
    };
    ggml_tensor * cur = ggml_repeat_4d(ctx, part(n_kv, 1, 0), n_kv, n_tokens, 1, n_stream);

    cur = ggml_step(ctx, ggml_add(ctx, cur, part(1, n_tokens, n_kv)));
    cur = ggml_mul(ctx, cur, part(1, n_tokens, n_kv + n_tokens));
    for (ggml_tensor * end : { all, cur }) {
        llama_h2o_compute_where(graph, h2o->find_layer(il)->tensors.k, true, end);
    }
    h2o->credit = input->credit = cur;
    graph.res->add_input(std::move(input));

    return cur;
}

//
// the last queries
//

namespace {

// The ring slots of the last queries of a ubatch, shared by all layers.
class input_query_slots : public llm_graph_input_i {
public:
    input_query_slots(const llama_ubatch & ubatch, uint32_t n_queries) :
        n_tokens(ubatch.n_tokens), n_seqs(ubatch.n_seqs_unq), n_queries(n_queries) {}

    void set_input(const llama_ubatch * ubatch) override {
        const int64_t n_last   = slots->ne[0];
        const int64_t n_stream = slots->ne[2];
        const int64_t n_each   = ubatch->n_tokens / n_stream;

        std::vector<int32_t> data;
        for (int64_t s = 0; s < n_stream; ++s) {
            for (int64_t i = n_each - n_last; i < n_each; ++i) {
                data.push_back(ubatch->pos[s * n_each + i] % int32_t(n_queries));
            }
        }

        ggml_backend_tensor_set(slots, data.data(), 0, data.size() * sizeof(int32_t));
    }

    bool can_reuse(const llm_graph_params & params) override {
        return params.ubatch.n_tokens == n_tokens && params.ubatch.n_seqs_unq == n_seqs;
    }

    ggml_tensor * slots = nullptr; // I32 [n_last, 1, n_stream]

private:
    const uint32_t n_tokens;
    const uint32_t n_seqs;
    const uint32_t n_queries;
};

} // namespace

void llama_h2o_build_queries(const llm_graph_context & graph, ggml_tensor * q, int il) {
    llama_h2o * h2o    = llama_h2o::of(graph.mctx);
    ggml_context * ctx = graph.ctx0;
    ggml_tensor * ring = h2o->find_layer(il)->tensors.queries;
    if (!ring) {
        return;
    }

    const int64_t n_queries = ring->ne[1];
    const int64_t n_tokens  = q->ne[1];
    const int64_t n_last    = std::min(n_tokens, n_queries);
    const int64_t n_stream  = q->ne[3];

    // made by the first layer of a graph
    if (h2o->parts.is_first(il)) {
        auto input = std::make_unique<input_query_slots>(graph.ubatch, n_queries);

        h2o->query_slots = input->slots = ggml_new_tensor_3d(ctx, GGML_TYPE_I32, n_last, 1, n_stream);
        ggml_set_input(input->slots);
        graph.res->add_input(std::move(input));
    }

    ggml_tensor * last = ggml_view_4d(
            ctx, q, q->ne[0], n_last, q->ne[2], n_stream, q->nb[1], q->nb[2], q->nb[3], q->nb[1] * (n_tokens - n_last));

    ring = ggml_view_4d(ctx, ring, ring->ne[0], n_queries, ring->ne[2], n_stream, ring->nb[1], ring->nb[2], ring->nb[3],
            ring->nb[3] * llama_h2o::first_stream(graph.mctx));

    ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, ring, last, h2o->query_slots));
}
