// Rotary embeddings (RoPE) of keys: how a layer rotates them, and how stored keys are rotated again.

#pragma once

#include "kernels/h2o-rotation.h"

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

struct ggml_tensor;
struct llama_model;
class llama_h2o_cache_graph;

// How the keys of a layer are rotated before they are stored. All angles are proportional to the position, so rotating a row
// by the difference of two positions moves it from one to the other.
struct llama_h2o_rope {
    bool known = false; // whether stored rows can be rotated
    bool neox  = false; // pairs are (i, i + n_dims/2), not (2*i, 2*i + 1)

    std::vector<double>
            angles;     // [n_dims/2] radians per position; empty if the keys have no positions, or it is not known
    uint32_t first = 0; // first rotated element of a row

    uint32_t n_mix = 0; // block size of the Hadamard transform after the rotation; 0: none

    llama_h2o_rotation rotation() const { return { uint32_t(2 * angles.size()), first, neox }; }
    llama_h2o_key_form form(ggml_type type) const { return { type, n_mix }; }
};

// Whether the model has different frequency factors for short and long contexts (LongRoPE).
bool llama_h2o_has_longrope(const llama_model & model);

// Reads the rotation from the graph: from the RoPE op of the keys that are about to be stored. If an op between rotation and
// storage cannot be undone, the result is not known.
llama_h2o_rope llama_h2o_read_rope(const ggml_tensor * k_cur);

// Rotations by whole positions, as factors for the kernels.
class llama_h2o_rotations {
public:
    explicit llama_h2o_rotations(const llama_h2o_rope & rope) : angles(rope.angles), how(rope.rotation()) {}

    const llama_h2o_rotation & rotation() const { return how; }

    // Null if no rotation is needed. Valid until the next call.
    const float * get(int32_t by);

private:
    static constexpr int32_t N_FINE = 64;

    const std::vector<double> & angles;
    const llama_h2o_rotation how;

    // a rotation is composed of one by a multiple of N_FINE positions and one by fewer
    std::unordered_map<int32_t, std::vector<float>> made;
    std::vector<float> factors; // of both
    int32_t last = 0;

    const std::vector<float> & make(int32_t by);
};

// Distinct rotations for a device, as factors [.][2][n_dims].
class llama_h2o_rotation_table {
public:
    explicit llama_h2o_rotation_table(const llama_h2o_rope & rope) :
        rotations(rope), size(2 * rope.rotation().n_dims) {}

    // Index in the table; -1: no rotation needed.
    int32_t place(int32_t by);

    // Adds the table as an input of a graph; it contains at least one rotation.
    ggml_tensor * add_to(llama_h2o_cache_graph & graph);

private:
    llama_h2o_rotations rotations;
    const size_t size;

    std::unordered_map<int32_t, int32_t> places;
    std::vector<float> made;
    std::pair<int32_t, int32_t> last = { 0, -1 }; // most rotations equal the previous one
};
