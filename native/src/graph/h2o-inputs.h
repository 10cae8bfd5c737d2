// Graph inputs and nodes for policies: the weight of each query's attention, and the last queries of every layer.

#pragma once

#include <cstdint>

struct ggml_tensor;
struct llm_graph_context;

// For policies that weight queries by position: 0 for near rows, otherwise larger for later queries, which is equivalent to a
// decay of earlier attention. Returns the node with the weights, shared by all layers: F32 [n_kv, n_tokens, 1, n_stream]; null
// if all weights are 1.
ggml_tensor * llama_h2o_build_credit(
        const llm_graph_context & graph, int64_t n_kv, int64_t n_tokens, int64_t n_stream, int il);

// For policies that need the attention of the last queries at a compaction: adds the node that writes the rotated queries of the
// batch to a ring (h2o-query-ring.h).
//   q  F32 [n_embd_head_k, n_tokens, n_head, n_stream]
void llama_h2o_build_queries(const llm_graph_context & graph, ggml_tensor * q, int il);
