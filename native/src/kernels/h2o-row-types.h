// The types of the rows in a cache. The kernels of each instruction set, and those on CUDA, read them with structs of
// their own, one for each type.

#pragma once

#include "ggml.h"

constexpr bool llama_h2o_has_row_type(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0;
}

template <typename F32, typename F16, typename Q8_0, typename Q4_0>
struct llama_h2o_row_types {
    // Calls fn(rows) with an object of the struct for this type.
    template <typename F>
    static void with(ggml_type type, F fn) {
        switch (type) {
            case GGML_TYPE_F16:
                fn(F16());
                break;
            case GGML_TYPE_Q8_0:
                fn(Q8_0());
                break;
            case GGML_TYPE_Q4_0:
                fn(Q4_0());
                break;
            default:
                fn(F32());
                break;
        }
    }
};
