// What the attention of a query counts, for policies that weigh queries by their position: nothing for the rows next to
// it, and for the others the more the later the query comes, so that earlier attention fades.

#pragma once

#include <cstdint>

struct ggml_tensor;
struct llm_graph_context;

// The input of the graph with the weights, the same for all layers: F32 [n_kv, n_tokens, 1, n_stream]. Null if every
// query counts in full.
ggml_tensor * llama_h2o_build_credit(
        const llm_graph_context & graph, int64_t n_kv, int64_t n_tokens, int64_t n_stream, int il);
