#include "cache/h2o-query-ring.h"

#include <algorithm>

void llama_h2o_query_ring::note(int32_t p_first, int32_t p_last, int32_t shift) {
    const int32_t n_slots = int32_t(all.size());

    for (int32_t p = std::max(p_first, p_last - n_slots + 1); n_slots > 0 && p <= p_last; ++p) {
        all[p % n_slots] = { p, p - shift };
    }
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
