// The k-th best of many keys, by all threads of a block.

#pragma once

#include "ggml-cuda/common.cuh"

#include <cstdint>

namespace {

// The k-th largest key, all zeros behind the bits that tell. Leaves in k how many of those that are equal to it stay; 0: all.
//   get   (i, key): whether there is such a key, and which
template <typename T, typename F>
__device__ T find_last(uint32_t n, uint32_t & k, F get) {
    __shared__ uint32_t counts[16];

    T res = 0;
    for (int shift = 8 * sizeof(T) - 4; shift >= 0 && k > 0; shift -= 4) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < 16; i += blockDim.x) {
            counts[i] = 0;
        }
        __syncthreads();
        T key = 0;
        for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
            if (get(i, key) && (key ^ res) >> shift >> 4 == 0) {
                atomicAdd(&counts[key >> shift & 15], 1u);
            }
        }
        __syncthreads();
        uint32_t digit = 15;
        while (counts[digit] < k) {
            k -= counts[digit--];
        }
        res |= T(digit) << shift;
        if (counts[digit] == k) {
            k = 0;
        }
    }

    return res;
}

} // namespace
