#include "cache/h2o-collected.h"

#include "llama-context.h"

#include <algorithm>

llama_h2o_collected::llama_h2o_collected(llama_h2o_parts & parts, uint32_t s, bool but_chosen) :
    parts(parts), stream(parts.streams[s]), n_cells(parts.n_cells) {
    for (const auto & layer : parts.layers) {
        ggml_tensor * sums = layer.tensors.scores->view_src;
        if (!but_chosen || !layer.tensors.choice.bits) {
            rows.try_emplace(sums, sums, s, layer.tensors.space);
        }
    }
}

float llama_h2o_collected::decay(llama_pos pos) {
    const auto remaining = float(parts.policy->remaining(std::max<int64_t>(0, int64_t(pos) - stream.pos_decayed)));

    stream.pos_decayed = pos;
    for_each([&](float * sums) {
        for (size_t i = 0; i < n_cells && remaining != 1.0f; ++i) {
            sums[i] *= remaining;
        }
    });

    return remaining;
}

void llama_h2o_collected::commit() {
    for (auto & [sums, some] : rows) {
        some.commit();
    }
    rows.clear();
}

void llama_h2o_keep_credit_small(llama_h2o_parts & parts, uint32_t s, llama_pos p_last) {
    constexpr double MOST_HALF_LIVES = 40;

    const int64_t n_tokens = int64_t(p_last) - parts.streams[s].pos_decayed;
    if (!parts.policy->weighs() || double(n_tokens) <= MOST_HALF_LIVES * parts.policy->half_life) {
        return;
    }

    parts.ctx.synchronize();

    llama_h2o_collected(parts, s).decay(p_last);
}

void llama_h2o_reset_free_cells(llama_h2o_parts & parts, uint32_t s) {
    const auto & cells = parts.cells[s];

    parts.ctx.synchronize();

    llama_h2o_collected(parts, s).for_each([&](float * sums) {
        for (uint32_t i = 0; i < cells.size(); ++i) {
            sums[i] = cells.is_empty(i) ? 0.0f : sums[i];
        }
    });

    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (cells.is_empty(i)) {
            parts.streams[s].rows.unlist(i);
        }
    }

    parts.streams[s].stale = false;
}
