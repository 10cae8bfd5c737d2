// A GPU that is none, for tests of what runs where: a device of ggml with memory of its own, that computes with ggml's CPU
// backend, and our ops with our CUDA kernels. As the CUDA backend does, it asks for the products of large batches whose
// weights lie on the CPU. A coarse one rounds what it multiplies, but for few tokens, as tensor cores do.

#include "cuda/h2o-cuda.cu"

#include "ggml-backend-impl.h"

#include <atomic>
#include <cmath>
#include <functional>
#include <list>
#include <map>
#include <utility>
#include <vector>

// What the host has copied from and to the device's memory.
extern "C" {
std::atomic<uint64_t> bytes_read, n_reads, bytes_written, n_writes;
// Graphs that were run as they were before.
std::atomic<uint64_t> n_replayed;
}

namespace {

constexpr int64_t MIN_OFFLOADED = 32; // tokens of a batch, as in ggml-cuda.cu
constexpr int64_t MAX_EXACT     = 3;  // tokens whose products are those of float32 there

bool is_coarse = false;
bool flushes   = false; // denormal floats of rows that are copied

ggml_backend_dev_t cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

const char * name_of_buffers(ggml_backend_buffer_type_t) {
    return "Mock0";
}

void read_lines(ggml_backend_buffer_t,
        const ggml_tensor * tensor,
        void * data,
        size_t offset,
        size_t size,
        size_t n,
        size_t stride_tensor,
        size_t stride_data) {
    for (size_t i = 0; i < n; ++i) {
        std::memcpy(static_cast<char *>(data) + i * stride_data,
                static_cast<const char *>(tensor->data) + offset + i * stride_tensor, size);
    }
    bytes_read += n * size;
    n_reads    += 1;
}

void read(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    read_lines(buffer, tensor, data, offset, size, 1, 0, 0);
}

void write_lines(ggml_backend_buffer_t,
        ggml_tensor * tensor,
        const void * data,
        size_t offset,
        size_t size,
        size_t n,
        size_t stride_tensor,
        size_t stride_data) {
    for (size_t i = 0; i < n; ++i) {
        std::memcpy(static_cast<char *>(tensor->data) + offset + i * stride_tensor,
                static_cast<const char *>(data) + i * stride_data, size);
    }
    bytes_written += n * size;
    n_writes      += 1;
}

void write(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    write_lines(buffer, tensor, data, offset, size, 1, 0, 0);
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t res = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (res) {
        res->buft                = type;
        res->iface.get_tensor    = read;
        res->iface.set_tensor    = write;
        res->iface.get_tensor_2d = read_lines;
        res->iface.set_tensor_2d = write_lines;
    }

    return res;
}

size_t alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

// ---

ggml_guid guid = { 'm', 'o', 'c', 'k' };

const char * name_of_backend(ggml_backend_t) {
    return "Mock0";
}

void free_backend(ggml_backend_t backend) {
    ggml_backend_free(static_cast<ggml_backend_t>(backend->context));
    delete backend;
}

// A factor with ten bits, for the time of a product.
struct rounded {
    explicit rounded(ggml_tensor * tensor) : tensor(tensor), data(tensor->data), words(ggml_nbytes(tensor) / 4) {
        std::memcpy(words.data(), data, ggml_nbytes(tensor));
        for (uint32_t & word : words) {
            word = (word + 0x1000) & 0xffffe000;
        }
        tensor->data = words.data();
    }

    ~rounded() { tensor->data = data; }

    ggml_tensor * tensor;
    void * data;
    std::vector<uint32_t> words;
};

std::list<rounded> round_factors(ggml_tensor * op) {
    std::list<rounded> res;

    const int n_factors = op->op == GGML_OP_FLASH_ATTN_EXT                     ? 3
                          : op->op == GGML_OP_MUL_MAT && op->ne[1] > MAX_EXACT ? 2
                                                                               : 0;
    for (int i = 0; is_coarse && i < n_factors; ++i) {
        if (op->src[i]->type == GGML_TYPE_F32) {
            res.emplace_back(op->src[i]);
        }
    }

    return res;
}

void flush_rows(const ggml_tensor * node) {
    const bool copies = node->op == GGML_OP_GET_ROWS || node->op == GGML_OP_SET_ROWS;

    auto * data = static_cast<float *>(node->data);
    for (int64_t i = 0; flushes && copies && node->type == GGML_TYPE_F32 && i < ggml_nelements(node); ++i) {
        data[i] = std::fpclassify(data[i]) == FP_SUBNORMAL ? 0.0f : data[i];
    }
}

// A graph that is the same as before, as the CUDA backend sees it, is run with the arguments that its kernels had then.
struct recorded_graph {
    std::vector<char> nodes;
    std::vector<std::vector<std::function<void()>>> kernels; // of each node

    // Whether the graph is the same.
    bool is_new(const ggml_cgraph * graph) {
        std::vector<char> now;
        const auto add = [&](const void * data, size_t size) {
            now.insert(now.end(), static_cast<const char *>(data), static_cast<const char *>(data) + size);
        };
        for (int i = 0; i < graph->n_nodes; ++i) {
            add(graph->nodes[i], sizeof(ggml_tensor));
            for (const ggml_tensor * src : graph->nodes[i]->src) {
                if (src) {
                    add(&src->data, sizeof(src->data));
                    add(src->ne, sizeof(src->ne));
                    add(src->nb, sizeof(src->nb));
                }
            }
        }
        const bool res = now != nodes;
        nodes          = std::move(now);

        return res;
    }
};

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    auto * on_cpu = static_cast<ggml_backend_t>(backend->context);

    static std::map<const ggml_tensor *, recorded_graph> recorded;

    auto & record     = recorded[graph->nodes[0]];
    const bool is_new = record.is_new(graph);
    if (is_new) {
        record.kernels.assign(graph->n_nodes, {});
    } else {
        n_replayed += 1;
    }

    for (int i = 0; i < graph->n_nodes; ++i) {
        if (graph->nodes[i]->op == GGML_OP_CUSTOM && is_new) {
            cuda_recording = &record.kernels[i];
            llama_h2o_cuda_compute(graph->nodes[i], nullptr);
            cuda_recording = nullptr;
        }
        if (graph->nodes[i]->op == GGML_OP_CUSTOM) {
            for (const auto & run : record.kernels[i]) {
                if (!is_new) {
                    run();
                }
            }
            continue;
        }
        const auto factors = round_factors(graph->nodes[i]);

        ggml_cgraph node         = ggml_graph_view(graph, i, i + 1);
        const ggml_status status = ggml_backend_graph_compute(on_cpu, &node);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        flush_rows(graph->nodes[i]);
    }

    return GGML_STATUS_SUCCESS;
}

// ---

const char * name_of_device(ggml_backend_dev_t) {
    return "Mock0";
}

const char * description(ggml_backend_dev_t) {
    return "a GPU that is none";
}

void memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = size_t(8) << 30;
}

enum ggml_backend_dev_type type_of_device(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void properties(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = name_of_device(dev);
    props->description = description(dev);
    props->type        = type_of_device(dev);
    memory(dev, &props->memory_free, &props->memory_total);
}

ggml_backend_t make_backend(ggml_backend_dev_t dev, const char *) {
    ggml_backend_i functions = {};

    functions.get_name      = name_of_backend;
    functions.free          = free_backend;
    functions.graph_compute = compute;

    ggml_backend_t on_cpu = ggml_backend_dev_init(cpu(), nullptr);

    // a node at a time: others would only wait
    reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(cpu()), "ggml_backend_set_n_threads"))(on_cpu, 1);

    return new ggml_backend { &guid, functions, dev, on_cpu };
}

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t dev) {
    static ggml_backend_buffer_type res = [dev] {
        ggml_backend_buffer_type_i functions = {};

        functions.get_name      = name_of_buffers;
        functions.alloc_buffer  = allocate;
        functions.get_alignment = alignment;

        return ggml_backend_buffer_type { functions, dev, nullptr };
    }();

    return &res;
}

ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t) {
    return ggml_backend_cpu_buffer_type();
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    const char * lacked = std::getenv("MOCK_LACKS");
    if (lacked && std::strcmp(lacked, ggml_op_name(op->op)) == 0) {
        return false;
    }

    return op->op == GGML_OP_CUSTOM ? llama_h2o_cuda_has_op(op) : ggml_backend_dev_supports_op(cpu(), op);
}

bool supports_buffers(ggml_backend_dev_t dev, ggml_backend_buffer_type_t type) {
    return type == buffer_type(dev);
}

bool offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT && op->ne[1] >= MIN_OFFLOADED;
}

// ---

const char * name_of_registry(ggml_backend_reg_t) {
    return "Mock";
}

size_t n_devices(ggml_backend_reg_t) {
    return 1;
}

ggml_backend_dev_t device(ggml_backend_reg_t reg, size_t) {
    static ggml_backend_device res = [reg] {
        ggml_backend_device_i functions = {};

        functions.get_name        = name_of_device;
        functions.get_description = description;
        functions.get_memory      = memory;
        functions.get_type        = type_of_device;
        functions.get_props       = properties;
        functions.init_backend    = make_backend;
        functions.get_buffer_type = buffer_type;

        functions.get_host_buffer_type = host_buffer_type;
        functions.supports_op          = supports_op;
        functions.supports_buft        = supports_buffers;
        functions.offload_op           = offload_op;

        return ggml_backend_device { functions, reg, nullptr };
    }();

    return &res;
}

void * function(ggml_backend_reg_t, const char * name) {
    return std::strcmp(name, LLAMA_H2O_CUDA_SET_OPS) == 0 ? reinterpret_cast<void *>(llama_h2o_cuda_set_ops) : nullptr;
}

} // namespace

extern "C" void add_device(bool coarse, bool flushes_denormals) {
    is_coarse = coarse;
    flushes   = flushes_denormals;

    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION, { name_of_registry, n_devices, device, function },
        nullptr };
    ggml_backend_register(&reg);
}

// since the last call
extern "C" size_t count_transfers() {
    static uint64_t before = 0;

    const uint64_t now = n_reads + n_writes;

    return now - std::exchange(before, now);
}
