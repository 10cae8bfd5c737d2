// Rotary embeddings (RoPE) of keys: how a layer rotates them, and what turns stored ones on.

#pragma once

#include "kernels/h2o-rotation.h"

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

struct ggml_tensor;
struct llama_model;
class llama_h2o_cache_graph;

// How the keys of a layer are rotated before they are stored. All angles are proportional to the
// position, so a row that is rotated on by the difference of two positions has the other one.
struct llama_h2o_rope {
    bool known = false; // whether a stored row can be rotated on at all
    bool neox  = false; // pairs are (i, i + n_dims/2), not (2*i, 2*i + 1)

    std::vector<double>
            angles;     // [n_dims/2] radians per position; empty if the keys have no positions, or it is not known
    uint32_t first = 0; // element of a row that they begin at

    uint32_t n_mix = 0; // mixed by a Hadamard matrix in blocks of so many elements after the rotation; 0: not

    llama_h2o_rotation rotation() const { return { uint32_t(2 * angles.size()), first, neox }; }
    llama_h2o_key_form form(ggml_type type) const { return { type, n_mix }; }
};

// Whether the model has frequency factors for few positions and others for many (LongRoPE).
bool llama_h2o_has_longrope(const llama_model & model);

// Reads it from the graph: from the operation that rotated the keys which are about to be stored.
// What happened to them between rotation and storage must be undone, or the rope is not known.
llama_h2o_rope llama_h2o_read_rope(const ggml_tensor * k_cur);

// What turns keys on by whole positions, as factors for the kernels.
class llama_h2o_rotations {
public:
    explicit llama_h2o_rotations(const llama_h2o_rope & rope) : angles(rope.angles), how(rope.rotation()) {}

    const llama_h2o_rotation & rotation() const { return how; }

    // Null where nothing is to be turned. Valid until the next call.
    const float * get(int32_t by);

private:
    static constexpr int32_t N_FINE = 64;

    const std::vector<double> & angles;
    const llama_h2o_rotation how;

    // a turn is one of fewer than N_FINE positions behind one of a multiple of these
    std::unordered_map<int32_t, std::vector<float>> made;
    std::vector<float> factors; // of both
    int32_t last = 0;

    const std::vector<float> & make(int32_t by);
};

// Turns that a device makes: factors of each once, [.][2][n_dims].
class llama_h2o_rotation_table {
public:
    explicit llama_h2o_rotation_table(const llama_h2o_rope & rope) :
        rotations(rope), size(2 * rope.rotation().n_dims) {}

    // Its place in the table; -1: nothing is to be turned.
    int32_t place(int32_t by);

    // The table as an input of a graph, with one turn at least.
    ggml_tensor * add_to(llama_h2o_cache_graph & graph);

private:
    llama_h2o_rotations rotations;
    const size_t size;

    std::unordered_map<int32_t, int32_t> places;
    std::vector<float> made;
    std::pair<int32_t, int32_t> last = { 0, -1 }; // most follow one that is the same
};
