// The last queries of every layer, for policies that ask at a compaction what they pay attention to. The graph writes
// them into a ring, see h2o-query-ring.h.

#pragma once

struct ggml_tensor;
struct llm_graph_context;

// Adds the node that writes the queries of the batch, as they met the keys, if the policy asks for any.
//   q  F32 [n_embd_head_k, n_tokens, n_head, n_stream]
void llama_h2o_build_queries(const llm_graph_context & graph, ggml_tensor * q, int il);
