// Our custom ops in the graph: attention with scores in one pass, and sums of probabilities. ggml runs them on the CPU; if the
// rows are on a CUDA device, the CUDA backend runs kernels instead.

#pragma once

#include "cache/h2o-layer.h"

#include "ggml-backend.h"

struct llm_graph_context;

// Whether our op can compute the attention of a layer. See h2o-attention.h for the tensors.
bool llama_h2o_can_fuse(
        const llama_h2o_layer & layer, const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v);

ggml_tensor * llama_h2o_build_fused(const llm_graph_context & graph,
        llama_h2o_layer & layer,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask);

// Whether a device can collect what the policy needs without storing probabilities, in addition to flash attention without a
// logit cap. See h2o-attention.h for the tensors.
bool llama_h2o_can_sum(const llama_h2o_layer & layer, const ggml_tensor * k);

// The log-sum-exp of each query's logits in the cells: F32 [1, n_tokens, n_head, n_stream], followed by work space.
ggml_tensor * llama_h2o_build_lse(const llm_graph_context & graph,
        llama_h2o_layer & layer,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * kq_mask);

// Adds nodes that update the scores.
//   lse   result of the function above
//   kept  the share of attention that retrieved rows leave to the cells, see h2o-retrieved.h; may be null
void llama_h2o_build_columns(
        const llm_graph_context & graph, llama_h2o_layer & layer, ggml_tensor * lse, ggml_tensor * kept);

// Adds to the sums the sum over queries and the mean over the query heads of each KV group.
//   sums    F32 [n_kv, 1, n_head_kv, n_stream]
//   probs   F32 [n_kv, n_tokens, n_head, n_stream]
//   credit  F32 [n_kv, n_tokens, 1, n_stream], weights of the probabilities; may be null
void llama_h2o_build_add(
        const llm_graph_context & graph, ggml_tensor * sums, ggml_tensor * probs, ggml_tensor * credit);

// The op of a device that corresponds to alongside(), and the choice of the backend for an op on rows.
ggml_custom_op_t llama_h2o_device_alongside();
void llama_h2o_compute_where(const llm_graph_context & graph, const ggml_tensor * rows, bool on_cuda, ggml_tensor * op);

// Chooses the rows to keep on a device and writes its tensor of bits; see h2o-cuda.h.
//   sums   F32 [n_cells, n_heads] of a stream
ggml_tensor * llama_h2o_build_choice(ggml_context * ctx, const llama_h2o_choice_tensors & choice, ggml_tensor * sums);

// Rotates keys in place, on a device with our kernels.
//   list      I32 [n, 2] rows, cell*n_head_kv + head, and the indices of their factors
//   factors   F32 [2*n_dims, .], see h2o-rotation.h
ggml_tensor * llama_h2o_build_rotations(
        ggml_context * ctx, llama_h2o_layer & layer, uint32_t s, ggml_tensor * list, ggml_tensor * factors);

// The op that writes rows of a layer to the archive, see h2o-device-archiving.h.
ggml_custom_op_t llama_h2o_device_archive();

// Chooses the implementation of attention for every layer.
void llama_h2o_choose_kernels(std::vector<llama_h2o_layer> & layers, llama_h2o_attention_type type);

// Maximum tokens per text for which a layer uses the kernel for few queries.
uint32_t llama_h2o_few_tokens(const std::vector<llama_h2o_layer> & layers);

// Whether the last graph uses the requested type of attention.
bool llama_h2o_has_kernels(const std::vector<llama_h2o_layer> & layers, llama_h2o_attention_type type);
