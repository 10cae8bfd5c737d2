// Contexts with eviction, of tiny random models.

#pragma once

#include "program.h"

#include "llama-h2o.h"
#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// The number of contexts, each with its own model, policy, row type and archive.
size_t n_caches();

// A context with one text at a time.
class cache {
public:
    // created on first use, from models in the folder PYH2O_FUZZ_MODELS
    static cache & of(size_t i);

    ~cache() { llama_free(ctx); }

    cache(const cache &)             = delete;
    cache & operator=(const cache &) = delete;

    bool has_archive() const { return params.recall > 0; }

    llama_h2o_stats stats() const;

    // checks that the cache is as after clear()
    bool is_empty() const;

    void clear();

    // checks positions and scores in all layers with eviction
    void check_rows() const;

    bytes state() const;
    bool load(const bytes & state);

    // Appends tokens; false if llama.cpp fails.
    bool read(const std::vector<llama_token> & tokens);

    // logits of the last token
    std::vector<float> logits() const;

    // removes up to this many tokens at the end, as far as possible
    void remove_tail(uint32_t n);

    void reset_found();

    // the end of the text: its newest position, -1 without one
    llama_pos newest() const;

private:
    struct layer_rows {
        uint32_t n_heads = 0;
        std::vector<llama_pos> pos; // [n_heads][n_used]
        std::vector<float> score;
    };

    explicit cache(size_t i);

    layer_rows rows_of(int32_t il) const;

    int32_t decode(const std::vector<llama_token> & tokens);

    llama_context * ctx;
    llama_h2o_params params;
};

// Random tokens.
std::vector<llama_token> random_tokens(uint32_t n, random_numbers & random);

// Corrects the checksum of a state of llama_state_seq_get_data().
void set_checksum(bytes & state);
