#include "cache/h2o-collected.h"

#include "llama-context.h"

#include <algorithm>

llama_h2o_collected::llama_h2o_collected(llama_h2o_parts & parts, uint32_t s) :
    parts(parts), stream(parts.streams[s]), n_cells(parts.n_cells) {
    for (const auto & layer : parts.layers) {
        rows[0].emplace_back(layer.tensors.scores, s);
        if (layer.tensors.squares) {
            rows[1].emplace_back(layer.tensors.squares, s);
        }
    }
}

void llama_h2o_collected::forget(llama_pos pos) {
    const double remaining = parts.policy->remaining(std::max<int64_t>(0, int64_t(pos) - stream.pos_forgotten));

    stream.pos_forgotten = pos;
    if (remaining == 1.0) {
        return;
    }

    for (auto & of_layers : rows) {
        for (size_t ikv = 0; ikv < of_layers.size(); ++ikv) {
            const size_t n = parts.layers[ikv].shape.n_head_kv * n_cells;
            for (size_t i = 0; i < n; ++i) {
                of_layers[ikv].f32()[i] *= float(remaining);
            }
        }
    }
    commit(); // a compaction that fails keeps this
}

void llama_h2o_collected::commit() {
    for (auto & of_layers : rows) {
        for (auto & of_layer : of_layers) {
            of_layer.commit();
        }
    }
}

void llama_h2o_keep_credit_small(llama_h2o_parts & parts, uint32_t s, llama_pos p_last) {
    constexpr double MOST_HALF_LIVES = 40;

    const int64_t n_tokens = int64_t(p_last) - parts.streams[s].pos_forgotten;
    if (!parts.policy->weighs() || double(n_tokens) <= MOST_HALF_LIVES * parts.policy->half_life) {
        return;
    }

    parts.ctx.synchronize();

    llama_h2o_collected collected(parts, s);
    collected.forget(p_last);
}

void llama_h2o_reset_free_cells(llama_h2o_parts & parts, uint32_t s) {
    const auto & cells = parts.cells[s];

    parts.ctx.synchronize();

    llama_h2o_collected collected(parts, s);

    const auto reset = [&](float * sums) {
        for (uint32_t i = 0; i < cells.size() && sums; ++i) {
            sums[i] = cells.is_empty(i) ? 0.0f : sums[i];
        }
    };
    for (size_t ikv = 0; ikv < parts.layers.size(); ++ikv) {
        for (uint32_t head = 0; head < parts.layers[ikv].shape.n_head_kv; ++head) {
            reset(collected.scores(ikv, head));
            reset(collected.squares(ikv, head));
        }
    }
    collected.commit();

    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (cells.is_empty(i)) {
            parts.streams[s].rows.unlist(i);
        }
    }

    parts.streams[s].stale = false;
}
