#include "cache/h2o-rope.h"

#include "cache/h2o-cache-graph.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

bool llama_h2o_has_longrope(const llama_model & model) {
    return std::any_of(model.layers.begin(), model.layers.end(),
            [](const llama_layer & layer) { return layer.rope_long || layer.rope_short; });
}

//
// reading the rotation from the graph
//

// The parameters of a RoPE op, in the order in which ggml stores them.
struct rope_params {
    int32_t n_past;
    int32_t n_dims;
    int32_t mode;
    int32_t n_ctx;
    int32_t n_ctx_orig;
    float freq_base;
    float freq_scale;
    float ext_factor;
    float attn_factor;
    float beta_fast;
    float beta_slow;
    int32_t sections[4];
    int32_t n_offs;
};

static_assert(sizeof(rope_params) <= GGML_MAX_OP_PARAMS, "ggml keeps fewer parameters");

static std::vector<float> read_floats(const ggml_tensor * tensor, size_t n) {
    std::vector<float> res(n);
    ggml_backend_tensor_get(tensor, res.data(), 0, n * sizeof(float));

    return res;
}

// Whether a pair is rotated by the last of several positions (M-RoPE), which is 0 for text. The others are equal.
static bool has_no_position(const rope_params & params, size_t pair) {
    if (!(params.mode & GGML_ROPE_TYPE_MROPE)) {
        return false;
    }

    const auto & sections = params.sections;

    const int32_t sector = int32_t(pair) % (sections[0] + sections[1] + sections[2] + sections[3]);
    if (params.mode == GGML_ROPE_TYPE_IMROPE) {
        return sector >= 3 * sections[sector % 3];
    }

    return sector >= sections[0] + sections[1] + sections[2];
}

// Radians per position of every pair, with the frequency factors and the YaRN ramp that ggml applies.
static std::vector<double> read_angles(const ggml_tensor * rope_op, const rope_params & params) {
    const size_t n = params.n_dims / 2;

    // a model loaded without weights has no factors, and never rotates a row
    const bool has_factors           = rope_op->src[2] && rope_op->src[2]->data;
    const std::vector<float> factors = has_factors ? read_floats(rope_op->src[2], n) : std::vector<float>(n, 1.0f);

    float ramp[2];
    ggml_rope_yarn_corr_dims(
            params.n_dims, params.n_ctx_orig, params.freq_base, params.beta_fast, params.beta_slow, ramp);

    std::vector<double> angles(n);
    for (size_t i = 0; i < n; ++i) {
        const double angle = std::pow(double(params.freq_base), -2.0 * double(i) / params.n_dims) / factors[i];

        double mix = 0.0;
        if (params.ext_factor != 0.0f) {
            const double slope = (double(i) - ramp[0]) / std::max(0.001, double(ramp[1]) - ramp[0]);

            mix = (1.0 - std::clamp(slope, 0.0, 1.0)) * params.ext_factor;
        }

        angles[i] = has_no_position(params, i) ? 0.0 : angle * (params.freq_scale * (1.0 - mix) + mix);
    }

    return angles;
}

static const ggml_tensor * skip_views(const ggml_tensor * tensor) {
    static constexpr ggml_op VIEWS[] = { GGML_OP_VIEW, GGML_OP_RESHAPE, GGML_OP_PERMUTE, GGML_OP_TRANSPOSE,
        GGML_OP_CONT };
    while (std::count(std::begin(VIEWS), std::end(VIEWS), tensor->op) > 0) {
        tensor = tensor->src[0];
    }

    return tensor;
}

// Whether there is a RoPE op between the projection of the keys and this tensor.
static bool is_rotated(const ggml_tensor * tensor) {
    if (tensor->op == GGML_OP_ROPE) {
        return true;
    }
    if (tensor->op == GGML_OP_MUL_MAT) {
        return false;
    }
    for (const ggml_tensor * src : tensor->src) {
        if (src && is_rotated(src)) {
            return true;
        }
    }

    return false;
}

llama_h2o_rope llama_h2o_read_rope(const ggml_tensor * k_cur) {
    llama_h2o_rope rope;

    const ggml_tensor * cur = skip_views(k_cur);

    // a quantised cache may apply a Hadamard transform to its keys, see llama_kv_cache::build_input_k_rot()
    if (cur->op == GGML_OP_MUL_MAT && std::strcmp(cur->src[0]->name, "attn_inp_k_rot") == 0) {
        rope.n_mix = uint32_t(cur->src[0]->ne[0]);

        cur = skip_views(cur->src[1]);
    }

    // only the end of a latent row (MLA) is rotated
    if (cur->op == GGML_OP_CONCAT && cur->op_params[0] == 0 && !is_rotated(cur->src[0])) {
        rope.first = uint32_t(cur->src[0]->ne[0]);

        cur = skip_views(cur->src[1]);
    }

    if (cur->op != GGML_OP_ROPE) {
        rope.known = !is_rotated(cur);
        return rope;
    }

    rope_params params;
    std::memcpy(&params, cur->op_params, sizeof(params));

    // positions from another input would not be lowered by a re-base
    const bool is_plain = std::strcmp(cur->src[1]->name, "inp_pos") == 0 && params.n_offs == 0;

    const bool is_normal = params.mode == GGML_ROPE_TYPE_NORMAL;

    rope.known = is_plain && params.mode != GGML_ROPE_TYPE_VISION;
    rope.neox  = !is_normal;
    if (rope.known) {
        rope.angles = read_angles(cur, params);
    }

    return rope;
}

//
// rotating stored keys
//

const std::vector<float> & llama_h2o_rotations::make(int32_t by) {
    std::vector<float> & res = made[by];
    if (res.empty()) {
        res.resize(2 * how.n_dims);
        for (size_t i = 0; i < angles.size(); ++i) {
            how.set_factors(i, std::cos(angles[i] * by), std::sin(angles[i] * by), res.data());
        }
    }

    return res;
}

const float * llama_h2o_rotations::get(int32_t by) {
    if (by == 0 || angles.empty()) {
        return nullptr;
    }
    if (by == last) {
        return factors.data();
    }

    const int32_t rest = by % N_FINE;

    const float * coarse = make(by - rest).data();
    const float * fine   = make(rest).data();

    const size_t n = how.n_dims;
    factors.resize(2 * n);
    for (size_t i = 0; i < n; ++i) {
        factors[i]     = coarse[i] * fine[i] - coarse[n + i] * fine[n + i];
        factors[n + i] = coarse[i] * fine[n + i] + coarse[n + i] * fine[i];
    }
    last = by;

    return factors.data();
}

int32_t llama_h2o_rotation_table::place(int32_t by) {
    if (by != last.first) {
        const auto [it, is_new] = places.try_emplace(by, -1);
        const float * factors   = is_new ? rotations.get(by) : nullptr;
        if (factors) {
            it->second = int32_t(made.size() / size);
            made.insert(made.end(), factors, factors + size);
        }
        last = { by, it->second };
    }

    return last.second;
}

ggml_tensor * llama_h2o_rotation_table::add_to(llama_h2o_cache_graph & graph) {
    const size_t n_each = std::max<size_t>(size, 1);

    made.resize(std::max(made.size(), n_each));
    const int64_t n = int64_t(made.size() / n_each);

    return graph.add_input(std::move(made), int64_t(n_each), n, 1);
}
