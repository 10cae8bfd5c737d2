// Attention to retrieved rows in a graph that uses ggml's ops for the cells, on any backend.

#pragma once

#include "cache/h2o-layer.h"
#include "kernels/h2o-kernel.h"

struct ggml_tensor;
struct llm_graph_context;

// Searches the archive, on the device if it can, otherwise on the CPU, and attends to the retrieved rows.
//   q     F32 [n_embd_head_k, n_tokens, n_head, n_stream]
//   lse   F32 [1, n_tokens, n_head, n_stream], the log-sum-exp of the logits in the cells
// Returns F32 [n_embd_head_v + 1, n_head, n_tokens, n_stream]: the contribution of retrieved rows to the result, followed by the
// share of attention left to the cells.
ggml_tensor * llama_h2o_build_retrieved(
        const llm_graph_context & graph, llama_h2o_layer & layer, ggml_tensor * q, ggml_tensor * lse);

// Reads the arguments of the op from its tensors. Its userdata is the layer.
llama_h2o_attention llama_h2o_read_alongside(const ggml_tensor * op, const void * userdata);

// The share of attention left to the cells: F32 [1, n_tokens, n_head, n_stream].
ggml_tensor * llama_h2o_build_kept(ggml_context * ctx, ggml_tensor * retrieved);

// The result of attention to the cells and to retrieved rows.
//   cur   F32 [n_embd_head_v, n_head, n_tokens, n_stream], or with tokens and heads swapped
ggml_tensor * llama_h2o_build_with_retrieved(
        ggml_context * ctx, ggml_tensor * retrieved, ggml_tensor * cur, bool tokens_first);
