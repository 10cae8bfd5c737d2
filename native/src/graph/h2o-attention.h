// Attention with scores in the graph. If the rows are in CPU memory, one op of ours computes both. Otherwise llama.cpp builds the
// attention from ggml ops, and these functions add nodes that collect what the policy needs. Without eviction they do nothing.

#pragma once

#include <cstdint>

struct ggml_tensor;
struct llm_graph_context;

// A view of scores or squares with the cells and streams of the graph: [n_kv, 1, n_head_kv, n_stream].
ggml_tensor * llama_h2o_view_collected(
        const llm_graph_context & graph, ggml_tensor * collected, int64_t n_kv, int64_t n_stream);

// Adds nodes after the softmax.
//   q       F32 [n_embd_head_k, n_tokens, n_head, n_stream]
//   probs   F32 [n_kv, n_tokens, n_head, n_stream], contiguous
void llama_h2o_build_scores(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * probs,
        ggml_tensor * sinks,
        float kq_scale,
        int il);

// Replaces flash attention and returns the result, F32 [n_embd_head_v*n_head, n_tokens*n_stream]. Or returns null to leave
// attention to llama.cpp, and adds nodes that recompute the probabilities for the scores, because flash attention does not
// return them.
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

// After either: adds the attention to retrieved rows.
//   cur   F32 [n_embd_head_v, n_head, n_tokens, n_stream], or with tokens and heads swapped
ggml_tensor * llama_h2o_add_found(const llm_graph_context & graph, ggml_tensor * cur, bool tokens_first, int il);
