#include "products/h2o-product.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

const llama_h2o_product_kernel * llama_h2o_find_product(const char * name) {
    for (const auto * kernel : { llama_h2o_product_avx512vnni, llama_h2o_product_avx2 }) {
        if (kernel && kernel->can_run() && (!name || std::strcmp(kernel->name, name) == 0)) {
            return kernel;
        }
    }

    return nullptr;
}

// The work space of a thread; null if memory is short.
static float * space(size_t n) {
    static thread_local std::vector<float> res;

    try {
        res.resize(std::max(res.size(), n));
    } catch (const std::bad_alloc &) {
        return nullptr;
    }

    return res.data();
}

// A ggml_cpu_mul_mat_t. Returns false, which leaves the product to ggml, if there is no kernel for it.
static bool multiply(ggml_tensor * dst, const void * inputs, int ith, int nth) {
    static const llama_h2o_product_kernel * const kernel = llama_h2o_find_product(nullptr);

    const ggml_tensor * w = dst->src[0];
    const ggml_tensor * x = dst->src[1];

    const bool is_ours = kernel && w->type == GGML_TYPE_Q4_1 && w->ne[1] % kernel->n_lanes == 0 && w->ne[2] == 1 &&
                         w->ne[3] == 1 && x->type == GGML_TYPE_F32 && ggml_is_contiguous(dst);
    if (!is_ours) {
        return false;
    }

    llama_h2o_product p = {};

    p.weights  = static_cast<const char *>(w->data);
    p.inputs   = static_cast<const llama_h2o_q8_1 *>(inputs);
    p.out      = static_cast<char *>(dst->data);
    p.nb_row   = w->nb[1];
    p.nb_out   = dst->nb[1];
    p.n_blocks = w->ne[0] / LLAMA_H2O_BLOCK_SIZE;
    p.n_rows   = w->ne[1];
    p.n_tokens = ggml_nrows(dst);
    p.scales   = space(size_t(2) * p.n_blocks * p.n_tokens);
    if (!p.scales) {
        return false; // ggml needs no work space
    }

    const uint64_t n_panels = p.n_rows / kernel->n_lanes;

    kernel->read_scales(p);
    kernel->multiply(p, n_panels * ith / nth, n_panels * (ith + 1) / nth);

    return true;
}

void llama_h2o_use_products(ggml_backend_t backend_cpu) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_cpu));

    const auto set_mul_mat = reinterpret_cast<decltype(&ggml_backend_cpu_set_mul_mat)>(
            ggml_backend_reg_get_proc_address(reg, "ggml_backend_cpu_set_mul_mat"));
    if (set_mul_mat) {
        set_mul_mat(backend_cpu, multiply);
    }
}
