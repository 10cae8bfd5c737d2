// Finds the k-th largest of many keys, with all threads of a block.

#pragma once

#include "ggml-cuda/common.cuh"

#include <cstdint>

namespace {

// bits of a key per pass
constexpr uint32_t N_DIGIT_BITS = 11;
constexpr uint32_t N_COUNTS     = 1u << N_DIGIT_BITS;
constexpr uint32_t N_BINS       = 32; // counts that are summed first

// The largest digit that at least k keys have or exceed. Subtracts from k the keys that exceed it; sets k to 0 if all keys with the
// digit are wanted.
__device__ inline uint32_t find_digit(const uint32_t * counts, uint32_t & k) {
    __shared__ uint32_t of_bins[N_COUNTS / N_BINS];

    __syncthreads();
    for (uint32_t bin = threadIdx.x; bin < N_COUNTS / N_BINS; bin += blockDim.x) {
        uint32_t sum = 0;
        for (uint32_t i = 0; i < N_BINS; ++i) {
            sum += counts[bin * N_BINS + i];
        }
        of_bins[bin] = sum;
    }
    __syncthreads();

    uint32_t bin = N_COUNTS / N_BINS - 1;
    while (bin > 0 && of_bins[bin] < k) {
        k -= of_bins[bin--];
    }
    uint32_t digit = bin * N_BINS + N_BINS - 1;
    while (digit > bin * N_BINS && counts[digit] < k) {
        k -= counts[digit--];
    }
    if (counts[digit] <= k) {
        k = 0;
    }

    return digit;
}

// The k-th largest key, with zeros after the bits that distinguish it; 0 if there are fewer keys. Sets k to the number of equal keys
// that are wanted; 0: all.
//   get    (i, key): sets key i; returns false if there is none
//   first  counts of the first digit, which are reset to 0; may be null
template <typename T, typename F>
__device__ T find_last(uint32_t n, uint32_t & k, F get, uint32_t * first = nullptr) {
    __shared__ uint32_t counts[N_COUNTS];

    T res          = 0;
    uint32_t shift = 8 * sizeof(T);
    while (shift > 0 && k > 0) {
        const uint32_t n_bits  = shift < N_DIGIT_BITS ? shift : N_DIGIT_BITS;
        shift                 -= n_bits;

        __syncthreads();
        for (uint32_t i = threadIdx.x; i < N_COUNTS; i += blockDim.x) {
            counts[i] = first ? first[i] : 0;
            if (first) {
                first[i] = 0;
            }
        }
        __syncthreads();
        T key = 0;
        for (uint32_t i = threadIdx.x; i < n && !first; i += blockDim.x) {
            if (get(i, key) && (key ^ res) >> shift >> n_bits == 0) {
                atomicAdd(&counts[key >> shift & ((1u << n_bits) - 1)], 1u);
            }
        }
        res   |= T(find_digit(counts, k)) << shift;
        first  = nullptr;
    }

    return res;
}

} // namespace
