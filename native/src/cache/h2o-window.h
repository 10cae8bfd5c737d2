// The cache of the layers that see a window or a chunk of the text. It is bounded already, so nothing is evicted from it;
// what is done to the text is done to it as well.

#pragma once

#include "cache/h2o-cells.h"

#include "llama-hparams.h"

#include <cstdint>

class llama_kv_cache;
struct llama_context;

class llama_h2o_window {
public:
    llama_h2o_window(llama_kv_cache & kv, llama_h2o_cells cells, const llama_hparams & hparams) :
        kv(kv), cells(cells), hparams(hparams) {}

    // Cells that it needs: llama.cpp gives it no more than the evicted cache has.
    static uint32_t n_cells_needed(const llama_hparams & hparams, uint32_t n_seqs_of_stream, uint32_t n_ubatch);

    // whether its keys can be rotated on
    bool can_turn() const;

    // Rotates its keys back as a re-base does, all by the same. Throws std::exception; nobody knows then which were.
    void turn_back(llama_context & ctx, uint32_t s, llama_pos back);

    // First position of the tail that can be removed: what a query there would look at must still be in the window.
    llama_pos removable(uint32_t s) const;

private:
    llama_kv_cache & kv;
    llama_h2o_cells cells;
    const llama_hparams & hparams;
};
