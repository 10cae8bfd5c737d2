// The attention op on its own, on one thread: nanoseconds for each row of K and V, and for each query of a prompt.
//
//   LIB=$(echo .venv/lib/python3*/site-packages/pyh2o/lib)
//   c++ -std=c++17 -O2 -Inative/src -I$(echo build/*/llama.cpp/ggml/include) research/benchmarks/attention_kernel.cpp \
//       -L$LIB -lllama -lggml -lggml-cpu -lggml-base -Wl,-rpath,$PWD/$LIB -o attention_kernel
//   ./attention_kernel
//
// The shape is that of the demo model. With all of its layers the rows come from memory, as they do between two tokens
// of a real model; with two of them they stay in the processor's caches.

#include "kernels/h2o-kernel.h"

#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

static constexpr uint32_t N_EMBD_HEAD = 64;
static constexpr uint32_t N_HEAD      = 9;
static constexpr uint32_t N_HEAD_KV   = 3;
static constexpr uint32_t N_KV        = 1792;
static constexpr int N_RUNS           = 15;

struct layer {
    std::vector<char> k;
    std::vector<char> v;
};

static std::vector<layer> random_layers(ggml_type type, int n_layer) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;

    std::vector<float> rows(size_t(N_KV) * N_EMBD_HEAD * N_HEAD_KV);
    for (float & x : rows) {
        x = normal(rng);
    }

    layer one;
    one.k.resize(ggml_row_size(type, rows.size()));
    ggml_quantize_chunk(type, rows.data(), one.k.data(), 0, N_KV, N_EMBD_HEAD * N_HEAD_KV, nullptr);
    one.v = one.k;

    return std::vector<layer>(n_layer, one);
}

// Seconds for all layers and the share of them in the second step, the best of all runs.
static void measure(const llama_h2o_kernel & kernel, ggml_type type, int n_layer, uint32_t n_tokens) {
    const std::vector<layer> layers = random_layers(type, n_layer);

    std::vector<float> q(size_t(n_tokens) * N_HEAD * N_EMBD_HEAD, 0.5f);
    std::vector<ggml_fp16_t> mask(size_t(N_KV) * n_tokens, 0);
    std::vector<float> scores(size_t(N_KV) * N_HEAD_KV);

    llama_h2o_attention attn = {};

    attn.n_embd_head_k = N_EMBD_HEAD;
    attn.n_embd_head_v = N_EMBD_HEAD;
    attn.n_head        = N_HEAD;
    attn.n_head_kv     = N_HEAD_KV;
    attn.n_kv          = N_KV;
    attn.n_tokens      = n_tokens;
    attn.n_stream      = 1;
    attn.scale         = 0.125f;
    attn.n_slots       = 1;

    const size_t size_row  = ggml_row_size(type, N_EMBD_HEAD);
    const size_t size_head = N_EMBD_HEAD * sizeof(float);

    attn.q    = { reinterpret_cast<const char *>(q.data()), GGML_TYPE_F32, N_HEAD * size_head, size_head, 0 };
    attn.mask = { reinterpret_cast<const char *>(mask.data()), GGML_TYPE_F16, N_KV * sizeof(ggml_fp16_t), 0, 0 };

    attn.scores        = scores.data();
    attn.nb_score_head = N_KV * sizeof(float);

    std::vector<float> space(attn.n_out() + llama_h2o_work_size(attn));
    attn.out  = space.data();
    attn.work = attn.out + attn.n_out();

    double best  = 1e9;
    double share = 0.0;
    for (int run = 0; run < N_RUNS; ++run) {
        double seconds[2] = { 0.0, 0.0 };
        for (const auto & l : layers) {
            attn.k = { l.k.data(), type, size_row * N_HEAD_KV, size_row, 0 };
            attn.v = { l.v.data(), type, size_row * N_HEAD_KV, size_row, 0 };

            const auto start = std::chrono::steady_clock::now();
            kernel.attend(attn, 0, 1);
            const auto middle = std::chrono::steady_clock::now();
            kernel.combine(attn, 0, 1);
            const auto end = std::chrono::steady_clock::now();

            seconds[0] += std::chrono::duration<double>(middle - start).count();
            seconds[1] += std::chrono::duration<double>(end - middle).count();
        }
        if (seconds[0] + seconds[1] < best) {
            best  = seconds[0] + seconds[1];
            share = seconds[1] / best;
        }
    }

    const double n_rows = double(N_KV) * N_HEAD_KV * n_layer;
    const double n_mac  = n_rows * n_tokens * (N_HEAD / N_HEAD_KV) * 2 * N_EMBD_HEAD;
    printf("| %s | %s | %s | %u | %.2f | %.1f | %.1f | %.1f %% |\n", kernel.name, ggml_type_name(type),
            n_layer > 2 ? "memory" : "caches", n_tokens, best / n_rows / n_tokens * 1e9, n_mac / best / 1e9,
            2 * n_rows * size_row / best / 1e9, share * 100);
}

int main() {
    printf("| kernel | rows | from | queries | ns per row and query | 10^9 multiply-adds/s | GB/s | scores, share |\n");
    printf("|---|---|---|---|---|---|---|---|\n");

    for (const char * name : { "avx512bf16", "avx512", "avx2", "neon", "portable" }) {
        const llama_h2o_kernel * kernel = llama_h2o_find_kernel(name);
        if (!kernel) {
            continue;
        }
        for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
            measure(*kernel, type, 30, 1);
            measure(*kernel, type, 2, 1);
            measure(*kernel, type, 2, 128);
        }
    }

    return 0;
}
