// One product by ggml's AMX code, which is compiled together with this file: reads type, N, K, M and the float weights
// [N, K] and inputs [M, K] from standard input, and writes the weights as the type has them, and the result [M, N].

#include "tiles.h"

#include "amx/mmq.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cstdlib>
#include <vector>

// what the code wants of the rest of ggml's CPU backend; there is one thread
extern "C" void ggml_barrier(struct ggml_threadpool *) {}

namespace {

template <typename T>
std::vector<T> read(size_t n) {
    std::vector<T> res(n);
    if (fread(res.data(), sizeof(T), n, stdin) != n) {
        abort();
    }
    return res;
}

ggml_tensor matrix(ggml_type type, int64_t n_in, int64_t n_out, void * data) {
    ggml_tensor res = {};

    res.type  = type;
    res.data  = data;
    res.ne[0] = n_in;
    res.ne[1] = n_out;
    res.ne[2] = res.ne[3] = 1;
    res.nb[0]             = ggml_type_size(type);
    res.nb[1]             = ggml_row_size(type, n_in);
    res.nb[2] = res.nb[3] = res.nb[1] * n_out;

    return res;
}

} // namespace

int main() {
    tiles::install_if_needed();
    ggml_cpu_init();

    const auto head    = read<int32_t>(4);
    const auto type    = ggml_type(head[0]);
    const int64_t N    = head[1];
    const int64_t K    = head[2];
    const int64_t M    = head[3];
    const auto weights = read<float>(N * K);
    auto inputs        = read<float>(M * K);

    std::vector<char> rows(ggml_row_size(type, K) * N);
    ggml_quantize_chunk(type, weights.data(), rows.data(), 0, N, K, nullptr);

    std::vector<float> exact(N * K);
    ggml_get_type_traits(type)->to_float(rows.data(), exact.data(), N * K);

    ggml_tensor w     = matrix(type, K, N, nullptr);
    const size_t size = ggml_backend_amx_get_alloc_size(&w);
    w.data            = aligned_alloc(64, (size + 63) / 64 * 64);
    ggml_backend_amx_convert_weight(&w, rows.data(), 0, rows.size());

    std::vector<float> outputs(M * N);
    ggml_tensor x = matrix(GGML_TYPE_F32, K, M, inputs.data());
    ggml_tensor y = matrix(GGML_TYPE_F32, N, M, outputs.data());
    y.src[0]      = &w;
    y.src[1]      = &x;

    std::vector<char> work(ggml_backend_amx_desired_wsize(&y));
    ggml_compute_params params = {};
    params.nth                 = 1;
    params.wsize               = work.size();
    params.wdata               = work.data();
    ggml_backend_amx_mul_mat(&params, &y);

    fwrite(exact.data(), sizeof(float), exact.size(), stdout);
    fwrite(outputs.data(), sizeof(float), outputs.size(), stdout);
    free(w.data);

    return fflush(stdout);
}
