// Rotary embeddings (RoPE) of stored keys, as the kernels apply them: each pair of elements has its own factors.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

// The pairs of elements in a key.
struct llama_h2o_rotation {
    uint32_t n_dims; // number of rotated elements
    uint32_t first;  // first rotated element
    bool neox;       // pairs are (i, i + n_dims/2), not (2*i, 2*i + 1)

    // the elements of a pair, relative to `first`
    constexpr size_t lower(size_t pair) const { return neox ? pair : 2 * pair; }
    constexpr size_t upper(size_t pair) const { return neox ? pair + n_dims / 2 : 2 * pair + 1; }

    // Factors are [2][n_dims]: of an element itself, and of its partner, whose product is added. This sets those that multiply a
    // pair, as a complex number, by re + i*im.
    void set_factors(size_t pair, double re, double im, float * factors) const {
        factors[lower(pair)] = factors[upper(pair)] = float(re);

        factors[n_dims + lower(pair)] = float(-im);
        factors[n_dims + upper(pair)] = float(im);
    }
};

// The format of a stored key.
struct llama_h2o_key_form {
    ggml_type type;
    uint32_t n_mix; // block size of the Hadamard transform after the rotation; 0: none
};
