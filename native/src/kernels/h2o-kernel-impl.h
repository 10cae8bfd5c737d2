// The kernel, written once for vectors of any width. Included by one source file per instruction set.

#pragma once

#include "kernels/h2o-kernel-beside.h"
#include "kernels/h2o-kernel-few.h"
#include "kernels/h2o-kernel-many.h"
#include "kernels/h2o-turn-impl.h"

namespace {

// The parts are as many whatever number of threads there is: results do not depend on that.
void attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    for (uint32_t slot = ith; slot < a.n_slots; slot += nth) {
        a.is_few() ? few_attend(a, slot, a.n_slots) : many_attend(a, slot, a.n_slots);
    }
}

void look(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    for (uint32_t slot = ith; slot < a.n_slots; slot += nth) {
        few_look(a, slot, a.n_slots);
    }
}

void found(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    for (uint32_t slot = ith; slot < a.n_slots; slot += nth) {
        few_found(a, slot, a.n_slots);
    }
}

void combine(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    for (uint32_t slot = ith; slot < a.n_slots; slot += nth) {
        a.is_few() ? few_combine(a, slot, a.n_slots) : many_combine(a, slot, a.n_slots);
    }
}

void beside(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    for (uint32_t slot = ith; slot < a.n_slots; slot += nth) {
        beside_attend(a, slot, a.n_slots);
    }
}

} // namespace
