#include "cache/h2o-query-ring.h"

#include <algorithm>

void llama_h2o_query_ring::note(int32_t p_first, int32_t p_last, int32_t shift) {
    const int32_t n_slots = int32_t(all.size());

    for (int32_t p = std::max(p_first, p_last - n_slots + 1); n_slots > 0 && p <= p_last; ++p) {
        all[p % n_slots] = { p, p - shift };
    }
}

std::vector<uint32_t> llama_h2o_query_ring::find_last(uint32_t n_tokens, uint32_t n_most) const {
    std::vector<uint32_t> slots;
    for (uint32_t i = 0; i < all.size(); ++i) {
        if (all[i].pos >= 0) {
            slots.push_back(i);
        }
    }
    std::sort(slots.begin(), slots.end(), [&](uint32_t a, uint32_t b) { return all[a].pos > all[b].pos; });

    const size_t n_last = std::min(slots.size(), size_t(n_tokens));
    const size_t n_some = std::min(n_last, size_t(n_most));

    std::vector<uint32_t> some(n_some);
    for (size_t i = 0; i < n_some; ++i) {
        some[n_some - 1 - i] = slots[i * n_last / n_some];
    }

    return some;
}

void llama_h2o_query_ring::forget(int32_t p0) {
    for (auto & slot : all) {
        if (slot.pos >= p0 || slot.pos < 0) { // also what a state that was refused has left
            slot.pos = -1;
        }
    }
}

std::vector<uint32_t> llama_h2o_query_ring::turn_back(int32_t back) {
    std::vector<uint32_t> turned;
    for (uint32_t i = 0; i < all.size(); ++i) {
        if (all[i].pos >= 0) {
            all[i].rope_pos -= back;
            turned.push_back(i);
        }
    }

    return turned;
}
