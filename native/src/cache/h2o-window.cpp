#include "cache/h2o-window.h"

#include <algorithm>

void llama_h2o_window::watch_keys(const ggml_tensor * k_cur, int32_t il) {
    for (auto & layer : layers) {
        if (int32_t(layer.shape.il) == il && !layer.rope) {
            layer.rope = llama_h2o_read_rope(k_cur);
        }
    }
}

llama_pos llama_h2o_window::removable(uint32_t s) const {
    const llama_pos first = cells[s].seq_pos_min(llama_seq_id(s));
    if (first <= 0) {
        return 0;
    }

    // removed rows are outside the window of later positions
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
