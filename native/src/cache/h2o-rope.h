// Rotary embeddings (RoPE) of keys: how a layer rotates them, and rotating stored rows on.

#pragma once

#include "cache/h2o-host-rows.h"
#include "cache/h2o-row-positions.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

struct ggml_tensor;
struct llama_model;

// How the keys of a layer are rotated before they are stored. All angles are proportional to the
// position, so a row that is rotated on by the difference of two positions has the other one.
struct llama_h2o_rope {
    bool known = false; // whether a stored row can be rotated on at all
    bool neox  = false; // pairs are (i, i + n_dims/2), not (2*i, 2*i + 1)

    std::vector<double> angles; // [n_dims/2] radians per position; empty if the keys have no positions
    uint32_t first = 0;         // element of a row that they begin at

    std::vector<float> hadamard; // [n*n] own inverse, applied to blocks of n elements after the rotation; or empty
    uint32_t n_hadamard = 0;
};

// Whether the model has frequency factors for few positions and others for many (LongRoPE).
bool llama_h2o_has_longrope(const llama_model & model);

// Reads it from the graph: from the operation that rotated the keys which are about to be stored.
// What happened to them between rotation and storage must be undone, or the rope is not known.
//   hadamard   what a quantised cache mixes its keys with, by size
llama_h2o_rope llama_h2o_read_rope(
        const ggml_tensor * k_cur, const std::unordered_map<int64_t, std::vector<float>> & hadamard);

// Mixes a row as a quantised cache has it, or undoes it.
void llama_h2o_mix_row(const llama_h2o_rope & rope, std::vector<float> & row);

// Turns each pair of a row by a factor of its own, as if the row were not mixed.
//   factors  [n_dims/2][2] real and imaginary part
void llama_h2o_turn_row(const llama_h2o_rope & rope, const std::vector<float> & factors, std::vector<float> & row);

// Rotates rows of floats on, one after the other: those of the same turn cost least.
class llama_h2o_turner {
public:
    explicit llama_h2o_turner(const llama_h2o_rope & rope);

    // a row as it lies in the cache
    void apply(std::vector<float> & row, int32_t positions);

    // one that is not mixed; not at all where keys cannot be turned
    void turn(std::vector<float> & row, int32_t positions);

private:
    const llama_h2o_rope & rope;

    void set_turn(int32_t positions);

    std::vector<float> cos_sin; // [n_dims/2][2] of the turn before
    int32_t by = 0;             // that turn
};

// Rotates the rows of one KV head on. One rounding to the type of the cache for each row.
class llama_h2o_rotation {
public:
    llama_h2o_rotation(const llama_h2o_rope & rope, const llama_h2o_row_layout & layout);

    void apply(uint8_t * data, uint32_t head, const std::vector<llama_h2o_turn> & turns);

private:
    const llama_h2o_row_layout & layout;

    llama_h2o_turner turner;
    std::vector<float> row; // [n_embd_head]
};
