// The last queries of every layer, for policies that ask at a compaction what they pay attention to. The graph writes
// them into a ring: the query of position p lies in slot p % n_queries.

#pragma once

#include <cstdint>
#include <vector>

struct ggml_tensor;
struct llm_graph_context;

// Whose query lies in a slot of a stream.
struct llama_h2o_query_slot {
    int32_t pos      = -1; // of the text; -1: nobody's
    int32_t rope_pos = 0;  // what it is rotated to
};

// Adds the node that writes the queries of the batch, as they met the keys, if the policy asks for any.
//   q  F32 [n_embd_head_k, n_tokens, n_head, n_stream]
void llama_h2o_build_queries(const llm_graph_context & graph, ggml_tensor * q, int il);
