// The cache of the layers that see a window or a chunk of the text. It is bounded already, so nothing is evicted from it;
// what is done to the text is done to it as well.

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

    // finds out how the keys that are about to be stored were rotated
    void watch_keys(const ggml_tensor * k_cur, int32_t il);

    // whether its keys can be rotated on
    bool can_rotate() const {
        return std::all_of(layers.begin(), layers.end(),
                [](const llama_h2o_layer & layer) { return layer.rope && layer.rope->known; });
    }

    // First position of the tail that can be removed: what a query there would look at must still be in the window.
    llama_pos removable(uint32_t s) const;

    // Whether it has the rows that the next token would look at, and no position twice.
    bool is_whole(uint32_t s) const;

    std::vector<llama_h2o_layer> layers; // nothing is collected of them
    llama_h2o_cells cells;

private:
    const llama_hparams & hparams;
};
