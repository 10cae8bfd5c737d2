// Declarations from ggml.h, which is not available to the tests. The functions are in the installed library.

#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

enum ggml_type {
    GGML_TYPE_F32  = 0,
    GGML_TYPE_F16  = 1,
    GGML_TYPE_Q4_0 = 2,
    GGML_TYPE_Q4_1 = 3,
    GGML_TYPE_Q8_0 = 8,
};

struct ggml_type_traits {
    const char * type_name;
    int64_t blck_size;
    int64_t blck_size_interleave;
    size_t type_size;
    bool is_quantized;
    void (*to_float)(const void * x, float * y, int64_t k);
    void (*from_float_ref)(const float * x, void * y, int64_t k);
};

const ggml_type_traits * ggml_get_type_traits(ggml_type type);

int64_t ggml_blck_size(ggml_type type);
size_t ggml_row_size(ggml_type type, int64_t ne);

struct ggml_tensor;

typedef void (*ggml_custom_op_t)(struct ggml_tensor * dst, int ith, int nth, void * userdata);
}
