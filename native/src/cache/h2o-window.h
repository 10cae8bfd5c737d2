// The cache of the layers that see a window or a chunk of the text. It is bounded already, so nothing is evicted from it;
// what is done to the text is done to it as well.

#pragma once

#include "cache/h2o-cells.h"
#include "cache/h2o-layer.h"

#include "llama-hparams.h"

#include <cstdint>
#include <utility>
#include <vector>

class llama_h2o_window {
public:
    llama_h2o_window(std::vector<llama_h2o_layer> layers, llama_h2o_cells cells, const llama_hparams & hparams) :
        layers(std::move(layers)), cells(cells), hparams(hparams) {}

    // Cells that it needs: llama.cpp gives it no more than the evicted cache has.
    static uint32_t n_cells_needed(const llama_hparams & hparams, uint32_t n_seqs_of_stream, uint32_t n_ubatch);

    // finds out how the keys that are about to be stored were rotated
    void watch_keys(const ggml_tensor * k_cur, int32_t il);

    // whether its keys can be rotated on
    bool can_turn() const;

    // First position of the tail that can be removed: what a query there would look at must still be in the window.
    llama_pos removable(uint32_t s) const;

    // Whether it has the rows that the next token would look at, and no position twice.
    bool is_whole(uint32_t s) const;

    // Throws where the window is to be saved or restored without the rest, whose re-bases it follows.
    static void check_state(llama_state_seq_flags flags);

    std::vector<llama_h2o_layer> layers; // nothing is collected of them
    llama_h2o_cells cells;

private:
    const llama_hparams & hparams;
};
