// A GPU that is none, for tests of what runs where: a device of ggml with memory of its own, that computes with ggml's CPU
// backend, and our ops with our CUDA kernels. As the CUDA backend does, it asks for the products of large batches whose
// weights lie on the CPU.

#include "cuda/h2o-cuda.cu"

#include "ggml-backend-impl.h"

namespace {

constexpr int64_t MIN_OFFLOADED = 32; // tokens of a batch, as in ggml-cuda.cu

ggml_backend_dev_t cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

const char * name_of_buffers(ggml_backend_buffer_type_t) {
    return "Mock0";
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t res = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (res) {
        res->buft = type;
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

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    auto * on_cpu = static_cast<ggml_backend_t>(backend->context);

    for (int i = 0; i < graph->n_nodes; ++i) {
        if (graph->nodes[i]->op == GGML_OP_CUSTOM) {
            llama_h2o_cuda_compute(graph->nodes[i], nullptr);
            continue;
        }
        ggml_cgraph node         = ggml_graph_view(graph, i, i + 1);
        const ggml_status status = ggml_backend_graph_compute(on_cpu, &node);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
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

    return new ggml_backend { &guid, functions, dev, ggml_backend_dev_init(cpu(), nullptr) };
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
        functions.supports_op     = supports_op;
        functions.supports_buft   = supports_buffers;
        functions.offload_op      = offload_op;

        return ggml_backend_device { functions, reg, nullptr };
    }();

    return &res;
}

void * function(ggml_backend_reg_t, const char * name) {
    return std::strcmp(name, LLAMA_H2O_CUDA_SET_OPS) == 0 ? reinterpret_cast<void *>(llama_h2o_cuda_set_ops) : nullptr;
}

} // namespace

extern "C" void add_device() {
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION, { name_of_registry, n_devices, device, function },
        nullptr };
    ggml_backend_register(&reg);
}
