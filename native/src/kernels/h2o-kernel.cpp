#include "kernels/h2o-kernel.h"

#include "kernels/h2o-processor.h"

#include <algorithm>
#include <array>
#include <cstring>

// from the fastest down
static std::array<const llama_h2o_kernel *, 5> all_kernels() {
    return {
        llama_h2o_kernel_avx512bf16,
        llama_h2o_kernel_avx512,
        llama_h2o_kernel_avx2,
        llama_h2o_kernel_neon,
        llama_h2o_kernel_portable,
    };
}

// Whether this build has a kernel, and this machine its instructions.
static bool can_run(const llama_h2o_kernel * kernel) {
    if (!kernel) {
        return false;
    }
    if (kernel == llama_h2o_kernel_avx512bf16) {
        return llama_h2o_has_avx512bf16();
    }
    if (kernel == llama_h2o_kernel_avx512) {
        return llama_h2o_has_avx512();
    }
    if (kernel == llama_h2o_kernel_avx2) {
        return llama_h2o_has_avx2();
    }

    return true;
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
