// A mock GPU for tests: a ggml device with its own memory that computes with ggml's CPU backend, and our ops with our CUDA kernels.
// Like the CUDA backend, it requests large products with weights in CPU memory. A coarse device rounds the factors of products,
// except for few tokens, like tensor cores. A queueing device computes nothing until the host synchronises, and ends the process
// if the host does not synchronise when CUDA would require it.

#include "cuda/h2o-cuda.cu"

#include "ggml-backend-impl.h"

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <sys/mman.h>

// Counters of host copies from and to device memory. The numbers do not include asynchronous copies.
extern "C" {
std::atomic<uint64_t> bytes_read, n_reads, bytes_written, n_writes;
// Replayed graphs, and those of them that were not compared with the recorded one.
std::atomic<uint64_t> n_replayed, n_uncompared;
// Available pinned memory in bytes.
std::atomic<uint64_t> pinned_left { UINT64_MAX };
}

namespace {

constexpr int64_t MIN_OFFLOADED = 32; // tokens of a batch, as in ggml-cuda.cu
constexpr int64_t MAX_EXACT     = 3;  // a coarse device multiplies up to this many tokens in float32

bool is_coarse = false;
bool flushes   = false; // flushes denormals to zero when it copies rows
bool is_queued = false; // work, until the host synchronises

ggml_backend_dev_t cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

//
// queue
//

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "mock device: %s while a graph is queued: synchronize before\n", what);
    std::abort();
}

// Pinned memory without ggml tensors, in which kernels read archived rows.
std::mutex of_pages;
std::map<void *, size_t> pages;

// Makes pages read-only while a graph is queued, because the host must not change them.
void protect_pages(bool is_protected) {
    const std::lock_guard<std::mutex> lock(of_pages);
    for (const auto & [data, size] : pages) {
        mprotect(data, size, is_protected ? PROT_READ : PROT_READ | PROT_WRITE);
    }
}

void on_fault(int) {
    fail("archived rows are written, or read where there are none,");
}

// The stream of a backend.
struct stream {
    ggml_backend_t on_cpu;
    std::list<std::function<ggml_status()>> queue;
};

std::atomic<size_t> n_queued;          // of all streams
std::set<ggml_backend_buffer_t> fresh; // allocated since work was last queued

ggml_status run(stream & st) {
    protect_pages(false);

    ggml_status res = GGML_STATUS_SUCCESS;
    for (; !st.queue.empty(); st.queue.pop_front(), --n_queued) {
        res = res == GGML_STATUS_SUCCESS ? st.queue.front()() : res;
    }
    if (n_queued > 0) {
        protect_pages(true);
    }

    return res;
}

// CUDA runs synchronous copies in a separate stream, without waiting for the backend's. Only one context may have queued work,
// because the owner of a buffer is unknown.
void expect_idle(ggml_backend_buffer_t buffer, const char * what) {
    if (n_queued > 0 && fresh.count(buffer) == 0) {
        fail(what);
    }
}

//
// memory
//

const char * name_of_buffers(ggml_backend_buffer_type_t) {
    return "Mock0";
}

void read_lines(ggml_backend_buffer_t buffer,
        const ggml_tensor * tensor,
        void * data,
        size_t offset,
        size_t size,
        size_t n,
        size_t stride_tensor,
        size_t stride_data) {
    expect_idle(buffer, "the device's memory is read");
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

void write_lines(ggml_backend_buffer_t buffer,
        ggml_tensor * tensor,
        const void * data,
        size_t offset,
        size_t size,
        size_t n,
        size_t stride_tensor,
        size_t stride_data) {
    expect_idle(buffer, "the device's memory is written");
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

void fill(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    expect_idle(buffer, "the device's memory is filled");
    std::memset(static_cast<char *>(tensor->data) + offset, value, size);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    expect_idle(buffer, "the device's memory is cleared");
    std::memset(ggml_backend_buffer_get_base(buffer), value, buffer->size);
}

void (*free_of_cpu)(ggml_backend_buffer_t);

void release(ggml_backend_buffer_t buffer) {
    expect_idle(buffer, "the device's memory is freed");
    fresh.erase(buffer);
    free_of_cpu(buffer);
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t res = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (res) {
        fresh.insert(res);
        free_of_cpu              = res->iface.free_buffer;
        res->iface.free_buffer   = release;
        res->iface.memset_tensor = fill;
        res->iface.clear         = clear;
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

const char * name_of_pinned(ggml_backend_buffer_type_t) {
    return "Mock0_Host";
}

ggml_status hold_tensor(ggml_backend_buffer_t buffer, ggml_tensor *) {
    const std::lock_guard<std::mutex> lock(of_pages);
    if (pages.erase(buffer->context) > 0) {
        mprotect(buffer->context, buffer->size, PROT_READ | PROT_WRITE);
    }

    return GGML_STATUS_SUCCESS;
}

void free_pinned(ggml_backend_buffer_t buffer) {
    const std::lock_guard<std::mutex> lock(of_pages);
    if (pages.erase(buffer->context) > 0) {
        expect_idle(buffer, "archived rows are freed");
    }
    munmap(buffer->context, buffer->size);
}

ggml_backend_buffer_t allocate_pinned(ggml_backend_buffer_type_t type, size_t size) {
    if (size > pinned_left) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    void * data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        return nullptr;
    }
    pinned_left -= size;
    std::memset(data, 0xa5, size); // uninitialised memory

    const std::lock_guard<std::mutex> lock(of_pages);
    pages[data] = size;

    ggml_backend_buffer_t res = ggml_backend_cpu_buffer_from_ptr(data, size);
    res->buft                 = type;
    res->iface.init_tensor    = hold_tensor;
    res->iface.free_buffer    = free_pinned;

    return res;
}

bool is_host(ggml_backend_buffer_type_t) {
    return true;
}

// ---

ggml_guid guid = { 'm', 'o', 'c', 'k' };

const char * name_of_backend(ggml_backend_t) {
    return "Mock0";
}

stream & stream_of(ggml_backend_t backend) {
    return *static_cast<stream *>(backend->context);
}

void synchronize(ggml_backend_t backend) {
    if (run(stream_of(backend)) != GGML_STATUS_SUCCESS) {
        std::abort();
    }
}

void free_backend(ggml_backend_t backend) {
    synchronize(backend);
    ggml_backend_free(stream_of(backend).on_cpu);
    delete &stream_of(backend);
    delete backend;
}

// Queues an asynchronous operation.
void enqueue(stream & st, std::function<ggml_status()> step) {
    st.queue.push_back(std::move(step));
    fresh.clear();
    if (n_queued++ == 0 && is_queued) {
        protect_pages(true);
    }
}

void get_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const auto * from = static_cast<const char *>(tensor->data) + offset;
    enqueue(stream_of(backend), [=] {
        std::memcpy(data, from, size);
        return GGML_STATUS_SUCCESS;
    });
    bytes_read += size;
    if (!is_queued) {
        synchronize(backend);
    }
}

// The host may change the data afterwards, as CUDA copies memory that is not pinned.
void set_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const auto * from = static_cast<const char *>(data);
    enqueue(stream_of(backend),
            [to = static_cast<char *>(tensor->data) + offset, kept = std::vector(from, from + size)] {
                std::memcpy(to, kept.data(), kept.size());
                return GGML_STATUS_SUCCESS;
            });
    bytes_written += size;
    if (!is_queued) {
        synchronize(backend);
    }
}

// Rounds a factor to ten bits for the duration of a product.
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

// A copy of a node with its sources, because a recorded kernel keeps its arguments.
struct kept_node {
    explicit kept_node(const ggml_tensor & from) : node(from) {
        for (int i = 0; i < GGML_MAX_SRC; ++i) {
            if (from.src[i]) {
                src[i]      = *from.src[i];
                node.src[i] = &src[i];
            }
        }
    }

    kept_node(const kept_node &) = delete;

    ggml_tensor node;
    ggml_tensor src[GGML_MAX_SRC];
};

ggml_status compute_node(ggml_backend_t on_cpu, ggml_tensor * node) {
    const auto factors = round_factors(node);

    ggml_cgraph graph = {};
    graph.size        = 1;
    graph.n_nodes     = 1;
    graph.nodes       = &node;

    const ggml_status res = ggml_backend_graph_compute(on_cpu, &graph);
    flush_rows(node);

    return res;
}

// Like the CUDA backend, replays a graph with recorded kernel arguments if it looks unchanged, or if ggml says so, without a
// comparison.
struct recorded_graph {
    uint64_t uid = 0;
    std::vector<char> nodes;
    std::vector<std::vector<std::function<void()>>> kernels; // per node

    // Whether the graph differs from the recorded one.
    bool is_new(const ggml_cgraph * graph) {
        if (graph->uid != 0 && graph->uid == uid) {
            n_uncompared += 1;
            return false;
        }
        uid = graph->uid;

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
    auto & st = stream_of(backend);

    static std::map<const ggml_tensor *, recorded_graph> recorded;

    auto & record     = recorded[graph->nodes[0]];
    const bool is_new = record.is_new(graph);
    if (is_new) {
        record.kernels.assign(graph->n_nodes, {});
    } else {
        n_replayed += 1;
    }

    for (int i = 0; i < graph->n_nodes; ++i) {
        if (graph->nodes[i]->op != GGML_OP_CUSTOM) {
            enqueue(st, [on_cpu = st.on_cpu, kept = std::make_shared<kept_node>(*graph->nodes[i])] {
                return compute_node(on_cpu, &kept->node);
            });
            continue;
        }
        if (is_new) {
            cuda_recording = &record.kernels[i];
            llama_h2o_cuda_compute(graph->nodes[i], nullptr);
            cuda_recording = nullptr;
        }
        for (const auto & kernel : record.kernels[i]) {
            enqueue(st, [kernel] {
                kernel();
                return GGML_STATUS_SUCCESS;
            });
        }
    }

    return is_queued ? GGML_STATUS_SUCCESS : run(st);
}

// ---

const char * name_of_device(ggml_backend_dev_t) {
    return "Mock0";
}

const char * description(ggml_backend_dev_t) {
    return "a GPU that is none";
}

void memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    const char * left = std::getenv("MOCK_FREE");

    *total = size_t(8) << 30;
    *free  = left ? std::strtoull(left, nullptr, 10) : *total;
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

    functions.get_name         = name_of_backend;
    functions.free             = free_backend;
    functions.graph_compute    = compute;
    functions.synchronize      = synchronize;
    functions.set_tensor_async = set_async;
    functions.get_tensor_async = get_async;

    ggml_backend_t on_cpu = ggml_backend_dev_init(cpu(), nullptr);

    // one thread: nodes are computed one at a time, so more threads would only wait
    reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(cpu()), "ggml_backend_set_n_threads"))(on_cpu, 1);

    return new ggml_backend { &guid, functions, dev, new stream { on_cpu, {} } };
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

ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t dev) {
    static ggml_backend_buffer_type res = [dev] {
        ggml_backend_buffer_type_i functions = {};

        functions.get_name      = name_of_pinned;
        functions.alloc_buffer  = allocate_pinned;
        functions.get_alignment = alignment;
        functions.is_host       = is_host;

        return ggml_backend_buffer_type { functions, dev, nullptr };
    }();

    return &res;
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

extern "C" void add_device(bool coarse, bool flushes_denormals, bool queues) {
    is_coarse = coarse;
    flushes   = flushes_denormals;
    is_queued = queues;
    if (queues) {
        std::signal(SIGSEGV, on_fault);
    }

    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION, { name_of_registry, n_devices, device, function },
        nullptr };
    ggml_backend_register(&reg);
}

// transfers since the last call
extern "C" size_t count_transfers() {
    static uint64_t before = 0;

    const uint64_t now = n_reads + n_writes;

    return now - std::exchange(before, now);
}
