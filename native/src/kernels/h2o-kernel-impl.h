// The kernel, written once for vectors of any width. Included by one source file per instruction set.

#pragma once

#include "kernels/h2o-kernel-few.h"
#include "kernels/h2o-kernel-many.h"
#include "kernels/h2o-scan-impl.h"

namespace {

void attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    nth = min_u32(nth, a.n_slots);
    if (ith < nth) {
        a.is_few() ? few_attend(a, ith, nth) : many_attend(a, ith, nth);
    }
}

void combine(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    nth = min_u32(nth, a.n_slots);
    if (ith < nth) {
        a.is_few() ? few_combine(a, ith, nth) : many_combine(a, ith, nth);
    }
}

} // namespace
