// The kernel, written once for vectors of any width. Included by one source file per instruction set.

#pragma once

#include "kernels/h2o-kernel-alongside.h"
#include "kernels/h2o-kernel-few-retrieved.h"
#include "kernels/h2o-kernel-many.h"
#include "kernels/h2o-processor.h"
#include "kernels/h2o-rotation-impl.h"

namespace {

using share_of_step = void(const llama_h2o_attention & a, uint32_t ith, uint32_t nth);

template <share_of_step FEW, share_of_step MANY = FEW>
void in_slots(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    if (ith < a.n_slots) {
        (a.is_few() ? FEW : MANY)(a, ith, min_u32(nth, a.n_slots));
    }
}

// The kernel of the including file.
constexpr llama_h2o_kernel make_kernel(const char * name, bool (*can_run)(), bool is_exact) {
    return { name, can_run, W, is_exact, in_slots<few_attend, many_attend>, in_slots<few_search>,
        in_slots<few_retrieved>, in_slots<few_combine, many_combine>, in_slots<alongside_attend>, encode_page,
        rotate_key };
}

} // namespace
