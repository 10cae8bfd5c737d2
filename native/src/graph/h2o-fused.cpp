#include "graph/h2o-fused.h"

#include "cache/h2o-device-archiving.h"
#include "cuda/h2o-cuda.h"
#include "graph/h2o-attention.h"
#include "graph/h2o-retrieved.h"
#include "kernels/h2o-kernel.h"
#include "kernels/h2o-row-types.h"

#include "llama-graph.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

// sources of the op, in the order of ggml_tensor.src; the last ones are optional
enum fused_src { SRC_Q, SRC_K, SRC_V, SRC_MASK, SRC_SCORES, SRC_SQUARES, SRC_CREDIT, SRC_SINKS, N_SRC };

// the number of sources is limited; columns need no sinks, because the lse includes them
static constexpr fused_src SRC_KEPT = SRC_SINKS;

static llama_h2o_attention::operand operand_of(const ggml_tensor * t) {
    return { static_cast<const char *>(t->data), t->type, t->nb[1], t->nb[2], t->nb[3] };
}

// The result is at the start of `space`, followed by work space. Tensors have no data yet while a graph is built.
static llama_h2o_attention read_attention(
        ggml_tensor * const * src, const llama_h2o_layer_attention & how, const ggml_tensor * space, uint32_t n_slots) {
    const ggml_tensor * q       = src[SRC_Q];
    const ggml_tensor * k       = src[SRC_K];
    const ggml_tensor * v       = src[SRC_V];
    const ggml_tensor * scores  = src[SRC_SCORES];
    const ggml_tensor * squares = src[SRC_SQUARES];
    const ggml_tensor * credit  = src[SRC_CREDIT];
    const ggml_tensor * sinks   = src[SRC_SINKS];

    llama_h2o_attention attn = {};

    attn.n_embd_head_k = k->ne[0];
    attn.n_embd_head_v = v->ne[0];
    attn.n_head        = q->ne[2];
    attn.n_head_kv     = k->ne[2];
    attn.n_kv          = k->ne[1];
    attn.n_tokens      = q->ne[1];
    attn.n_stream      = k->ne[3];
    attn.scale         = how.kq_scale;
    attn.search        = how.searched();
    attn.n_slots       = n_slots;

    attn.q    = operand_of(q);
    attn.k    = operand_of(k);
    attn.v    = operand_of(v);
    attn.mask = operand_of(src[SRC_MASK]);

    attn.credit = credit ? operand_of(credit) : llama_h2o_attention::operand {};
    attn.sinks  = sinks ? static_cast<const float *>(sinks->data) : nullptr;

    attn.scores          = scores ? static_cast<float *>(scores->data) : nullptr;
    attn.squares         = squares ? static_cast<float *>(squares->data) : nullptr;
    attn.nb_score_head   = scores ? scores->nb[2] : 0;
    attn.nb_score_stream = scores ? scores->nb[3] : 0;

    if (space) {
        attn.out  = static_cast<float *>(space->data);
        attn.work = attn.out + attn.n_out();
    }

    return attn;
}

static llama_h2o_attention read_attend(const ggml_tensor * op, const void * userdata) {
    return read_attention(op->src, *static_cast<const llama_h2o_layer_attention *>(userdata), op, op->ne[1]);
}

// in place: the first source is the result of attend()
static llama_h2o_attention read_combine(const ggml_tensor * op, const void * userdata) {
    return read_attention(op->src + 1, *static_cast<const llama_h2o_layer_attention *>(userdata), op, op->ne[1]);
}

static void attend(ggml_tensor * dst, int ith, int nth, void * userdata) {
    static_cast<const llama_h2o_layer_attention *>(userdata)->kernel->attend(read_attend(dst, userdata), ith, nth);
}

template <llama_h2o_kernel::step llama_h2o_kernel::* STEP>
static void go_on(ggml_tensor * dst, int ith, int nth, void * userdata) {
    (static_cast<const llama_h2o_layer_attention *>(userdata)->kernel->*STEP)(read_combine(dst, userdata), ith, nth);
}

static constexpr ggml_custom_op_t search    = go_on<&llama_h2o_kernel::search>;
static constexpr ggml_custom_op_t retrieved = go_on<&llama_h2o_kernel::retrieved>;
static constexpr ggml_custom_op_t combine   = go_on<&llama_h2o_kernel::combine>;

//
// on a device
//

// Identifies our ops to the backend of a device: ops on the CPU have other functions, so the scheduler cannot confuse them. Never
// called; would fill the result with NaN.
template <llama_h2o_cuda_op>
static void on_device(ggml_tensor * dst, int ith, int, void *) {
    if (ith == 0) {
        std::fill_n(static_cast<float *>(dst->data), ggml_nelements(dst), std::numeric_limits<float>::quiet_NaN());
    }
}

ggml_custom_op_t llama_h2o_device_alongside() {
    return on_device<LLAMA_H2O_CUDA_ALONGSIDE>;
}

// null for host memory
static ggml_backend_dev_t device_of(const ggml_tensor * tensor) {
    return ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
}

// Pins an op to the backend of its rows, because it writes scores in place. Otherwise ggml's scheduler could move it to a device
// together with large products of CPU layers, where it would update a copy of the scores.
void llama_h2o_compute_where(
        const llm_graph_context & graph, const ggml_tensor * rows, bool on_cuda, ggml_tensor * op) {
    ggml_backend_t backend = graph.backend_cpu;
    for (int i = 0; on_cuda && i < ggml_backend_sched_get_n_backends(graph.sched); ++i) {
        ggml_backend_t other = ggml_backend_sched_get_backend(graph.sched, i);
        if (ggml_backend_get_device(other) == device_of(rows)) {
            backend = other;
        }
    }
    ggml_backend_sched_set_tensor_backend(graph.sched, op, backend);
}

// Adds scores, squares and credit to the sources of an attention op.
static void add_collected(const llm_graph_context & graph, const llama_h2o_layer & layer, ggml_tensor ** src) {
    const ggml_tensor * k = src[SRC_K];

    if (layer.attention.collects) {
        src[SRC_SCORES] = llama_h2o_view_collected(graph, layer.tensors.scores, k->ne[1], k->ne[3]);
        src[SRC_CREDIT] = layer.attention.credit;
    }
    if (layer.tensors.squares) {
        src[SRC_SQUARES] = llama_h2o_view_collected(graph, layer.tensors.squares, k->ne[1], k->ne[3]);
    }
}

ggml_tensor * llama_h2o_build_fused(const llm_graph_context & graph,
        llama_h2o_layer & layer,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask) {
    ggml_context * ctx = graph.ctx0;

    ggml_tensor * src[N_SRC] = { q, k, v, kq_mask };
    add_collected(graph, layer, src);
    src[SRC_SINKS] = layer.attention.sinks;

    // one column per thread or block, from which the op reads their maximum number
    const bool on_cuda     = layer.attention.on_cuda;
    const uint32_t n_slots = on_cuda ? llama_h2o_cuda_workspace::MAX_BLOCKS
                                     : uint32_t(std::max(graph.cparams.n_threads, graph.cparams.n_threads_batch));

    const llama_h2o_attention attn = read_attention(src, layer.attention, nullptr, n_slots);
    const size_t size              = !on_cuda      ? llama_h2o_work_size(attn)
                                     : attn.search ? llama_h2o_cuda_search_space(attn, false).size
                                                   : llama_h2o_cuda_workspace(attn).size;
    const int64_t n_per_slot       = (attn.n_out() + size + n_slots - 1) / n_slots;

    ggml_tensor * cur = ggml_custom_4d(ctx, GGML_TYPE_F32, n_per_slot, n_slots, 1, 1, src, N_SRC,
            on_cuda ? on_device<LLAMA_H2O_CUDA_ATTEND> : attend, GGML_N_TASKS_MAX, &layer.attention);
    llama_h2o_compute_where(graph, layer.tensors.k, on_cuda, cur);

    const auto add_step = [&](ggml_custom_op_t step) {
        cur = ggml_custom_inplace(ctx, cur, src, N_SRC, step, GGML_N_TASKS_MAX, &layer.attention);
        llama_h2o_compute_where(graph, layer.tensors.k, on_cuda, cur);
    };
    if (attn.search && on_cuda) {
        add_step(on_device<LLAMA_H2O_CUDA_SEARCH>);
    } else if (attn.search && attn.is_few()) {
        add_step(search);
        add_step(retrieved);
    }
    add_step(on_cuda ? on_device<LLAMA_H2O_CUDA_COMBINE> : combine);

    const int64_t n_embd = v->ne[0] * q->ne[2];

    return ggml_view_2d(ctx, cur, n_embd, q->ne[1] * q->ne[3], n_embd * sizeof(float), 0);
}

static bool has_rows_for_kernel(const ggml_tensor * t) {
    return llama_h2o_has_row_type(t->type) && t->nb[0] == ggml_type_size(t->type) && t->ne[1] % LLAMA_H2O_TILE == 0;
}

// Whether the device's kernel for few queries supports these rows. Many queries use matrix products instead.
static bool has_rows_for_cuda(const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v) {
    const int64_t n_rows = q->ne[1] * (q->ne[2] / k->ne[2]);

    return k->type == v->type && llama_h2o_cuda_fits(k->ne[0]) && llama_h2o_cuda_fits(v->ne[0]) &&
           n_rows <= llama_h2o_attention::MAX_FEW_ROWS;
}

bool llama_h2o_can_fuse(
        const llama_h2o_layer & layer, const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v) {
    const bool has_kernel = layer.attention.kernel || (layer.attention.on_cuda && has_rows_for_cuda(q, k, v));

    const auto * search = layer.attention.searched();
    if (search && !search->on_device &&
            (!layer.attention.kernel || layer.shape.n_group() > llama_h2o_attention::BLOCK)) {
        return false;
    }

    return has_kernel && has_rows_for_kernel(k) && has_rows_for_kernel(v);
}

//
// scores without probabilities
//

// in place: the first source is the scores; the lse is in the place of V
static llama_h2o_attention read_columns(const ggml_tensor * op, const void * userdata) {
    llama_h2o_attention attn = read_combine(op, userdata);

    const ggml_tensor * kept = op->src[1 + SRC_KEPT];

    attn.lse   = reinterpret_cast<const float *>(attn.v.data);
    attn.kept  = kept ? operand_of(kept) : llama_h2o_attention::operand {};
    attn.sinks = nullptr;

    return attn;
}

bool llama_h2o_can_sum(const llama_h2o_layer & layer, const ggml_tensor * k) {
    return layer.attention.on_tensor_cores && has_rows_for_kernel(k) && k->ne[0] % 16 == 0 &&
           k->ne[0] <= LLAMA_H2O_CUDA_MAX_EMBD;
}

ggml_tensor * llama_h2o_build_lse(const llm_graph_context & graph,
        llama_h2o_layer & layer,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * kq_mask) {
    ggml_context * ctx = graph.ctx0;

    // V is not needed; K provides its shape
    ggml_tensor * src[N_SRC] = { ggml_cast(ctx, q, GGML_TYPE_F16), k, k, kq_mask };
    src[SRC_SINKS]           = layer.attention.sinks;

    const llama_h2o_cuda_lse work(read_attention(src, layer.attention, nullptr, 1));

    ggml_tensor * cur = ggml_custom_4d(ctx, GGML_TYPE_F32, 1, q->ne[1], q->ne[2], q->ne[3] * work.n_parts, src, N_SRC,
            on_device<LLAMA_H2O_CUDA_LSE>, GGML_N_TASKS_MAX, &layer.attention);
    llama_h2o_compute_where(graph, layer.tensors.k, true, cur);

    return cur;
}

void llama_h2o_build_columns(
        const llm_graph_context & graph, llama_h2o_layer & layer, ggml_tensor * lse, ggml_tensor * kept) {
    ggml_tensor * src[N_SRC] = { lse->src[SRC_Q], lse->src[SRC_K], lse, lse->src[SRC_MASK] };
    add_collected(graph, layer, src);
    src[SRC_KEPT] = kept;

    ggml_tensor * cur = ggml_custom_inplace(graph.ctx0, src[SRC_SCORES], src, N_SRC, on_device<LLAMA_H2O_CUDA_COLUMNS>,
            GGML_N_TASKS_MAX, &layer.attention);
    llama_h2o_compute_where(graph, layer.tensors.k, true, cur);

    ggml_build_forward_expand(graph.gf, cur);
}

//
// the sum of probabilities
//

enum add_src { SRC_SUMS, SRC_PROBS, SRC_WEIGHTS };

static llama_h2o_sum read_sum(const ggml_tensor * op, const void *) {
    const ggml_tensor * sums   = op->src[SRC_SUMS];
    const ggml_tensor * probs  = op->src[SRC_PROBS];
    const ggml_tensor * credit = op->src[SRC_WEIGHTS];

    llama_h2o_sum sum = {};

    sum.probs         = operand_of(probs);
    sum.credit        = credit ? operand_of(credit) : llama_h2o_attention::operand {};
    sum.sums          = static_cast<float *>(sums->data);
    sum.nb_sum_head   = sums->nb[2];
    sum.nb_sum_stream = sums->nb[3];
    sum.n_kv          = probs->ne[0];
    sum.n_tokens      = probs->ne[1];
    sum.n_head        = probs->ne[2];
    sum.n_head_kv     = sums->ne[2];
    sum.n_stream      = probs->ne[3];

    return sum;
}

void llama_h2o_build_add(
        const llm_graph_context & graph, ggml_tensor * sums, ggml_tensor * probs, ggml_tensor * credit) {
    ggml_tensor * src[] = { probs, credit };

    ggml_tensor * cur = ggml_custom_inplace(
            graph.ctx0, sums, src, credit ? 2 : 1, on_device<LLAMA_H2O_CUDA_ADD>, GGML_N_TASKS_MAX, nullptr);

    ggml_build_forward_expand(graph.gf, cur);
}

//
// compactions and re-bases
//

static llama_h2o_device_choice read_choice(const ggml_tensor * op) {
    const ggml_tensor * sums     = op->src[1];
    const ggml_tensor * divisors = op->src[2];

    return { static_cast<const float *>(sums->data), static_cast<const double *>(divisors->data),
        static_cast<const int32_t *>(op->src[3]->data), static_cast<uint32_t *>(op->data), uint32_t(sums->ne[0]),
        uint32_t(sums->ne[1]), uint32_t(divisors->ne[0]) };
}

ggml_tensor * llama_h2o_build_choice(ggml_context * ctx, const llama_h2o_choice_tensors & choice, ggml_tensor * sums) {
    ggml_tensor * src[] = { sums, choice.divisors, choice.pos };

    return ggml_custom_inplace(ctx, choice.bits, src, 3, on_device<LLAMA_H2O_CUDA_CHOOSE>, GGML_N_TASKS_MAX, nullptr);
}

static llama_h2o_key_rotations read_rotations(const ggml_tensor * op, const void * userdata) {
    const auto & layer       = *static_cast<const llama_h2o_layer *>(userdata);
    const auto & layout      = layer.shape.k;
    const ggml_tensor * list = op->src[1];
    const auto * rows        = static_cast<const int32_t *>(list->data);

    return { static_cast<char *>(op->data), layout.type, ggml_row_size(layout.type, layout.n_embd_head),
        layout.n_embd_head, layer.rope->n_mix, layer.rope->rotation(), static_cast<const float *>(op->src[2]->data),
        rows, rows + list->ne[0], uint32_t(list->ne[0]) };
}

ggml_tensor * llama_h2o_build_rotations(
        ggml_context * ctx, llama_h2o_layer & layer, uint32_t s, ggml_tensor * list, ggml_tensor * factors) {
    ggml_tensor * k     = layer.tensors.k;
    ggml_tensor * src[] = { list, factors };

    return ggml_custom_inplace(ctx, ggml_view_2d(ctx, k, k->ne[0], k->ne[1], k->nb[1], k->nb[2] * s), src, 2,
            on_device<LLAMA_H2O_CUDA_ROTATE>, GGML_N_TASKS_MAX, &layer);
}

ggml_custom_op_t llama_h2o_device_archive() {
    return on_device<LLAMA_H2O_CUDA_ARCHIVE>;
}

//
// the CUDA backend
//

template <size_t... OPS>
static constexpr std::array<ggml_custom_op_t, sizeof...(OPS)> device_ops(std::index_sequence<OPS...>) {
    return { on_device<llama_h2o_cuda_op(OPS)>... };
}

// Registers our ops with the backend of a device, and records which kernels it has.
static void use_cuda(ggml_backend_dev_t dev, llama_h2o_layer_attention & attention) {
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    auto * set_ops         = reg ? reinterpret_cast<llama_h2o_cuda_set_ops_t>(
                                           ggml_backend_reg_get_proc_address(reg, LLAMA_H2O_CUDA_SET_OPS))
                                 : nullptr;
    if (!set_ops) {
        return;
    }

    llama_h2o_cuda_ops ops = {};

    ops.funs = device_ops(std::make_index_sequence<LLAMA_H2O_CUDA_N_OPS>());

    ops.read_attend    = read_attend;
    ops.read_combine   = read_combine;
    ops.read_alongside = llama_h2o_read_alongside;
    ops.read_columns   = read_columns;
    ops.read_add       = read_sum;
    ops.read_choose    = read_choice;
    ops.read_rotation  = read_rotations;
    ops.read_archive   = llama_h2o_read_archived;

    attention.on_cuda         = true;
    attention.on_tensor_cores = set_ops(ops);
}

//
// choosing kernels
//

// null: the best one, or none
static const char * kernel_name(llama_h2o_attention_type type) {
    static constexpr const char * NAMES[] = { nullptr, nullptr, "portable", "neon", "avx2", "avx512", "avx512bf16" };

    return NAMES[type];
}

// Whether the graph of a layer with this tensor runs on the CPU.
static bool is_on_cpu(const ggml_tensor * tensor) {
    ggml_backend_dev_t dev = device_of(tensor);

    return ggml_backend_buffer_is_host(tensor->buffer) &&
           (!dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU);
}

void llama_h2o_choose_kernels(std::vector<llama_h2o_layer> & layers, llama_h2o_attention_type type) {
    if (type == LLAMA_H2O_ATTENTION_OPS) {
        return;
    }

    const char * name = kernel_name(type);

    for (auto & layer : layers) {
        // the kernels need a separate V
        if (!layer.tensors.v) {
            continue;
        }
        if (!is_on_cpu(layer.tensors.k)) {
            if (!name) {
                use_cuda(device_of(layer.tensors.k), layer.attention);
            }
            continue;
        }

        const uint32_t n_embd_k = layer.shape.k.n_embd_head;
        const uint32_t n_embd_v = layer.shape.v.n_embd_head;

        const auto * kernel = name ? llama_h2o_find_kernel(name) : llama_h2o_best_kernel(n_embd_k, n_embd_v);
        if (kernel && n_embd_k % kernel->n_lanes == 0 && n_embd_v % kernel->n_lanes == 0) {
            layer.attention.kernel = kernel;
        }
    }
}

uint32_t llama_h2o_few_tokens(const std::vector<llama_h2o_layer> & layers) {
    uint32_t res = 0;
    for (const auto & layer : layers) {
        if (layer.attention.kernel || layer.attention.on_cuda) {
            res = std::max(res, llama_h2o_attention::MAX_FEW_ROWS / layer.shape.n_group());
        }
    }

    return res;
}

bool llama_h2o_has_kernels(const std::vector<llama_h2o_layer> & layers, llama_h2o_attention_type type) {
    return !kernel_name(type) ||
           std::all_of(layers.begin(), layers.end(), [](const llama_h2o_layer & l) { return l.attention.fused; });
}
