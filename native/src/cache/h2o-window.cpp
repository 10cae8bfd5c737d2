#include "cache/h2o-window.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <stdexcept>

uint32_t llama_h2o_window::n_cells_needed(
        const llama_hparams & hparams, uint32_t n_seqs_of_stream, uint32_t n_ubatch) {
    static constexpr uint32_t N_PAD = 256; // as llama_kv_cache_iswa pads it

    return GGML_PAD(hparams.n_swa * n_seqs_of_stream + n_ubatch, N_PAD);
}

bool llama_h2o_window::can_turn() const {
    return kv.get_can_shift();
}

// llama.cpp rotates keys when it shifts positions. Here the positions stay those of the text.
void llama_h2o_window::turn_back(llama_context & ctx, uint32_t s, llama_pos back) {
    cells.shift(s, -back);

    const bool turned = kv.update(&ctx, true, {});

    cells.shift(s, back);
    cells.forget_shifts(s);

    if (!turned) {
        throw std::runtime_error("the keys of the window could not be rotated");
    }
}

llama_pos llama_h2o_window::removable(uint32_t s) const {
    const llama_pos first = cells[s].seq_pos_min(llama_seq_id(s));
    if (first <= 0) {
        return 0;
    }

    // the last row that is gone is behind the window from some position on
    llama_pos seen   = first - 1;
    llama_pos unseen = first - 1 + llama_pos(hparams.n_swa);
    while (unseen - seen > 1) {
        const llama_pos middle = seen + (unseen - seen) / 2;

        const bool masked = llama_hparams::is_masked_swa(hparams.n_swa, hparams.swa_type, first - 1, middle);
        (masked ? unseen : seen) = middle;
    }

    return unseen;
}
