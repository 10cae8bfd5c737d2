// Rows beside the cells in a graph whose attention to the cells is made of ggml's ops, on any backend.

#pragma once

#include "cache/h2o-layer.h"
#include "kernels/h2o-kernel.h"

struct ggml_tensor;
struct llm_graph_context;

// The cells keep a share of the attention, and found rows add to the result. Looks for rows, on the device if it can, or on the
// CPU.
//   q     F32 [n_embd_head_k, n_tokens, n_head, n_stream]
//   lse   F32 [1, n_tokens, n_head, n_stream], the logarithm of the sum that a softmax divides by
// Returns F32 [n_embd_head_v + 1, n_head, n_tokens, n_stream]: what found rows add, and behind it what the cells keep.
ggml_tensor * llama_h2o_build_retrieved(
        const llm_graph_context & graph, llama_h2o_layer & layer, ggml_tensor * q, ggml_tensor * lse);

// How the tensors of the op are read. Its userdata is the layer.
llama_h2o_attention llama_h2o_read_alongside(const ggml_tensor * op, const void * userdata);

// What the cells keep: F32 [1, n_tokens, n_head, n_stream].
ggml_tensor * llama_h2o_build_kept(ggml_context * ctx, ggml_tensor * retrieved);

// The result of the attention to the cells, with what found rows add.
//   cur   F32 [n_embd_head_v, n_head, n_tokens, n_stream], or with tokens and heads changed
ggml_tensor * llama_h2o_build_with_retrieved(
        ggml_context * ctx, ggml_tensor * retrieved, ggml_tensor * cur, bool tokens_first);
