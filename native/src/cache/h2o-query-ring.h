// Whose queries lie in the ring of the last ones: that of position p in slot p % n_slots. Knows nothing of tensors.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_h2o_query_slot {
    int32_t pos      = -1; // of the text; -1: nobody's
    int32_t rope_pos = 0;  // what it is rotated to
};

class llama_h2o_query_ring {
public:
    explicit llama_h2o_query_ring(uint32_t n_slots) : all(n_slots) {}

    size_t size() const { return all.size(); }

    const std::vector<llama_h2o_query_slot> & slots() const { return all; }
    void set_slots(const std::vector<llama_h2o_query_slot> & slots) { all = slots; }

    // the queries of these positions come, rotated to positions that are smaller by `shift`
    void note(int32_t p_first, int32_t p_last, int32_t shift);

    // those from a position on are gone
    void forget(int32_t p0);

    // Rotates all back, but packs none of them: a query has no place among the rows. Returns their slots.
    std::vector<uint32_t> turn_back(int32_t back);

private:
    std::vector<llama_h2o_query_slot> all;
};
