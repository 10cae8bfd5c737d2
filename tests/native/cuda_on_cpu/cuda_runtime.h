// The part of CUDA's runtime that the kernel benchmark uses, on a CPU. Replaces the header of the same name.

#pragma once

#include "ggml-cuda/common.cuh"

#include <chrono>
#include <cstdlib>
#include <utility>

using cudaEvent_t     = std::chrono::steady_clock::time_point *;
using cudaGraph_t     = std::vector<std::function<void()>> *;
using cudaGraphExec_t = cudaGraph_t;

constexpr int cudaHostAllocPortable       = 0;
constexpr int cudaHostAllocMapped         = 0;
constexpr int cudaMemcpyDefault           = 0;
constexpr int cudaStreamCaptureModeGlobal = 0;

inline int cudaMalloc(char ** memory, size_t size) {
    *memory = static_cast<char *>(std::aligned_alloc(256, (size + 255) / 256 * 256));

    return 0;
}

inline int cudaHostAlloc(char ** memory, size_t size, int) {
    return cudaMalloc(memory, size);
}

inline int cudaFree(void * memory) {
    std::free(memory);

    return 0;
}

inline int cudaFreeHost(void * memory) {
    return cudaFree(memory);
}

inline int cudaMemset(void * memory, int byte, size_t size) {
    std::memset(memory, byte, size);

    return 0;
}

inline int cudaMemcpy(void * to, const void * from, size_t size, int) {
    std::memcpy(to, from, size);

    return 0;
}

inline int cudaStreamCreate(cudaStream_t * stream) {
    *stream = nullptr;

    return 0;
}

inline int cudaStreamSynchronize(cudaStream_t) {
    return 0;
}

inline int cudaStreamBeginCapture(cudaStream_t, int) {
    cuda_recording = new std::vector<std::function<void()>>();

    return 0;
}

inline int cudaStreamEndCapture(cudaStream_t, cudaGraph_t * graph) {
    *graph = std::exchange(cuda_recording, nullptr);

    return 0;
}

inline int cudaGraphInstantiate(cudaGraphExec_t * executable, cudaGraph_t graph, int) {
    *executable = new std::vector<std::function<void()>>(*graph);

    return 0;
}

inline int cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
    for (const auto & kernel : *executable) {
        kernel();
    }

    return 0;
}

inline int cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;

    return 0;
}

inline int cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;

    return 0;
}

inline int cudaEventCreate(cudaEvent_t * event) {
    *event = new std::chrono::steady_clock::time_point();

    return 0;
}

inline int cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    *event = std::chrono::steady_clock::now();

    return 0;
}

inline int cudaEventElapsedTime(float * ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = std::chrono::duration<float, std::milli>(*to - *from).count();

    return 0;
}
