// A layer of the cache: its shape, the tensors with what is known of its rows, and how the graph computes it.

#pragma once

#include "llama-h2o.h"

#include "cache/h2o-host-rows.h"
#include "cache/h2o-rope.h"
#include "kernels/h2o-search.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <optional>
#include <utility>
#include <vector>

struct llama_h2o_kernel;
class llama_h2o_policy;

// It does not change.
struct llama_h2o_layer_shape {
    uint32_t il;         // layer of the model
    uint32_t n_head;     // query heads
    uint32_t n_head_kv;  // KV heads
    uint32_t first_head; // KV heads of the layers before

    llama_h2o_row_layout k;
    llama_h2o_row_layout v;

    bool on_host; // whether the host moves rows: it reaches them where they lie, or else their device cannot

    uint32_t n_group() const { return n_head / n_head_kv; }
};

// Where a device chooses which rows of its layers stay; all null where the host does.
struct llama_h2o_choice_tensors {
    ggml_tensor * divisors = nullptr; // F64 [n_ages] of the policy
    ggml_tensor * pos      = nullptr; // I32 [n_heads*n_cells + 2], of a stream, see h2o-cuda.h
    ggml_tensor * bits     = nullptr; // I32 [n_words + 1, n_heads]
};

// What lies in the memory of the layer's device, of all streams.
struct llama_h2o_layer_tensors {
    ggml_tensor * k; // of the cache, as v
    ggml_tensor * v; // null where the first elements of a latent row (MLA) are V

    // views of one tensor of all layers in this memory, whose streams cross at once
    ggml_tensor * scores  = nullptr; // F32 [n_cells, n_head_kv, n_stream]
    ggml_tensor * squares = nullptr; // F32 likewise, of squared probabilities; null unless the policy asks for it

    ggml_tensor * queries = nullptr; // F32 [n_embd_head_k, n_queries, n_head, n_stream], the last ones; likewise
    ggml_tensor * weights = nullptr; // F32 [n_ubatch*n_head], all n_head_kv/n_head: sums become means over a KV group

    // of all layers on this device; null in host memory
    ggml_tensor * moves = nullptr; // I32: which rows a compaction moves, and where to
    void * space = nullptr; // on the host, for a stream of sums or positions: the device copies faster from there
    llama_h2o_choice_tensors choice;

    size_t size_of_collected() const;

    // Calls fn(tensor, offset, size) for the pieces of what the policy has collected of a stream, up to n_span cells.
    template <typename F>
    void for_each_collected(uint32_t s, uint32_t n_span, F fn) const {
        for (ggml_tensor * sums : { scores, squares }) {
            for (int64_t head = 0; sums && head < sums->ne[1]; ++head) {
                fn(sums, sums->nb[2] * s + sums->nb[1] * head, n_span * sizeof(float));
            }
        }
        if (queries) {
            fn(queries, queries->nb[3] * s, queries->nb[3]);
        }
    }
};

struct llama_h2o_layer_attention {
    // chosen once
    bool collects                   = false;   // whether the graph adds to the scores
    const llama_h2o_kernel * kernel = nullptr; // for attention with scores in one op on the CPU
    bool on_cuda                    = false;   // whether the CUDA backend has kernels for that
    bool on_tensor_cores            = false;   // and for scores of many queries

    // how the last graph attends
    bool fused           = false; // in that one op, not with ggml's ops
    float kq_scale       = 0.0f;
    float kq_cap         = 0.0f; // 0: none
    ggml_tensor * sinks  = nullptr;
    ggml_tensor * credit = nullptr; // null unless the policy weighs queries

    // rows beside the cells, for the streams of that graph; none are looked for where there is no text
    llama_h2o_search search = {};
    std::vector<const llama_h2o_search_text *> texts;

    // what they add where the cells are attended to by ggml's ops, see h2o-retrieved.h; or null
    ggml_tensor * retrieved = nullptr;

    const llama_h2o_search * searched() const { return texts.empty() ? nullptr : &search; }

    // probabilities of queries, as the last graph attends: F32 [n_kv, n_tokens, n_head, n_stream]
    ggml_tensor * build_probs(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * kq_mask) const;
};

struct llama_h2o_layer {
    llama_h2o_layer_shape shape;
    llama_h2o_layer_tensors tensors;
    llama_h2o_layer_attention attention;

    std::optional<llama_h2o_rope> rope = std::nullopt; // of the keys; none until the first graph is built

    // the tensors of its rows, K and V or K alone
    std::vector<std::pair<ggml_tensor *, llama_h2o_row_layout>> rows() const;

    // sums over dim 1, [n, 1, ...], where the scores lie
    //   values   F32 [n, n_values, ...], contiguous
    //   weights  F32 [1, n_values, ...], likewise
    ggml_tensor * build_sum(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) const;
};

// Tensors and the memory that they lie in.
using llama_h2o_memory = std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>;

// Makes the tensors that are missing, all zero but for the weights. Throws std::bad_alloc.
//   n_tokens   most tokens of a graph
//   n_moves    most rows of a head that a compaction moves
//   collected  takes the memory of what the policy collects: it belongs to the cache
//   weights    and that of the weights
void llama_h2o_alloc_tensors(std::vector<llama_h2o_layer> & layers,
        const llama_h2o_policy & policy,
        uint32_t n_stream,
        uint32_t n_tokens,
        uint32_t n_moves,
        std::vector<llama_h2o_memory> & collected,
        std::vector<llama_h2o_memory> & weights);

// Memory that is neither the host's nor a rearranged part of it.
bool llama_h2o_is_on_device(ggml_backend_buffer_type_t buft);

// Whether the device of a tensor's memory has an op.
bool llama_h2o_has_op(const ggml_tensor * tensor, const ggml_tensor * op);
