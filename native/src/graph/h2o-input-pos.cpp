#include "graph/h2o-input-pos.h"

#include "cache/h2o-cache.h"

#include "llama-graph.h"

#include <vector>

namespace {

class input_pos : public llm_graph_input_pos {
public:
    input_pos(uint32_t n_pos_per_embd, const llama_h2o * h2o) : llm_graph_input_pos(n_pos_per_embd), h2o(h2o) {}

    void set_input(const llama_ubatch * ubatch) override {
        if (!ubatch->pos || !pos) {
            return;
        }

        const uint32_t n_tokens = ubatch->n_tokens;

        // of several positions (M-RoPE) text has three alike, and 0 in the last one
        const uint32_t n_alike = n_pos_per_embd > 1 ? n_pos_per_embd - 1 : 1;

        std::vector<llama_pos> data(size_t(n_pos_per_embd) * n_tokens, 0);
        for (uint32_t i = 0; i < n_tokens; ++i) {
            const uint32_t s = h2o->stream_of(ubatch->seq_id[i][0]);
            for (uint32_t section = 0; section < n_alike; ++section) {
                data[section * n_tokens + i] = h2o->parts.streams[s].rows.rope_pos(ubatch->pos[i]);
            }
        }

        ggml_backend_tensor_set(pos, data.data(), 0, data.size() * sizeof(llama_pos));
    }

private:
    const llama_h2o * h2o; // lives as long as the context, and so longer than its graphs
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
