// The cache of the layers with sliding-window or chunked attention. Its size is limited anyway, so nothing is evicted from it.
// Re-bases and removals apply to it, too.

#pragma once

#include "cache/h2o-cells.h"
#include "cache/h2o-layer.h"

#include "llama-hparams.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

class llama_h2o_window {
public:
    llama_h2o_window(std::vector<llama_h2o_layer> layers, llama_h2o_cells cells, const llama_hparams & hparams) :
        layers(std::move(layers)), cells(cells), hparams(hparams) {}

    // reads from the graph how the keys that it stores are rotated
    void watch_keys(const ggml_tensor * k_cur, int32_t il);

    // whether its stored keys can be rotated
    bool can_rotate() const {
        return std::all_of(layers.begin(), layers.end(),
                [](const llama_h2o_layer & layer) { return layer.rope && layer.rope->known; });
    }

    // Start of the tail that can be removed: the window must still hold all rows that a query there attends to.
    llama_pos removable(uint32_t s) const;

    // Whether it holds all rows that the next token attends to, and no position twice.
    bool is_whole(uint32_t s) const;

    std::vector<llama_h2o_layer> layers; // without scores
    llama_h2o_cells cells;

private:
    const llama_hparams & hparams;
};
