// Rotary embeddings (RoPE) of stored keys as the kernels apply them: every pair of elements is turned by factors of its own.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

// Which elements of a key are pairs.
struct llama_h2o_rotation {
    uint32_t n_dims; // elements that are turned
    uint32_t first;  // the first one
    bool neox;       // pairs are (i, i + n_dims/2), not (2*i, 2*i + 1)

    // of those that are turned: the elements of a pair
    constexpr size_t lower(size_t pair) const { return neox ? pair : 2 * pair; }
    constexpr size_t upper(size_t pair) const { return neox ? pair + n_dims / 2 : 2 * pair + 1; }

    // Factors are [2][n_dims]: what elements are multiplied with, and what their partners are that are added to them.
    // Multiplies a pair, as a complex number, with this one.
    void set_factors(size_t pair, double re, double im, float * factors) const {
        factors[lower(pair)] = factors[upper(pair)] = float(re);

        factors[n_dims + lower(pair)] = float(-im);
        factors[n_dims + upper(pair)] = float(im);
    }
};

// How a key is stored.
struct llama_h2o_key_form {
    ggml_type type;
    uint32_t n_mix; // mixed by a Hadamard matrix in blocks of so many elements, after it was turned; 0: not
};
