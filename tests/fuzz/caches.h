// Contexts with eviction, of tiny random models.

#pragma once

#include "program.h"

#include "llama-h2o.h"
#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// How many contexts there are, each with settings of its own: models, policies, types of rows, archives.
size_t n_caches();

// One text at a time in a context.
class cache {
public:
    // of models in the folder that PYH2O_FUZZ_MODELS names; each is made when it is first asked for
    static cache & of(size_t i);

    ~cache() { llama_free(ctx); }

    cache(const cache &)             = delete;
    cache & operator=(const cache &) = delete;

    bool has_archive() const { return params.recall > 0; }

    llama_h2o_stats stats() const;

    // what would be there after clear(), and nothing of a text
    bool is_empty() const;

    void clear();

    // positions and scores make sense in all layers that are evicted
    void check_rows() const;

    bytes state() const;
    bool load(const bytes & state);

    // Reads tokens behind the text; false where llama.cpp refuses to.
    bool read(const std::vector<llama_token> & tokens);

    // of the last token that was read
    std::vector<float> logits() const;

    // at most so many tokens at the end of the text, as far as they can be removed
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

// Of no meaning.
std::vector<llama_token> random_tokens(uint32_t n, random_numbers & random);

// A state, as llama_state_seq_get_data() writes it, with the checksum that it should have.
void set_checksum(bytes & state);
