// Rotating keys, row by row.

#pragma once

#include "kernels/h2o-hadamard.h"
#include "kernels/h2o-kernel-rows.h"
#include "kernels/h2o-rotation.h"
#include "kernels/h2o-row-types.h"

namespace {

inline void rotate_row(const llama_h2o_rotation & how, const float * factors, float * row) {
    const uint32_t n    = how.n_dims;
    const float * sines = factors + n;
    float * x           = row + how.first;

    if (!how.neox && n % W == 0) {
        for (uint32_t i = 0; i < n; i += W) {
            const vec a = v_load(x + i);
            v_store(x + i, v_fma(v_swap<1>(a), v_load(sines + i), v_mul(a, v_load(factors + i))));
        }
        return;
    }
    if (how.neox && n / 2 % W == 0) {
        for (uint32_t i = 0, j = n / 2; i < n / 2; i += W, j += W) {
            const vec a = v_load(x + i);
            const vec b = v_load(x + j);
            v_store(x + i, v_fma(b, v_load(sines + i), v_mul(a, v_load(factors + i))));
            v_store(x + j, v_fma(a, v_load(sines + j), v_mul(b, v_load(factors + j))));
        }
        return;
    }

    for (uint32_t k = 0; k < n / 2; ++k) {
        const size_t i = how.lower(k);
        const size_t j = how.upper(k);
        const float a  = x[i];
        const float b  = x[j];
        x[i]           = a * factors[i] + b * sines[i];
        x[j]           = b * factors[j] + a * sines[j];
    }
}

inline void read_row(ggml_type type, const char * stored, uint32_t n, float * row) {
    if (!llama_h2o_has_row_type(type) || n % W != 0) {
        llama_h2o_to_floats(type, stored, row, n);
        return;
    }
    row_types::with(type, [&](auto rows) {
        for (uint32_t i = 0; i < n; i += W) {
            v_store(row + i, decltype(rows)::load(stored, i));
        }
    });
}

// Stores the scale of a block, and returns the factor of its elements.
inline float write_scale(float scale, char * block) {
    const ggml_fp16_t rounded = ggml_fp32_to_fp16(scale);
    std::memcpy(block, &rounded, sizeof(rounded));

    return scale != 0.0f ? 1.0f / scale : 0.0f;
}

// rounds like ggml, except for ties
inline void write_q8_0(const float * row, uint32_t n, char * stored) {
    for (uint32_t first = 0; first < n; first += 32, stored += 2 + 32) {
        const float * x = row + first;

        vec most = v_set(0.0f);
        for (uint32_t i = 0; i < 32; i += W) {
            most = v_max(most, v_max(v_load(x + i), v_sub(v_set(0.0f), v_load(x + i))));
        }
        const vec factor = v_set(write_scale(v_top(most) / 127.0f, stored));

        for (uint32_t i = 0; i < 32; i += W) {
            v_store_i8(stored + 2 + i, v_round(v_mul(v_load(x + i), factor)));
        }
    }
}

inline void write_q4_0(const float * row, uint32_t n, char * stored) {
    for (uint32_t first = 0; first < n; first += 32, stored += 2 + 16) {
        const float * x = row + first;

        vec most  = v_set(MINUS_INF);
        vec least = v_set(MINUS_INF);
        for (uint32_t i = 0; i < 32; i += W) {
            most  = v_max(most, v_load(x + i));
            least = v_max(least, v_sub(v_set(0.0f), v_load(x + i)));
        }
        const float high = v_top(most);
        const float low  = v_top(least);
        const vec factor = v_set(write_scale((high > low ? high : -low) / -8.0f, stored));

        uint8_t bytes[32];
        for (uint32_t i = 0; i < 32; i += W) {
            v_store_u8(bytes + i, v_fma(v_load(x + i), factor, v_set(8.5f)));
        }
        for (uint32_t i = 0; i < 16; ++i) {
            const uint8_t lo = bytes[i] < 15 ? bytes[i] : 15;
            const uint8_t hi = bytes[i + 16] < 15 ? bytes[i + 16] : 15;
            stored[2 + i]    = char(lo | hi << 4);
        }
    }
}

inline void write_row(ggml_type type, const float * row, uint32_t n, char * stored) {
    if (n % W == 0 && type == GGML_TYPE_F16) {
        for (uint32_t i = 0; i < n; i += W) {
            v_store_f16(stored + i * sizeof(ggml_fp16_t), v_load(row + i));
        }
    } else if (type == GGML_TYPE_Q8_0) {
        write_q8_0(row, n, stored);
    } else if (type == GGML_TYPE_Q4_0) {
        write_q4_0(row, n, stored);
    } else {
        llama_h2o_from_floats(type, row, stored, n);
    }
}

void rotate_key(const llama_h2o_rotation & how,
        const float * factors,
        uint32_t n_embd,
        llama_h2o_key_form from_form,
        const void * from,
        llama_h2o_key_form to_form,
        void * to,
        float * space) {
    read_row(from_form.type, static_cast<const char *>(from), n_embd, space);
    if (from_form.n_mix > 0) {
        hadamard(space, n_embd, from_form.n_mix);
    }
    if (factors) {
        rotate_row(how, factors, space);
    }
    if (to_form.n_mix > 0) {
        hadamard(space, n_embd, to_form.n_mix);
    }
    write_row(to_form.type, space, n_embd, static_cast<char *>(to));
}

} // namespace
