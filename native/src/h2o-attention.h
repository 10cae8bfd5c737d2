// Attention with scores, out of ggml ops that every backend has. llama.cpp builds the attention; these
// functions add the nodes that collect the scores. They do nothing where no eviction is attached.

#pragma once

struct ggml_tensor;
struct llm_graph_context;

// After the softmax: probs F32 [n_kv, n_tokens, n_head, n_stream], contiguous.
void llama_h2o_build_scores(const llm_graph_context & graph, ggml_tensor * probs, int il);

// Beside flash attention, which keeps its probabilities to itself: computes them once more.
//   q       F32 [n_embd_head, n_tokens, n_head, n_stream]
//   k           [n_embd_head, n_kv, n_head_kv, n_stream]
//   kq_mask     [n_kv, n_tokens, 1, n_stream]
void llama_h2o_build_scores_beside_flash(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        float kq_scale,
        int il);
