// Launches our kernels for our ops. Compiled into the CUDA backend.

#include "cuda/h2o-cuda.h"

#include "cuda/h2o-cuda-launch.cuh"

#include "ggml-cuda/common.cuh"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>

static llama_h2o_cuda_ops ops = {};

bool llama_h2o_cuda_set_ops(const llama_h2o_cuda_ops & from) {
    ops = from;

    const auto & info = ggml_cuda_info();

    return std::all_of(info.devices, info.devices + info.device_count,
            [](const auto & device) { return turing_mma_available(device.cc); });
}

static ggml_custom_op_params params_of(const ggml_tensor * op) {
    ggml_custom_op_params params;
    std::memcpy(&params, op->op_params, sizeof(params));

    return params;
}

bool llama_h2o_cuda_has_op(const ggml_tensor * op) {
    const ggml_custom_op_t fun = params_of(op).fun;

    return fun && std::find(ops.funs.begin(), ops.funs.end(), fun) != ops.funs.end();
}

void llama_h2o_cuda_compute(const ggml_tensor * op, void * cuda_stream) {
    auto * stream = static_cast<cudaStream_t>(cuda_stream);

    const ggml_custom_op_params params = params_of(op);

    const auto is = [&](llama_h2o_cuda_op which) {
        return params.fun == ops.funs[which];
    };

    if (is(LLAMA_H2O_CUDA_ATTEND)) {
        launch_attend(ops.read_attend(op, params.userdata), stream);
    } else if (is(LLAMA_H2O_CUDA_SEARCH)) {
        launch_search(ops.read_combine(op, params.userdata), false, stream);
    } else if (is(LLAMA_H2O_CUDA_ALONGSIDE)) {
        launch_search(ops.read_alongside(op, params.userdata), true, stream);
    } else if (is(LLAMA_H2O_CUDA_COMBINE)) {
        launch_combine(ops.read_combine(op, params.userdata), stream);
    } else if (is(LLAMA_H2O_CUDA_LSE)) {
        launch_lse(ops.read_attend(op, params.userdata), stream);
    } else if (is(LLAMA_H2O_CUDA_COLUMNS)) {
        launch_columns(ops.read_columns(op, params.userdata), stream);
    } else if (is(LLAMA_H2O_CUDA_ADD)) {
        launch_add(ops.read_add(op, params.userdata), stream);
    } else if (is(LLAMA_H2O_CUDA_CHOOSE)) {
        launch_choose(ops.read_choose(op), stream);
    } else if (is(LLAMA_H2O_CUDA_ROTATE)) {
        launch_rotate(ops.read_rotation(op, params.userdata), stream);
    } else {
        launch_archive(ops.read_archive(op, params.userdata), stream);
    }

    CUDA_CHECK(cudaGetLastError());
}
