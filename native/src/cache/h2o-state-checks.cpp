#include "cache/h2o-state-checks.h"

#include "llama-impl.h"

#include <stdexcept>

void llama_h2o_expect(bool fits, const char * what) {
    if (!fits) {
        throw std::runtime_error(format("the state does not fit: it has %s", what));
    }
}

void llama_h2o_expect_queries(const std::vector<llama_h2o_query_slot> & slots, int32_t newest, int32_t shift) {
    const int64_t n_slots = slots.size();

    for (int64_t i = 0; i < n_slots; ++i) {
        const auto & slot = slots[i];

        const bool is_last = slot.pos <= newest && slot.pos > newest - n_slots;
        const bool is_here = slot.pos >= 0 && slot.pos % n_slots == i && slot.rope_pos == slot.pos - shift;
        llama_h2o_expect(slot.pos == -1 || (is_last && is_here), "queries that are out of range");
    }
}
