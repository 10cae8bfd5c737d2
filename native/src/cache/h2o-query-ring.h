// Positions in the ring buffer of the last queries: position p has slot p % n_slots. Independent of tensors.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_h2o_query_slot {
    int32_t pos      = -1; // of the text; -1: empty
    int32_t rope_pos = 0;  // RoPE position
};

struct llama_h2o_query_ring {
    explicit llama_h2o_query_ring(uint32_t n_slots) : slots(n_slots) {}

    // records queries of these positions, rotated to rope_pos(p)
    template <typename F>
    void note(int32_t p_first, int32_t p_last, F rope_pos) {
        const int32_t n_slots = int32_t(slots.size());

        for (int32_t p = std::max(p_first, p_last - n_slots + 1); n_slots > 0 && p <= p_last; ++p) {
            slots[p % n_slots] = { p, rope_pos(p) };
        }
    }

    // drops queries from a position on
    void drop(int32_t p0) {
        for (auto & slot : slots) {
            if (slot.pos >= p0 || slot.pos < 0) { // also invalid positions of a rejected state
                slot.pos = -1;
            }
        }
    }

    // Lowers the RoPE positions of all queries and returns their slots. They may become negative: queries share no positions
    // with rows, so they are not packed at the start.
    std::vector<uint32_t> rotate_back(int32_t back) {
        std::vector<uint32_t> rotated;
        for (uint32_t i = 0; i < slots.size(); ++i) {
            if (slots[i].pos >= 0) {
                slots[i].rope_pos -= back;
                rotated.push_back(i);
            }
        }

        return rotated;
    }

    std::vector<llama_h2o_query_slot> slots;
};
