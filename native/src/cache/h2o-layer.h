// A layer of the cache: its shape, its tensors, and how the graph computes its attention.

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

// Constant for the lifetime of the cache.
struct llama_h2o_layer_shape {
    uint32_t il;         // layer of the model
    uint32_t n_head;     // query heads
    uint32_t n_head_kv;  // KV heads
    uint32_t first_head; // KV heads of all earlier layers

    llama_h2o_row_layout k;
    llama_h2o_row_layout v;

    bool on_host; // whether the host moves the rows: they are in host memory, or their device cannot

    uint32_t n_group() const { return n_head / n_head_kv; }
};

// For layers whose device chooses the rows to keep; all null if the host does.
struct llama_h2o_choice_tensors {
    ggml_tensor * divisors = nullptr; // F64 [n_ages], from the policy
    ggml_tensor * pos      = nullptr; // I32 [n_heads*n_cells + 2] for one stream, see h2o-cuda.h
    ggml_tensor * bits     = nullptr; // I32 [n_words + 1, n_heads]
};

// Tensors in the memory of the layer's device, for all streams.
struct llama_h2o_layer_tensors {
    ggml_tensor * k; // of the cache, like v
    ggml_tensor * v; // null where the first elements of a latent row (MLA) are V

    // views of one tensor for all layers in this memory, so that one copy transfers a stream
    ggml_tensor * scores  = nullptr; // F32 [n_cells, n_head_kv, n_stream]
    ggml_tensor * squares = nullptr; // F32, the same for squared probabilities; null unless the policy needs them

    ggml_tensor * queries = nullptr; // F32 [n_embd_head_k, n_queries, n_head, n_stream], the last ones; may be null
    ggml_tensor * weights =
            nullptr; // F32 [n_ubatch*n_head], all n_head_kv/n_head: turn sums into means over a KV group

    // shared by all layers on this device; null in host memory
    ggml_tensor * moves = nullptr; // I32: sources and destinations of the rows that a compaction moves
    void * space = nullptr; // pinned host memory for a stream of sums or positions: copies to the device are faster
    llama_h2o_choice_tensors choice;

    size_t size_of_collected() const;

    // Calls fn(tensor, offset, size) for everything that the policy has collected of a stream in the first n_span cells.
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
    // constant after attach
    bool collects                   = false;   // whether the graph adds to the scores
    const llama_h2o_kernel * kernel = nullptr; // computes attention and scores in one CPU op
    bool on_cuda                    = false;   // whether our CUDA kernels compute both
    bool on_tensor_cores            = false;   // and the scores of many queries

    // how the last graph computes attention
    bool fused           = false; // in one op of ours, not with ggml's ops
    float kq_scale       = 0.0f;
    float kq_cap         = 0.0f; // 0: none
    ggml_tensor * sinks  = nullptr;
    ggml_tensor * credit = nullptr; // null unless the policy weights queries

    // search of the archive, for the streams of the last graph; no search if texts is empty
    llama_h2o_search search = {};
    std::vector<const llama_h2o_search_text *> texts;

    // attention to retrieved rows if ggml's ops compute that to the cells, see h2o-retrieved.h; may be null
    ggml_tensor * retrieved = nullptr;

    const llama_h2o_search * searched() const { return texts.empty() ? nullptr : &search; }

    // attention probabilities in the last graph: F32 [n_kv, n_tokens, n_head, n_stream]
    ggml_tensor * build_probs(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * kq_mask) const;
};

struct llama_h2o_layer {
    llama_h2o_layer_shape shape;
    llama_h2o_layer_tensors tensors;
    llama_h2o_layer_attention attention;

    std::optional<llama_h2o_rope> rope = std::nullopt; // rotation of the keys; unset until the first graph is built

    // the tensors of the rows: K and V, or only K (MLA)
    std::vector<std::pair<ggml_tensor *, llama_h2o_row_layout>> rows() const;

    // sums over dim 1, [n, 1, ...], on the device of the scores
    //   values   F32 [n, n_values, ...], contiguous
    //   weights  F32 [1, n_values, ...], contiguous
    ggml_tensor * build_sum(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) const;
};

// Tensors and their memory.
using llama_h2o_memory = std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>;

// Allocates missing tensors. All are zero except the weights. Throws std::bad_alloc.
//   n_tokens   maximum tokens of a graph
//   n_moves    maximum rows per head that a compaction moves
//   collected  receives the memory for the collected scores, which the cache owns
//   weights    receives the memory of the weights
void llama_h2o_alloc_tensors(std::vector<llama_h2o_layer> & layers,
        const llama_h2o_policy & policy,
        uint32_t n_stream,
        uint32_t n_tokens,
        uint32_t n_moves,
        std::vector<llama_h2o_memory> & collected,
        std::vector<llama_h2o_memory> & weights);

// Whether memory of this type is on a device. Host memory with repacked weights is not.
bool llama_h2o_is_on_device(ggml_backend_buffer_type_t buft);

// Whether the device that holds a tensor supports an op.
bool llama_h2o_has_op(const ggml_tensor * tensor, const ggml_tensor * op);
