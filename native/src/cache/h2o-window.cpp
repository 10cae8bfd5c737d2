#include "cache/h2o-window.h"

#include <algorithm>
#include <stdexcept>

uint32_t llama_h2o_window::n_cells_needed(const llama_hparams & hparams, uint32_t n_seqs_of_stream, uint32_t n_ubatch) {
    static constexpr uint32_t N_PAD = 256; // as llama_kv_cache_iswa pads it

    return GGML_PAD(hparams.n_swa * n_seqs_of_stream + n_ubatch, N_PAD);
}

void llama_h2o_window::watch_keys(const ggml_tensor * k_cur, int32_t il) {
    for (auto & layer : layers) {
        if (int32_t(layer.shape.il) == il && !layer.rope) {
            layer.rope = llama_h2o_read_rope(k_cur);
        }
    }
}

bool llama_h2o_window::can_turn() const {
    return std::all_of(layers.begin(), layers.end(),
            [](const llama_h2o_layer & layer) { return layer.rope && layer.rope->known; });
}

llama_pos llama_h2o_window::removable(uint32_t s) const {
    const llama_pos first = cells[s].seq_pos_min(llama_seq_id(s));
    if (first <= 0) {
        return 0;
    }

    // the last row that is gone is behind the window from some position on
    llama_pos seen   = first - 1;
    llama_pos unseen = llama_pos(std::min<int64_t>(int64_t(seen) + hparams.n_swa, LLAMA_H2O_MOST_POSITIONS));
    while (unseen - seen > 1) {
        const llama_pos middle = seen + (unseen - seen) / 2;

        const bool masked        = llama_hparams::is_masked_swa(hparams.n_swa, hparams.swa_type, first - 1, middle);
        (masked ? unseen : seen) = middle;
    }

    return unseen;
}

bool llama_h2o_window::is_whole(uint32_t s) const {
    std::vector<llama_pos> pos = cells.positions(s, cells.used(s));
    std::sort(pos.begin(), pos.end());

    const bool is_gapless = std::adjacent_find(pos.begin(), pos.end(),
                                    [](llama_pos a, llama_pos b) { return b - a != 1; }) == pos.end();

    return is_gapless && removable(s) <= cells.newest(s) + 1;
}

void llama_h2o_window::check_state(llama_state_seq_flags flags) {
    if (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) {
        throw std::runtime_error("with eviction, a window is saved and restored with the whole state only");
    }
}
