// The types of rows in a cache, and their conversion from and to floats. Each instruction set, and CUDA, has its own struct to
// read each type.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <cstring>

constexpr bool llama_h2o_has_row_type(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0;
}

template <typename F32, typename F16, typename Q8_0, typename Q4_0>
struct llama_h2o_row_types {
    // Calls fn(rows) with an object of the struct for this type.
    template <typename F>
    static constexpr void with(ggml_type type, F fn) {
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

// Converts a row, or a part of it, to floats.
inline void llama_h2o_to_floats(ggml_type type, const void * stored, float * row, int64_t n) {
    // ggml has no conversion for f32
    if (type == GGML_TYPE_F32) {
        std::memcpy(row, stored, n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(stored, row, n);
    }
}

// Rounds once to the type.
inline void llama_h2o_from_floats(ggml_type type, const float * row, void * stored, int64_t n) {
    if (type == GGML_TYPE_F32) {
        std::memcpy(stored, row, n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->from_float_ref(row, stored, n);
    }
}
