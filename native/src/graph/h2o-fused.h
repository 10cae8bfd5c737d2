// Ops of our own in the graph: attention with scores in one pass, and sums of probabilities. ggml runs them on the CPU; where
// the rows lie on a CUDA device, its backend runs kernels in their place.

#pragma once

#include "cache/h2o-layer.h"

#include "ggml-backend.h"

struct llm_graph_context;

// Whether a layer can attend so, see h2o-attention.h for the tensors.
bool llama_h2o_can_fuse(
        const llama_h2o_layer & layer, const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v);

ggml_tensor * llama_h2o_build_fused(const llm_graph_context & graph,
        llama_h2o_layer & layer,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask);

// Whether a device can collect what the layer's policy needs without writing probabilities, next to flash attention without
// caps. See h2o-attention.h for the tensors.
bool llama_h2o_can_sum(const llama_h2o_layer & layer, const ggml_tensor * k);

// Of each query the logarithm of the sum that the softmax over its cells divides by: F32 [1, n_tokens, n_head, n_stream],
// and work space behind it.
ggml_tensor * llama_h2o_build_lse(const llm_graph_context & graph,
        llama_h2o_layer & layer,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * kq_mask);

// Adds to what is collected.
//   lse   of the function above
//   kept  the share of attention that found rows leave to the cells, see h2o-retrieved.h; or null
void llama_h2o_build_columns(
        const llm_graph_context & graph, llama_h2o_layer & layer, ggml_tensor * lse, ggml_tensor * kept);

// Adds the sum over queries, the mean over the query heads of each KV group.
//   sums    F32 [n_kv, 1, n_head_kv, n_stream]
//   probs   F32 [n_kv, n_tokens, n_head, n_stream]
//   credit  F32 [n_kv, n_tokens, 1, n_stream], multiplied with the probabilities; or null
void llama_h2o_build_add(
        const llm_graph_context & graph, ggml_tensor * sums, ggml_tensor * probs, ggml_tensor * credit);

// The op of a device in the place of beside(), and where an op is computed that belongs to rows.
ggml_custom_op_t llama_h2o_device_alongside();
void llama_h2o_compute_where(const llm_graph_context & graph, const ggml_tensor * rows, bool on_cuda, ggml_tensor * op);

// What a device chooses, into its tensor of bits; see h2o-cuda.h.
//   sums   F32 [n_cells, n_heads], of a stream
ggml_tensor * llama_h2o_build_choice(ggml_context * ctx, const llama_h2o_choice_tensors & choice, ggml_tensor * sums);

// Keys that are turned on where they lie, on a device that attends with our kernels.
//   list      I32 [n, 2] which rows: cell*n_head_kv + head; and by which factors
//   factors   F32 [2*n_dims, .], see h2o-rotation.h
ggml_tensor * llama_h2o_build_rotations(
        ggml_context * ctx, llama_h2o_layer & layer, uint32_t s, ggml_tensor * list, ggml_tensor * factors);

// The op that copies rows of a layer to the archive: see h2o-device-archiving.h.
ggml_custom_op_t llama_h2o_device_archive();

// Decides what attends in every layer.
void llama_h2o_choose_kernels(std::vector<llama_h2o_layer> & layers, llama_h2o_attention_type type);

// Most tokens of a text for which a layer's kernel is the one for few queries.
uint32_t llama_h2o_few_tokens(const std::vector<llama_h2o_layer> & layers);

// Whether the last graph attends in the way asked for.
bool llama_h2o_has_kernels(const std::vector<llama_h2o_layer> & layers, llama_h2o_attention_type type);
