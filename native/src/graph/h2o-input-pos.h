// The RoPE positions of the graph.

#pragma once

#include <memory>

class llm_graph_input_pos;
struct llm_graph_context;

// llama.cpp's input of positions; with eviction, lowered by re-bases.
std::unique_ptr<llm_graph_input_pos> llama_h2o_new_input_pos(const llm_graph_context & graph);
