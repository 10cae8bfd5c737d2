// What the graph gets and keeps for policies, beside the positions of h2o-input-pos.h: what the attention of a query
// counts, and the last queries of every layer.

#pragma once

#include <cstdint>

struct ggml_tensor;
struct llm_graph_context;

// Some policies weigh queries by their position: nothing for the rows next to it, and for the others the more the later the
// query comes, so that earlier attention fades. The node of the graph with the weights, the same for all layers:
// F32 [n_kv, n_tokens, 1, n_stream]. Null if every query counts in full.
ggml_tensor * llama_h2o_build_credit(
        const llm_graph_context & graph, int64_t n_kv, int64_t n_tokens, int64_t n_stream, int il);

// Others ask at a compaction what the last queries pay attention to: adds the node that writes the queries of the batch, as
// they met the keys, into a ring (h2o-query-ring.h).
//   q  F32 [n_embd_head_k, n_tokens, n_head, n_stream]
void llama_h2o_build_queries(const llm_graph_context & graph, ggml_tensor * q, int il);
