#include "cache/h2o-device-choice.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-dropping.h"
#include "cache/h2o-parallel.h"
#include "cuda/h2o-cuda.h"
#include "graph/h2o-fused.h"

#include "llama-context.h"

#include <algorithm>
#include <stdexcept>

bool llama_h2o_asks_devices(const llama_h2o_parts & parts, uint32_t s, const llama_h2o_rule & rule) {
    // the table of divisors is limited; they must be constant above its last age
    const auto is_able = [&](const llama_h2o_layer & layer) {
        const ggml_tensor * divisors = layer.tensors.choice.divisors;

        return divisors && parts.policy->divisor(double(rule.newest + 1)) ==
                                   parts.policy->divisor(double(std::min(rule.newest + 1, divisors->ne[0] - 1)));
    };

    // the device supports neither segments, nor rows to restore, nor dropped rows
    return rule.starts.empty() && std::any_of(parts.layers.begin(), parts.layers.end(), is_able) &&
           !llama_h2o_has_missing(parts, s) && !llama_h2o_holds_dropped(parts, s);
}

// Calls fn(tensors) for each device that chooses, with the tensors of one of its layers.
template <typename F>
static void for_each_device(const llama_h2o_parts & parts, F fn) {
    for (const auto & layer : parts.layers) {
        if (layer.tensors.choice.bits && layer.tensors.scores->view_offs == 0) {
            fn(layer.tensors);
        }
    }
}

// Calls fn(h, data) for all heads of a layer whose device chooses, with the address of its `size` words in the space.
template <typename F>
static void for_each_head(const llama_h2o_layer & layer, size_t size, F fn) {
    const auto & tensors = layer.tensors;
    for (uint32_t head = 0; head < layer.shape.n_head_kv && tensors.choice.bits; ++head) {
        const size_t place = tensors.scores->view_offs / tensors.scores->nb[1] + head;
        fn(layer.shape.first_head + head, static_cast<int32_t *>(tensors.space) + place * size);
    }
}

void llama_h2o_ask_devices(const llama_h2o_parts & parts,
        uint32_t s,
        const llama_h2o_rule & rule,
        const std::vector<uint32_t> & used,
        float remaining) {
    const size_t n_cells = parts.n_cells;

    llama_h2o_parallel(
            parts.layers.size(), parts.n_heads() * used.size(), parts.ctx.get_cparams().n_threads, [&](size_t ikv) {
                for_each_head(parts.layers[ikv], n_cells, [&](uint32_t h, int32_t * pos) {
                    const int32_t * text = parts.streams[s].rows.text_list(h);
                    std::fill_n(pos, n_cells, LLAMA_H2O_DEVICE_UNUSED);
                    for (const uint32_t cell : used) {
                        const bool competes = rule.standing(text[cell]) == LLAMA_H2O_COMPETING;

                        pos[cell] = competes ? text[cell] : LLAMA_H2O_DEVICE_SAFE;
                    }
                });
            });

    llama_h2o_cache_graph graph(parts.layers.size());
    for_each_device(parts, [&](const llama_h2o_layer_tensors & tensors) {
        const llama_h2o_choice_tensors & choice = tensors.choice;

        int32_t * behind = static_cast<int32_t *>(tensors.space) + choice.bits->ne[1] * n_cells;
        behind[0]        = int32_t(rule.n_budget);
        behind[1]        = int32_t(rule.newest + 1);
        ggml_backend_tensor_set(choice.pos, tensors.space, 0, ggml_nbytes(choice.pos));

        ggml_tensor * sums = tensors.scores->view_src;
        sums = ggml_view_2d(graph.get_ctx(), sums, sums->ne[0], sums->ne[1], sums->nb[1], sums->nb[2] * s);
        if (remaining != 1.0f) {
            sums = ggml_scale_inplace(graph.get_ctx(), sums, remaining);
        }
        graph.add(llama_h2o_build_choice(graph.get_ctx(), choice, sums));
    });
    parts.graphs.run(graph);
}

void llama_h2o_read_answers(const llama_h2o_parts & parts, llama_h2o_keep & keep) {
    for_each_device(parts, [&](const llama_h2o_layer_tensors & tensors) {
        ggml_backend_tensor_get(tensors.choice.bits, tensors.space, 0, ggml_nbytes(tensors.choice.bits));
    });
    for (const auto & layer : parts.layers) {
        for_each_head(layer, keep.n_words + 1, [&](uint32_t h, const int32_t * bits) {
            if (bits[keep.n_words] != 0) {
                throw std::runtime_error("the attention of the model is infinite or no number");
            }
            std::copy_n(bits, keep.n_words, keep.head(h));
        });
    }
}
