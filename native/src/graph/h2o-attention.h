// Attention with scores in the graph. llama.cpp builds the attention out of ggml ops that every backend
// has, and these functions add the nodes that collect what the policy needs; or, where the rows lie in the memory
// of the CPU, one op of ours takes the place of all. They do nothing where no eviction is attached.

#pragma once

#include <cstdint>

struct ggml_tensor;
struct llm_graph_context;

// The cells and streams that the graph works on of scores or squares: [n_kv, 1, n_head_kv, n_stream].
ggml_tensor * llama_h2o_view_collected(
        const llm_graph_context & graph, ggml_tensor * collected, int64_t n_kv, int64_t n_stream);

// After the softmax.
//   q       F32 [n_embd_head_k, n_tokens, n_head, n_stream]
//   probs   F32 [n_kv, n_tokens, n_head, n_stream], contiguous
void llama_h2o_build_scores(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * probs,
        ggml_tensor * sinks,
        float kq_scale,
        int il);

// In the place of flash attention: returns its result, F32 [n_embd_head_v*n_head, n_tokens*n_stream]. Or
// returns null and leaves the attention to llama.cpp, but computes the probabilities once more for the
// scores, because flash attention keeps them to itself.
//   q       F32 [n_embd_head_k, n_tokens, n_head, n_stream]
//   k           [n_embd_head_k, n_kv, n_head_kv, n_stream]
//   v           [n_embd_head_v, n_kv, n_head_kv, n_stream]
//   kq_mask     [n_kv, n_tokens, 1, n_stream]
ggml_tensor * llama_h2o_build_attention(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        float kq_scale,
        int il);

// Behind either: adds what was found among evicted rows.
//   cur   F32 [n_embd_head_v, n_head, n_tokens, n_stream], or with tokens and heads changed
ggml_tensor * llama_h2o_add_found(const llm_graph_context & graph, ggml_tensor * cur, bool tokens_first, int il);
