// The part of ggml's CUDA backend that our file in it uses. Replaces the header of the same name.

#pragma once

#include "cuda_fp16.h"

#include <functional>
#include <vector>

#include <cstdlib>
#include <cstring>

#define CUDA_CHECK(error) static_cast<void>(error)

inline int cudaGetLastError() {
    return 0;
}

struct ggml_cuda_device_info {
    int device_count = 1;

    // few multiprocessors, so that warps read several tiles of cells, and texts have several parts
    struct {
        int cc;
        int nsm = 2;
    } devices[1];
};

inline ggml_cuda_device_info ggml_cuda_info() {
    return {};
}

inline int ggml_cuda_get_device() {
    return 0;
}

inline bool turing_mma_available(int) {
    const char * lacked = std::getenv("MOCK_LACKS");

    return !lacked || std::strcmp(lacked, "TENSOR_CORES") != 0;
}

struct ggml_cuda_kernel_launch_params {
    dim3 grid;
    dim3 block;
    size_t shared;
    cudaStream_t stream;

    ggml_cuda_kernel_launch_params(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) :
        grid(grid), block(block), shared(shared), stream(stream) {}
};

// Kernels that are recorded in a CUDA graph instead of launched; may be null.
inline std::vector<std::function<void()>> * cuda_recording = nullptr;

template <typename KERNEL, typename... T>
void ggml_cuda_kernel_launch(KERNEL kernel, const ggml_cuda_kernel_launch_params & params, const T &... arguments) {
    const std::function<void()> run = [=] {
        cuda_on_cpu::launch(params.grid, params.block.x, params.stream, [&] { kernel(arguments...); });
    };
    if (cuda_recording) {
        cuda_recording->push_back(run);
    } else {
        run();
    }
}

// kernels never overlap here
inline void ggml_cuda_pdl_sync() {}

inline void ggml_cuda_pdl_lc() {}
