// The CUDA kernels for ctypes, on the CPU.

#include "cuda/h2o-cuda-launch.cuh"

#include <algorithm>
#include <vector>

// [n_stream][n_tokens or n_kv][heads][n_embd]
static llama_h2o_attention::operand operand(
        const void * data, ggml_type type, size_t size_row, size_t n_heads, size_t n) {
    return { static_cast<const char *>(data), type, size_row * n_heads, size_row, size_row * n_heads * n };
}

static llama_h2o_attention read(const uint32_t * sizes,
        int type,
        size_t size_k,
        float scale,
        const char * k,
        const uint16_t * mask,
        const float * credit,
        float * scores,
        float * squares) {
    llama_h2o_attention a = {};

    a.n_embd_head_k = sizes[0];
    a.n_embd_head_v = sizes[1];
    a.n_head        = sizes[2];
    a.n_head_kv     = sizes[3];
    a.n_kv          = sizes[4];
    a.n_tokens      = sizes[5];
    a.n_stream      = sizes[6];
    a.scale         = scale;

    a.k      = operand(k, ggml_type(type), size_k, a.n_head_kv, a.n_kv);
    a.mask   = operand(mask, GGML_TYPE_F16, a.n_kv * sizeof(uint16_t), 1, a.n_tokens);
    a.credit = operand(credit, GGML_TYPE_F32, a.n_kv * sizeof(float), 1, a.n_tokens);

    a.scores          = scores;
    a.squares         = squares;
    a.nb_score_head   = a.n_kv * sizeof(float);
    a.nb_score_stream = a.n_kv * sizeof(float) * a.n_head_kv;

    return a;
}

extern "C" {

void run_backwards(bool backwards) {
    cuda_on_cpu::backwards = backwards;
}

// sizes: n_embd_head_k, n_embd_head_v, n_head, n_head_kv, n_kv, n_tokens, n_stream. All arrays are contiguous, in the
// order of h2o-kernel.h; credit and squares may be null.
void attend(const uint32_t * sizes,
        int type,
        size_t size_k,
        size_t size_v,
        float scale,
        const float * q,
        const char * k,
        const char * v,
        const uint16_t * mask,
        const float * credit,
        float * scores,
        float * squares,
        float * out) {
    llama_h2o_attention a = read(sizes, type, size_k, scale, k, mask, credit, scores, squares);

    a.q = operand(q, GGML_TYPE_F32, a.n_embd_head_k * sizeof(float), a.n_head, a.n_tokens);
    a.v = operand(v, ggml_type(type), size_v, a.n_head_kv, a.n_kv);

    std::vector<float> work(llama_h2o_cuda_workspace(a).size, NAN);
    a.work = work.data();
    a.out  = out;

    launch_attend(a, nullptr);
    launch_combine(a, nullptr);
}

// Likewise; kept may be null, too.
void columns(const uint32_t * sizes,
        int type,
        size_t size_k,
        float scale,
        const uint16_t * q,
        const char * k,
        const uint16_t * mask,
        const float * credit,
        const float * kept,
        float * scores,
        float * squares,
        float * lse) {
    llama_h2o_attention a = read(sizes, type, size_k, scale, k, mask, credit, scores, squares);

    a.q    = operand(q, GGML_TYPE_F16, a.n_embd_head_k * sizeof(uint16_t), a.n_head, a.n_tokens);
    a.kept = operand(kept, GGML_TYPE_F32, sizeof(float), a.n_head, a.n_tokens);

    const llama_h2o_cuda_lse work(a);

    std::vector<float> of_parts(size_t(work.n) * work.n_parts, NAN);
    a.lse = a.out = of_parts.data();

    launch_lse(a, nullptr);
    launch_columns(a, nullptr);
    std::copy_n(a.out, work.n, lse);
}

// sizes: n_kv, n_tokens, n_head, n_head_kv, n_stream
void add(const uint32_t * sizes, const float * probs, const float * credit, float * sums) {
    llama_h2o_sum a = {};

    a.n_kv      = sizes[0];
    a.n_tokens  = sizes[1];
    a.n_head    = sizes[2];
    a.n_head_kv = sizes[3];
    a.n_stream  = sizes[4];

    const size_t size = a.n_kv * sizeof(float);

    a.probs  = { reinterpret_cast<const char *>(probs), GGML_TYPE_F32, size, size * a.n_tokens,
        size * a.n_tokens * a.n_head };
    a.credit = { reinterpret_cast<const char *>(credit), GGML_TYPE_F32, size, 0, size * a.n_tokens };

    a.sums          = sums;
    a.nb_sum_head   = size;
    a.nb_sum_stream = size * a.n_head_kv;

    launch_add(a, nullptr);
}

} // extern "C"
