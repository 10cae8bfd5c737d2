// The scan on its own, on one thread: keys that a few queries look at, in one call, and in pages that are each turned to
// another position.
//
//   LIB=$(echo .venv/lib/python3*/site-packages/pyh2o/lib)
//   c++ -std=c++17 -O2 -Inative/src -I$(echo build/*/llama.cpp/ggml/include) benchmarks/scan_kernel.cpp \
//       -L$LIB -lllama -lggml -lggml-cpu -lggml-base -Wl,-rpath,$PWD/$LIB -o scan_kernel
//   ./scan_kernel
//
// The shape is that of a KV head of the demo model and the last 16 tokens.

#include "kernels/h2o-kernel.h"
#include "kernels/h2o-scan.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

static constexpr uint32_t N_EMBD_HEAD = 64;
static constexpr uint32_t N_ROWS      = 3 * 16;
static constexpr uint32_t N_KEYS      = 1 << 16;
static constexpr uint32_t N_PAGE      = 64;
static constexpr int N_RUNS           = 15;

static std::vector<float> random_numbers(size_t n) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;

    std::vector<float> res(n);
    for (float & x : res) {
        x = normal(rng);
    }

    return res;
}

// Scans all keys in calls of n_call keys.
static void scan_all(const llama_h2o_kernel & kernel, llama_h2o_scan scan, uint32_t n_call) {
    scan.n_keys = n_call;
    for (uint32_t key = 0; key < N_KEYS; key += n_call) {
        kernel.scan(scan);
        scan.keys += n_call * scan.nb_row;
        scan.max  += size_t(scan.n_blocks()) * N_ROWS;
        scan.sum  += size_t(scan.n_blocks()) * N_ROWS;
    }
}

static double median_seconds(const llama_h2o_kernel & kernel, const llama_h2o_scan & scan, uint32_t n_call) {
    std::vector<double> seconds;
    for (int run = 0; run < N_RUNS; ++run) {
        const auto start = std::chrono::steady_clock::now();
        scan_all(kernel, scan, n_call);
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::nth_element(seconds.begin(), seconds.begin() + N_RUNS / 2, seconds.end());

    return seconds[N_RUNS / 2];
}

static void measure(const llama_h2o_kernel & kernel, ggml_type type, bool turned) {
    const std::vector<float> floats = random_numbers(size_t(N_KEYS) * N_EMBD_HEAD);

    std::vector<char> keys(ggml_row_size(type, floats.size()));
    ggml_quantize_chunk(type, floats.data(), keys.data(), 0, N_KEYS, N_EMBD_HEAD, nullptr);

    std::vector<float> queries(llama_h2o_arranged_size(N_ROWS, N_EMBD_HEAD));
    llama_h2o_arrange_queries(floats.data(), N_ROWS, N_EMBD_HEAD, 0.125f, queries.data());

    const size_t n_results = size_t(N_KEYS) / LLAMA_H2O_SCAN_BLOCK * N_ROWS;
    std::vector<float> max(n_results);
    std::vector<float> sum(n_results);
    std::vector<float> work(llama_h2o_scan_work_size(N_ROWS, N_EMBD_HEAD));

    std::vector<float> turn;
    for (uint32_t i = 0; i < N_EMBD_HEAD / 2; ++i) {
        turn.insert(turn.end(), { std::cos(0.1f * i), std::sin(0.1f * i) });
    }

    llama_h2o_scan scan = {};

    scan.n_embd      = N_EMBD_HEAD;
    scan.n_rows      = N_ROWS;
    scan.queries     = queries.data();
    scan.type        = type;
    scan.keys        = keys.data();
    scan.nb_row      = ggml_row_size(type, N_EMBD_HEAD);
    scan.turn        = turned ? turn.data() : nullptr;
    scan.n_turn_dims = N_EMBD_HEAD;
    scan.turn_neox   = true;
    scan.max         = max.data();
    scan.sum         = sum.data();
    scan.work        = work.data();

    const double seconds = median_seconds(kernel, scan, turned ? N_PAGE : N_KEYS);
    const double n_pairs = double(N_KEYS) * N_ROWS;
    printf("| %s | %s | %s | %.2f | %.1f | %.1f |\n", kernel.name, ggml_type_name(type),
            turned ? "turned page by page" : "in one call", seconds / n_pairs * 1e9,
            2 * n_pairs * N_EMBD_HEAD / seconds / 1e9, keys.size() / seconds / 1e9);
}

int main() {
    printf("| kernel | keys | | ns per key and query | GFLOP/s of the products | GB/s |\n");
    printf("|---|---|---|---|---|---|\n");

    for (const char * name : { "avx512", "avx2", "neon", "portable" }) {
        const llama_h2o_kernel * kernel = llama_h2o_find_kernel(name);
        if (!kernel) {
            continue;
        }
        for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
            measure(*kernel, type, false);
            measure(*kernel, type, true);
        }
    }

    return 0;
}
