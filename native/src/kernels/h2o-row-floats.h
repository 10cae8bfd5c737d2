// A stored row, or a piece of one, as floats and back, whatever its type.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <cstring>

inline void llama_h2o_to_floats(ggml_type type, const void * stored, float * row, int64_t n) {
    // f32 has no conversion of its own
    if (type == GGML_TYPE_F32) {
        std::memcpy(row, stored, n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(stored, row, n);
    }
}

// With one rounding to the type.
inline void llama_h2o_from_floats(ggml_type type, const float * row, void * stored, int64_t n) {
    if (type == GGML_TYPE_F32) {
        std::memcpy(stored, row, n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->from_float_ref(row, stored, n);
    }
}
