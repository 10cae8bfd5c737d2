// Chooses the rows to keep, one block per KV head, with the same result as on the CPU: scores are 64-bit quotients, whose k-th best
// is found eleven bits at a time. Sums below 2^-126 are flushed to zero, as in all sums on the device.

#pragma once

#include "cuda/h2o-cuda-kth.cuh"
#include "cuda/h2o-cuda.h"

#include "ggml-cuda/common.cuh"

namespace {

constexpr uint32_t MAX_CHOOSERS = 1024; // threads of a block

// Maps doubles to integers with the same order.
__device__ inline uint64_t key_of(double x) {
    const uint64_t bits = uint64_t(__double_as_longlong(x + 0.0)); // -0 to 0

    return bits >> 63 ? ~bits : bits | uint64_t(1) << 63;
}

// grid [n_heads]
__global__ void __launch_bounds__(MAX_CHOOSERS) choose_rows(const llama_h2o_device_choice a) {
    __shared__ uint32_t n_safe;
    __shared__ uint32_t n_competing;

    ggml_cuda_pdl_sync(); // the previous kernel may still be running

    const int32_t * how = a.pos + size_t(a.n_heads) * a.n_cells;
    const auto n_keep   = uint32_t(how[0]);
    const int32_t end   = how[1];

    const int32_t * pos = a.pos + size_t(blockIdx.x) * a.n_cells;
    const float * sums  = a.sums + size_t(blockIdx.x) * a.n_cells;
    uint32_t * bits     = a.bits + size_t(blockIdx.x) * (a.n_words() + 1);
    uint32_t & refused  = bits[a.n_words()];

    const auto key_at = [&](uint32_t i) {
        return key_of(double(sums[i]) / a.divisors[min(uint32_t(end - pos[i]), a.n_ages - 1)]);
    };

    if (threadIdx.x == 0) {
        n_safe = n_competing = refused = 0;
    }
    __syncthreads();
    uint32_t n[2] = {};
    for (uint32_t i = threadIdx.x; i < a.n_cells; i += blockDim.x) {
        if (pos[i] == LLAMA_H2O_DEVICE_UNUSED) {
            continue;
        }
        n[0] += pos[i] < 0;
        n[1] += pos[i] >= 0;
        if ((__float_as_uint(sums[i]) & 0x7f800000) == 0x7f800000) {
            refused = 1;
        }
    }
    atomicAdd(&n_safe, n[0]);
    atomicAdd(&n_competing, n[1]);
    __syncthreads();

    // of equal scores the newer position is kept
    uint32_t n_left     = min(n_keep - min(n_keep, n_safe), n_competing);
    const bool has_last = n_left > 0;
    const auto last     = find_last<uint64_t>(a.n_cells, n_left, [&](uint32_t i, uint64_t & key) {
        key = pos[i] >= 0 ? key_at(i) : 0;
        return pos[i] >= 0;
    });
    const auto last_pos = int32_t(find_last<uint32_t>(a.n_cells, n_left, [&](uint32_t i, uint32_t & key) {
        key = uint32_t(pos[i]);
        return pos[i] >= 0 && key_at(i) == last;
    }));

    for (uint32_t i = threadIdx.x; i < 32 * a.n_words(); i += blockDim.x) {
        const int32_t p    = i < a.n_cells ? pos[i] : LLAMA_H2O_DEVICE_UNUSED;
        const uint64_t key = p >= 0 ? key_at(i) : 0;
        const bool stays =
                p >= 0 ? has_last && (key > last || (key == last && p >= last_pos)) : p == LLAMA_H2O_DEVICE_SAFE;

        const uint32_t word = __ballot_sync(0xffffffff, stays);
        if (i % 32 == 0) {
            bits[i / 32] = word;
        }
    }
}

} // namespace
