// Times the CUDA kernels on their own: microseconds of one layer with the shape of Llama 3 8B, 8 KV heads of 128 elements in
// f16. scripts/gpu_check.py compiles and runs it.
//
// Prints a name, a figure and its unit a line, with tabs between them. Each figure is the median of some launches of a CUDA
// graph over many layers, as a model runs them: what one layer reads is not in the L2 cache from the launch before.
//
// For the CPU, with tests/native/cuda_on_cpu in place of CUDA's headers, `tiny` sizes only show that it runs.

#include "cuda/h2o-cuda-launch.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#ifdef __CUDACC__

// The two functions of ggml's CUDA backend that its header calls.
[[noreturn]] void ggml_cuda_error(const char * stmt, const char *, const char * file, int line, const char * msg) {
    std::fprintf(stderr, "%s:%d: %s: %s\n", file, line, stmt, msg);
    std::exit(1);
}

int ggml_cuda_get_device() {
    return 0;
}

#endif

namespace {

constexpr uint32_t N_EMBD      = 128;
constexpr uint32_t N_HEAD_KV   = 8;
constexpr uint32_t N_SEARCHING = 2; // KV heads that search
constexpr size_t SIZE_ROW      = N_EMBD * sizeof(uint16_t);
constexpr size_t SIZE_HEAD     = size_t(PAGE) * 2 * SIZE_ROW; // of a page
constexpr size_t SIZE_PAGE     = SIZE_HEAD * N_HEAD_KV;
constexpr size_t SIZE_CODES    = llama_h2o_code_layout { N_EMBD }.size();
constexpr size_t BEYOND_CACHE  = size_t(512) << 20; // bytes that no L2 cache holds
constexpr int BYTE             = 0x2c;              // 0x2c2c is a small number in f16
constexpr uint32_t N_LAYERS    = 32;

bool is_tiny = false;

//
// memory and time
//

using memory = std::unique_ptr<char, void (*)(char *)>;

memory allocate(size_t size, int byte, bool is_pinned = false) {
    char * data = nullptr;
    if (is_pinned) {
        CUDA_CHECK(cudaHostAlloc(&data, size, cudaHostAllocPortable | cudaHostAllocMapped));
    } else {
        CUDA_CHECK(cudaMalloc(&data, size));
    }
    CUDA_CHECK(cudaMemset(data, byte, size));

    return is_pinned ? memory(data, [](char * p) { CUDA_CHECK(cudaFreeHost(p)); })
                     : memory(data, [](char * p) { CUDA_CHECK(cudaFree(p)); });
}

template <typename T>
memory on_device(const std::vector<T> & values) {
    memory res = allocate(values.size() * sizeof(T), 0);
    CUDA_CHECK(cudaMemcpy(res.get(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault));

    return res;
}

template <typename T>
T * as(const memory & data) {
    return reinterpret_cast<T *>(data.get());
}

void print(const std::string & name, double figure, const char * unit) {
    std::printf("%s\t%.4g\t%s\n", name.c_str(), figure, unit);
    std::fflush(stdout);
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());

    return values[values.size() / 2];
}

// Microseconds of one layer.
double time_layers(uint32_t n_layers, const std::function<void(uint32_t, cudaStream_t)> & launch_layer) {
    static cudaStream_t stream = [] {
        cudaStream_t res;
        CUDA_CHECK(cudaStreamCreate(&res));
        return res;
    }();
    static cudaEvent_t events[2] = {};
    for (cudaEvent_t & event : events) {
        if (!event) {
            CUDA_CHECK(cudaEventCreate(&event));
        }
    }

    launch_layer(0, stream); // loads the kernels
    CUDA_CHECK(cudaStreamSynchronize(stream));

    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (uint32_t layer = 0; layer < n_layers; ++layer) {
        launch_layer(layer, stream);
    }
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));

    std::vector<double> times;
    for (int run = is_tiny ? 1 : -2; run < (is_tiny ? 2 : 9); ++run) {
        float ms = 0.0f;
        CUDA_CHECK(cudaEventRecord(events[0], stream));
        CUDA_CHECK(cudaGraphLaunch(executable, stream));
        CUDA_CHECK(cudaEventRecord(events[1], stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        CUDA_CHECK(cudaEventElapsedTime(&ms, events[0], events[1]));
        if (run >= 0) {
            times.push_back(ms * 1e3 / n_layers);
        }
    }
    CUDA_CHECK(cudaGraphExecDestroy(executable));
    CUDA_CHECK(cudaGraphDestroy(graph));

    return median(times);
}

// layers that together do not fit into a cache
uint32_t layers_of(size_t size) {
    return is_tiny ? 2 : uint32_t(std::clamp<size_t>(BEYOND_CACHE / size, 4, N_LAYERS));
}

//
// attention to cells
//

// K, V and scores of some layers, and the queries of some tokens.
struct cells {
    uint32_t n_layers;
    size_t size; // of K, and of V, of a layer
    memory rows;
    memory scores;
    memory q;
    memory mask;
    memory lse;
    memory out;
    llama_h2o_attention attention = {};

    cells(uint32_t n_kv, uint32_t n_group, uint32_t n_tokens) :
        n_layers(layers_of(2 * n_kv * N_HEAD_KV * SIZE_ROW)), size(n_kv * N_HEAD_KV * SIZE_ROW),
        rows(allocate(2 * size * n_layers, BYTE)), scores(allocate(n_kv * N_HEAD_KV * sizeof(float) * n_layers, 0)),
        q(random_queries(size_t(n_tokens) * n_group * N_HEAD_KV * N_EMBD)),
        mask(allocate(size_t(n_tokens) * n_kv * sizeof(uint16_t), 0)),
        lse(allocate(size_t(n_tokens) * n_group * N_HEAD_KV * sizeof(float), 0)),
        out(allocate(size_t(n_tokens) * n_group * N_HEAD_KV * (N_EMBD + 1) * sizeof(float), 0)) {
        const auto rows_of = [&](const memory & data, ggml_type type, size_t size_row, size_t n_heads) {
            return llama_h2o_attention::operand { data.get(), type, size_row * n_heads, size_row, 0 };
        };

        attention.n_embd_head_k = N_EMBD;
        attention.n_embd_head_v = N_EMBD;
        attention.n_head        = N_HEAD_KV * n_group;
        attention.n_head_kv     = N_HEAD_KV;
        attention.n_kv          = n_kv;
        attention.n_tokens      = n_tokens;
        attention.n_stream      = 1;
        attention.n_slots       = llama_h2o_cuda_workspace::MAX_BLOCKS;
        attention.scale         = 0.0884f;

        attention.q    = rows_of(q, GGML_TYPE_F32, N_EMBD * sizeof(float), attention.n_head);
        attention.k    = rows_of(rows, GGML_TYPE_F16, SIZE_ROW, N_HEAD_KV);
        attention.v    = attention.k;
        attention.mask = rows_of(mask, GGML_TYPE_F16, n_kv * sizeof(uint16_t), 1);
        attention.lse  = as<float>(lse);
        attention.out  = as<float>(out);

        attention.nb_score_head = n_kv * sizeof(float);
    }

    static memory random_queries(size_t n) {
        std::mt19937 rng(1);
        std::normal_distribution<float> normal;

        std::vector<float> res(n);
        for (float & x : res) {
            x = normal(rng);
        }

        return on_device(res);
    }

    llama_h2o_attention of_layer(uint32_t layer) const {
        llama_h2o_attention res = attention;

        res.k.data = rows.get() + 2 * size * (layer % n_layers);
        res.v.data = res.k.data + size;
        res.scores = as<float>(scores) + size_t(layer % n_layers) * N_HEAD_KV * res.n_kv;

        return res;
    }
};

void time_attention(uint32_t n_kv, uint32_t n_group) {
    const cells from(n_kv, n_group, 1);
    const memory work = allocate(llama_h2o_cuda_workspace(from.attention).size * sizeof(float), 0);

    const double us = time_layers(from.n_layers, [&](uint32_t layer, cudaStream_t stream) {
        llama_h2o_attention a = from.of_layer(layer);
        a.work                = as<float>(work);
        launch_attend(a, stream);
        launch_combine(a, stream);
    });

    const std::string name = "attend " + std::to_string(n_kv) + " cells, " + std::to_string(n_group) + " query heads";
    print(name, us, "us");
    print(name + ", read", 2.0 * double(from.size) / us / 1e3, "GB/s");
}

//
// search
//

// The archive of some layers: pages that all of them share, and codes of their own.
struct archive {
    uint32_t n_pages;
    uint32_t n_groups; // of tokens that search together
    memory slab;
    memory pages;
    memory codes; // [N_LAYERS][N_SEARCHING][n_pages]
    memory hidden;
    memory factors;
    memory sums; // shares, gains, interest and weights
    memory scoring;
    memory heads;
    memory texts; // [N_LAYERS]

    archive(uint32_t n_pages, uint32_t n_tokens, uint32_t n_alone, uint32_t n_together, bool is_pinned) :
        n_pages(n_pages), n_groups((n_tokens + 15) / 16),
        slab(allocate(std::min(n_pages, 256u) * SIZE_PAGE, BYTE, is_pinned)), pages(page_table()),
        codes(random_codes()), hidden(allocate(size_t(n_pages) * N_HEAD_KV * PAGE / 8, 0xff)),
        factors(allocate(size_t(n_pages) * 2 * N_EMBD * sizeof(float), 0)),
        sums(allocate((1 + N_HEAD_KV + size_t(n_pages) * (PAGE + PAGE / LLAMA_H2O_PASSAGE)) * 8, 0)),
        scoring(allocate(size_t(N_SEARCHING) * n_groups * (n_pages * PAGE + llama_h2o_device_text::N_COUNTS) * 4, 0)),
        heads(head_table(n_alone, n_together)), texts(text_table()) {}

    // other pages for each layer
    memory page_table() const {
        const uint32_t n = std::min(n_pages, 256u);

        std::vector<const char *> res;
        for (uint32_t layer = 0; layer < N_LAYERS; ++layer) {
            for (uint32_t i = 0; i < n_pages; ++i) {
                res.push_back(slab.get() + (i + layer * 7) % n * SIZE_PAGE);
            }
        }

        return on_device(res);
    }

    memory random_codes() const {
        const llama_h2o_code_layout layout { N_EMBD };

        std::mt19937 rng(2);

        std::vector<uint32_t> of_layer(SIZE_CODES * N_SEARCHING * n_pages / 4);
        std::generate(of_layer.begin(), of_layer.end(), rng);
        for (uint32_t i = 0; i < N_SEARCHING * n_pages; ++i) {
            char * page = reinterpret_cast<char *>(of_layer.data()) + i * SIZE_CODES;
            std::memset(page + layout.scales(), BYTE, SIZE_CODES - layout.scales());
        }

        const size_t size = of_layer.size() * 4;
        memory res        = allocate(size * N_LAYERS, 0);
        for (uint32_t layer = 0; layer < N_LAYERS; ++layer) {
            CUDA_CHECK(cudaMemcpy(res.get() + layer * size, of_layer.data(), size, cudaMemcpyDefault));
        }

        return res;
    }

    static memory head_table(uint32_t n_alone, uint32_t n_together) {
        std::vector<llama_h2o_device_text::head> res;
        for (uint32_t head = 0; head < N_HEAD_KV; ++head) {
            const uint64_t keys = head * SIZE_HEAD;
            res.push_back({ head < N_SEARCHING ? int32_t(head) : -1, n_alone, n_together, keys, keys + SIZE_ROW });
        }

        return on_device(res);
    }

    memory text_table() const {
        auto * sum = as<unsigned long long>(sums);

        std::vector<llama_h2o_device_text> res(N_LAYERS);
        for (uint32_t layer = 0; layer < N_LAYERS; ++layer) {
            llama_h2o_device_text & text = res[layer];

            text.n_pages     = n_pages;
            text.n_unrotated = 0;
            text.focus       = 0; // a passage that all heads read
            text.first_slot  = layer % n_pages;
            text.max_pages   = n_pages;
            text.first_near  = n_pages;
            text.pages       = as<const char *>(pages) + size_t(layer) * n_pages;
            text.codes       = codes.get() + size_t(layer) * N_SEARCHING * n_pages * SIZE_CODES;
            text.hidden      = as<uint64_t>(hidden);
            text.factors     = as<float>(factors);
            text.heads       = as<llama_h2o_device_text::head>(heads);
            text.shares      = sum;
            text.gains       = sum + 1;
            text.interest    = text.gains + N_HEAD_KV;
            text.weights     = text.interest + size_t(n_pages) * (PAGE / LLAMA_H2O_PASSAGE);
            text.max_groups  = n_groups;
            text.counts      = as<uint32_t>(scoring);
            text.scores      = text.counts + size_t(N_SEARCHING) * n_groups * llama_h2o_device_text::N_COUNTS;
        }

        return on_device(res);
    }
};

// Rows that a KV head retrieves by default with a window of 8,192 at 20 %: for a token alone, and for tokens together.
std::pair<uint32_t, uint32_t> n_rows() {
    return is_tiny ? std::make_pair(8u, 32u) : std::make_pair(205u, 820u);
}

// n_find: rows that a KV head retrieves for the token, or for tokens that search together
void time_search(uint32_t n_pages, uint32_t n_tokens, uint32_t n_find, bool is_pinned) {
    const uint32_t n_kv       = is_tiny ? 64 : 2048;
    const bool is_alongside   = n_tokens > 1;
    const uint32_t n_together = is_alongside ? n_find : std::max(n_find, n_rows().second);
    const archive archived(n_pages, n_tokens, n_find, n_together, is_pinned);
    const cells from(n_kv, 4, n_tokens);

    llama_h2o_search search = {};

    search.n_find        = n_together;
    search.type          = GGML_TYPE_F16;
    search.nb_row        = 2 * SIZE_ROW;
    search.rotation      = { N_EMBD, 0, true };
    search.device_stride = 1;

    llama_h2o_attention a = from.of_layer(0);
    a.search              = &search;

    const memory work = allocate(llama_h2o_cuda_search_space(a, is_alongside).size * sizeof(float), 0);
    a.work            = as<float>(work);
    if (!is_alongside) {
        launch_attend(a, nullptr);
        CUDA_CHECK(cudaStreamSynchronize(nullptr));
    }

    const double us = time_layers(is_tiny ? 2 : N_LAYERS, [&](uint32_t layer, cudaStream_t stream) {
        search.on_device = as<llama_h2o_device_text>(archived.texts) + layer;
        launch_search(a, is_alongside, stream);
    });

    print("search " + std::to_string(n_pages) + " pages, " + std::to_string(n_tokens) + " tokens, " +
                    std::to_string(n_find) + " rows, " + (is_pinned ? "pinned" : "device"),
            us, "us");
}

//
// archiving and the host's memory
//

void time_archiving(uint32_t n_tokens) {
    constexpr uint32_t N_EACH = 512 / PAGE + 1; // pages of a layer

    const uint32_t n_layers = is_tiny ? 2 : N_LAYERS;
    const cells from(std::max(n_tokens, LLAMA_H2O_TILE), 1, 1);
    const memory slab = allocate(n_layers * N_EACH * SIZE_PAGE, 0, true);

    std::vector<char *> table;
    for (uint32_t i = 0; i < n_layers * N_EACH; ++i) {
        table.push_back(slab.get() + i * SIZE_PAGE);
    }
    std::vector<int32_t> numbers(n_tokens);
    for (uint32_t i = 0; i < n_tokens; ++i) {
        numbers[i] = int32_t(i);
    }
    const memory pages   = on_device(table);
    const memory tokens  = on_device(numbers);
    const memory zeros   = allocate(size_t(N_HEAD_KV) * n_tokens * sizeof(int32_t), 0);
    const memory factors = allocate(2 * N_EMBD * sizeof(float), 0);

    const double us = time_layers(n_layers, [&](uint32_t layer, cudaStream_t stream) {
        const llama_h2o_attention rows = from.of_layer(layer);

        llama_h2o_archived_rows a = {};

        a.k         = { rows.k.data, GGML_TYPE_F16, rows.k.nb_row, rows.k.nb_head, N_EMBD, 0 };
        a.v         = { rows.v.data, GGML_TYPE_F16, rows.v.nb_row, rows.v.nb_head, N_EMBD, SIZE_ROW };
        a.how       = { N_EMBD, 0, true };
        a.factors   = as<float>(factors);
        a.rotations = as<int32_t>(zeros);
        a.cells     = as<int32_t>(tokens);
        a.pages     = as<char *>(pages) + size_t(layer) * N_EACH;
        a.stride    = SIZE_HEAD;
        a.type      = GGML_TYPE_F16;
        a.nb_row    = 2 * SIZE_ROW;
        a.n_tokens  = n_tokens;
        a.first     = as<int32_t>(zeros);
        a.n_head_kv = N_HEAD_KV;
        launch_archive(a, stream);
    });

    const std::string name = "archive " + std::to_string(n_tokens) + " tokens";
    print(name, us, "us");
    print(name + ", written", 2.0 * double(n_tokens) * N_HEAD_KV * SIZE_ROW / us / 1e3, "GB/s");
}

__global__ void read_all(const uint4 * data, size_t n, uint32_t * sink) {
    uint32_t sum = 0;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        const uint4 words  = data[i];
        sum               += words.x ^ words.y ^ words.z ^ words.w;
    }
    if (sum == 1) { // or nothing would be read
        *sink = sum;
    }
}

void time_reading(bool is_pinned) {
    const size_t size = is_tiny ? 1 << 16 : is_pinned ? BEYOND_CACHE : 4 * BEYOND_CACHE;
    const memory data = allocate(size, BYTE, is_pinned);
    const memory sink = allocate(sizeof(uint32_t), 0);

    const double us = time_layers(1, [&](uint32_t, cudaStream_t stream) {
        ggml_cuda_kernel_launch(read_all,
                ggml_cuda_kernel_launch_params(dim3(is_tiny ? 2 : 4096), dim3(256), size_t(0), stream),
                static_cast<const uint4 *>(as<uint4>(data)), size_t(size / sizeof(uint4)), as<uint32_t>(sink));
    });
    print(is_pinned ? "zero-copy read of pinned memory" : "read of device memory", double(size) / us / 1e3, "GB/s");
}

void time_pinning() {
    const size_t size = size_t(is_tiny ? 1 : 9) << 20; // a slab

    std::vector<double> times;
    std::vector<memory> slabs;
    for (int run = 0; run < 5; ++run) {
        char * data        = nullptr;
        const auto started = std::chrono::steady_clock::now();
        CUDA_CHECK(cudaHostAlloc(&data, size, cudaHostAllocPortable | cudaHostAllocMapped));
        const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - started;
        slabs.emplace_back(data, [](char * p) { CUDA_CHECK(cudaFreeHost(p)); });
        times.push_back(ms.count() / (double(size) / (1 << 20)));
    }
    print("pinned allocation", median(times), "ms/MiB");
}

} // namespace

// In the order in which they matter, as time may run out.
extern "C" int time_kernels(bool tiny) {
    is_tiny = tiny;

    const std::vector<uint32_t> n_pages =
            is_tiny ? std::vector<uint32_t> { 2, 3 } : std::vector<uint32_t> { 64, 256, 1024 };
    const uint32_t n_tokens          = is_tiny ? 20 : 512;
    const auto [n_alone, n_together] = n_rows();

    for (const uint32_t n : n_pages) {
        time_search(n, 1, n_alone, true);
        time_search(n, n_tokens, n_together, true);
    }
    // what differs between these is attention to retrieved rows
    for (const bool is_pinned : { true, false }) {
        for (const uint32_t n_find : { 1u, n_alone, n_together }) {
            if (n_find != n_alone || !is_pinned) {
                time_search(n_pages[0], 1, n_find, is_pinned);
            }
        }
        time_search(n_pages[0], n_tokens, n_alone, is_pinned);
    }
    for (const uint32_t n_kv : is_tiny ? std::vector<uint32_t> { 128 } : std::vector<uint32_t> { 2048, 8192, 32768 }) {
        time_attention(n_kv, 1);
        time_attention(n_kv, 4);
    }
    time_archiving(is_tiny ? 20 : 512);
    time_pinning();
    time_reading(true);
    time_reading(false);

    return 0;
}

#ifdef __CUDACC__
int main() {
    return time_kernels(false);
}
#endif
