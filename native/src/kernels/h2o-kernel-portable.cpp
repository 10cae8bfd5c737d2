// The kernel in plain C++, for every processor.

#define H2O_PORTABLE

#include "kernels/h2o-kernel-impl.h"

static const llama_h2o_kernel kernel = make_kernel("portable", nullptr, true);

const llama_h2o_kernel * const llama_h2o_kernel_portable = &kernel;

size_t llama_h2o_work_size(const llama_h2o_attention & a) {
    const size_t few = few_sizes(a, llama_h2o_attention::MAX_FEW_ROWS).size();

    return a.is_few() ? few : std::max(few, many_work::size(a));
}

size_t llama_h2o_alongside_size(const llama_h2o_attention & a) {
    return a.n_slots * alongside_work::size(a);
}
