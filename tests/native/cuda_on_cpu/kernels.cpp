// The CUDA kernels for ctypes, on the CPU.

#include "cuda/h2o-cuda-launch.cuh"

#include <vector>

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
    llama_h2o_attention a = {};

    a.n_embd_head_k = sizes[0];
    a.n_embd_head_v = sizes[1];
    a.n_head        = sizes[2];
    a.n_head_kv     = sizes[3];
    a.n_kv          = sizes[4];
    a.n_tokens      = sizes[5];
    a.n_stream      = sizes[6];
    a.scale         = scale;

    // [n_stream][n_tokens or n_kv][heads][n_embd]
    const auto operand = [&](const void * data, ggml_type t, size_t size_row, size_t n_heads, size_t n) {
        return llama_h2o_attention::operand { static_cast<const char *>(data), t, size_row * n_heads, size_row,
            size_row * n_heads * n };
    };
    const auto row_type = ggml_type(type);

    a.q      = operand(q, GGML_TYPE_F32, a.n_embd_head_k * sizeof(float), a.n_head, a.n_tokens);
    a.k      = operand(k, row_type, size_k, a.n_head_kv, a.n_kv);
    a.v      = operand(v, row_type, size_v, a.n_head_kv, a.n_kv);
    a.mask   = operand(mask, GGML_TYPE_F16, a.n_kv * sizeof(uint16_t), 1, a.n_tokens);
    a.credit = operand(credit, GGML_TYPE_F32, a.n_kv * sizeof(float), 1, a.n_tokens);

    a.scores          = scores;
    a.squares         = squares;
    a.nb_score_head   = a.n_kv * sizeof(float);
    a.nb_score_stream = a.n_kv * sizeof(float) * a.n_head_kv;

    std::vector<float> work(llama_h2o_cuda_workspace(a).size, NAN);
    a.work = work.data();
    a.out  = out;

    launch_attend(a, nullptr);
    launch_combine(a, nullptr);
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

// sizes: n_cells, n_heads, n_ages, n_blocks. pos: with the number of rows that stay and the next position behind it.
void choose(const uint32_t * sizes, const float * sums, const double * divisors, const int32_t * pos, uint32_t * bits) {
    llama_h2o_device_choice a = { sums, divisors, pos, nullptr, bits, sizes[0], sizes[1], sizes[2], sizes[3] };

    std::vector<uint64_t> keys(size_t(a.n_blocks) * a.n_cells, ~uint64_t(0));
    a.keys = keys.data();

    launch_choose(a, nullptr);
}

// sizes: n_embd, n_dims, first, neox, n
void turn(const uint32_t * sizes, uint16_t * keys, const float * factors, const int32_t * rows, const int32_t * turns) {
    launch_turn({ keys, sizes[0], { sizes[1], sizes[2], sizes[3] != 0 }, factors, rows, turns, sizes[4] }, nullptr);
}

} // extern "C"
