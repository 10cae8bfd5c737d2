#include "kernels/h2o-kernel.h"

#include <array>
#include <cstring>

// fastest first
static std::array<const llama_h2o_kernel *, 5> all_kernels() {
    return {
        llama_h2o_kernel_avx512bf16,
        llama_h2o_kernel_avx512,
        llama_h2o_kernel_avx2,
        llama_h2o_kernel_neon,
        llama_h2o_kernel_portable,
    };
}

static bool can_run(const llama_h2o_kernel * kernel) {
    return kernel && (!kernel->can_run || kernel->can_run());
}

const llama_h2o_kernel * llama_h2o_find_kernel(const char * name) {
    for (const auto * kernel : all_kernels()) {
        if (can_run(kernel) && std::strcmp(kernel->name, name) == 0) {
            return kernel;
        }
    }

    return nullptr;
}

const llama_h2o_kernel * llama_h2o_best_kernel(uint32_t n_embd_head_k, uint32_t n_embd_head_v) {
    for (const auto * kernel : all_kernels()) {
        if (!can_run(kernel) || !kernel->is_exact) {
            continue;
        }
        if (n_embd_head_k % kernel->n_lanes == 0 && n_embd_head_v % kernel->n_lanes == 0) {
            return kernel;
        }
    }

    return nullptr;
}
