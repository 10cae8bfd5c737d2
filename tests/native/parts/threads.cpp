// The number of threads of a graph, and attention with any number of threads, from the installed library for ctypes.

#include "graph/h2o-threads.h"

#include "kernels/h2o-kernel.h"

#include <cmath>
#include <vector>

extern "C" {

llama_h2o_threads * new_threads() {
    return new llama_h2o_threads;
}

void delete_threads(llama_h2o_threads * threads) {
    delete threads;
}

int choose(llama_h2o_threads * threads, int n_asked, double now) {
    return threads->choose(n_asked, now);
}

void add(llama_h2o_threads * threads, int n_threads, double passed, double used, double now) {
    threads->add(n_threads, passed, used, now);
}

// the divisor of row sizes, or 0 if this processor does not have the kernel
uint32_t lanes_of(const char * name) {
    const llama_h2o_kernel * kernel = llama_h2o_find_kernel(name);

    return kernel ? kernel->n_lanes : 0;
}

// Attention of one layer with n_threads threads, run one after another, with work space for n_slots. sizes: n_embd, n_head,
// n_head_kv, n_kv, n_tokens, n_slots, n_threads. q is [n_head][n_tokens][n_embd], k and v are [n_head_kv][n_kv][n_embd] in F32,
// mask is [n_tokens][n_kv] in F16, sinks [n_head] or null, scores and their squares [2][n_head_kv][n_kv],
// out [n_tokens][n_head][n_embd].
void attend(const char * name,
        const uint32_t * sizes,
        const float * q,
        const float * k,
        const float * v,
        const uint16_t * mask,
        const float * sinks,
        float * scores,
        float * out) {
    const auto operand = [](const auto * data, ggml_type type, size_t nb_row, size_t nb_head) {
        return llama_h2o_attention::operand { reinterpret_cast<const char *>(data), type, nb_row, nb_head, 0 };
    };

    llama_h2o_attention a = {};

    a.n_embd_head_k = a.n_embd_head_v = sizes[0];
    a.n_head                          = sizes[1];
    a.n_head_kv                       = sizes[2];
    a.n_kv                            = sizes[3];
    a.n_tokens                        = sizes[4];
    a.n_slots                         = sizes[5];
    a.n_stream                        = 1;
    a.scale                           = 1.0f / std::sqrt(float(sizes[0]));

    const size_t row = sizeof(float) * a.n_embd_head_k;

    a.q             = operand(q, GGML_TYPE_F32, row, row * a.n_tokens);
    a.k             = operand(k, GGML_TYPE_F32, row, row * a.n_kv);
    a.v             = operand(v, GGML_TYPE_F32, row, row * a.n_kv);
    a.mask          = operand(mask, GGML_TYPE_F16, sizeof(uint16_t) * a.n_kv, 0);
    a.sinks         = sinks;
    a.scores        = scores;
    a.squares       = scores + size_t(a.n_head_kv) * a.n_kv;
    a.nb_score_head = sizeof(float) * a.n_kv;
    a.out           = out;

    // unwritten numbers must not be zero by chance
    std::vector<float> work(llama_h2o_work_size(a), NAN);
    a.work = work.data();

    const llama_h2o_kernel * kernel = llama_h2o_find_kernel(name);
    for (const auto step : { kernel->attend, kernel->combine }) {
        for (uint32_t ith = 0; ith < sizes[6]; ++ith) {
            step(a, ith, sizes[6]);
        }
    }
}
}
