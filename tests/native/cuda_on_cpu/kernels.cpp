// The CUDA kernels for ctypes, on the CPU.

#include "cuda/h2o-cuda-launch.cuh"

#include <algorithm>
#include <vector>

// [n_stream][n][n_heads], contiguous
static llama_h2o_attention::operand rows_of(
        const void * data, ggml_type type, size_t size_row, size_t n_heads, size_t n) {
    return { static_cast<const char *>(data), type, size_row * n_heads, size_row, size_row * n_heads * n };
}

static llama_h2o_attention attention_of(const uint32_t * sizes,
        int type,
        size_t size_k,
        size_t size_v,
        float scale,
        const float * q,
        const char * k,
        const char * v,
        const uint16_t * mask,
        const float * sinks) {
    llama_h2o_attention a = {};

    a.n_embd_head_k = sizes[0];
    a.n_embd_head_v = sizes[1];
    a.n_head        = sizes[2];
    a.n_head_kv     = sizes[3];
    a.n_kv          = sizes[4];
    a.n_tokens      = sizes[5];
    a.n_stream      = sizes[6];
    a.n_slots       = llama_h2o_cuda_workspace::MAX_BLOCKS;
    a.scale         = scale;
    a.sinks         = sinks;

    a.q    = rows_of(q, GGML_TYPE_F32, a.n_embd_head_k * sizeof(float), a.n_head, a.n_tokens);
    a.k    = rows_of(k, ggml_type(type), size_k, a.n_head_kv, a.n_kv);
    a.v    = rows_of(v, ggml_type(type), size_v, a.n_head_kv, a.n_kv);
    a.mask = rows_of(mask, GGML_TYPE_F16, a.n_kv * sizeof(uint16_t), 1, a.n_tokens);

    a.nb_score_head   = a.n_kv * sizeof(float);
    a.nb_score_stream = a.n_kv * sizeof(float) * a.n_head_kv;

    return a;
}

extern "C" {

void run_backwards(bool backwards) {
    cuda_on_cpu::backwards = backwards;
}

// sizes: n_embd_head_k, n_embd_head_v, n_head, n_head_kv, n_kv, n_tokens, n_stream. All arrays are contiguous, in the
// order of h2o-kernel.h; sinks, credit and squares may be null.
void attend(const uint32_t * sizes,
        int type,
        size_t size_k,
        size_t size_v,
        float scale,
        const float * q,
        const char * k,
        const char * v,
        const uint16_t * mask,
        const float * sinks,
        const float * credit,
        float * scores,
        float * squares,
        float * out) {
    llama_h2o_attention a = attention_of(sizes, type, size_k, size_v, scale, q, k, v, mask, sinks);

    a.credit  = rows_of(credit, GGML_TYPE_F32, a.n_kv * sizeof(float), 1, a.n_tokens);
    a.scores  = scores;
    a.squares = squares;

    std::vector<float> work(llama_h2o_cuda_workspace(a).size, NAN);
    a.work = work.data();
    a.out  = out;

    launch_attend(a, nullptr);
    launch_combine(a, nullptr);
}

// The same on tensor cores and without V; kept may be null, too.
void columns(const uint32_t * sizes,
        int type,
        size_t size_k,
        float scale,
        const uint16_t * q,
        const char * k,
        const uint16_t * mask,
        const float * sinks,
        const float * credit,
        const float * kept,
        float * scores,
        float * squares,
        float * lse) {
    llama_h2o_attention a = attention_of(sizes, type, size_k, 0, scale, nullptr, k, nullptr, mask, sinks);

    a.q       = rows_of(q, GGML_TYPE_F16, a.n_embd_head_k * sizeof(uint16_t), a.n_head, a.n_tokens);
    a.credit  = rows_of(credit, GGML_TYPE_F32, a.n_kv * sizeof(float), 1, a.n_tokens);
    a.kept    = rows_of(kept, GGML_TYPE_F32, sizeof(float), a.n_head, a.n_tokens);
    a.scores  = scores;
    a.squares = squares;

    const llama_h2o_cuda_lse work(a);

    std::vector<float> of_parts(size_t(work.n) * work.n_parts, NAN);
    a.lse = a.out = of_parts.data();

    launch_lse(a, nullptr);
    launch_columns(a, nullptr);
    std::copy_n(a.out, work.n, lse);
}

// The archives of all streams: contiguous arrays, stream first, in the order of h2o-search.h.
struct archived {
    uint32_t n_pages;
    uint32_t n_unrotated;
    uint32_t focus;
    uint32_t first_slot;
    uint32_t max_pages;
    uint32_t n_find;
    uint32_t n_query_mix;
    uint32_t n_dims;
    uint32_t type;
    uint32_t n_near;
    float cap;
    uint64_t nb_row;
    uint64_t nb_page;
    uint64_t nb_codes; // per stream

    const char * pages;
    const char * codes;
    const uint64_t * hidden;
    const float * factors;
    const llama_h2o_device_text::head * heads; // shared by all streams

    unsigned long long * shares;
    unsigned long long * gains;
    unsigned long long * interest;
    unsigned long long * weights;
};

// Search after attention to the cells, with sizes, k, v, mask and sinks as in attend(); or alone, with only the lse of the cells:
// then out is as in llama_h2o_kernel::alongside.
void search(const uint32_t * sizes,
        const archived * from,
        int type,
        size_t size_k,
        size_t size_v,
        float scale,
        const float * q,
        const char * k,
        const char * v,
        const uint16_t * mask,
        const float * sinks,
        const float * lse,
        float * scores,
        float * out) {
    llama_h2o_attention a = attention_of(sizes, type, size_k, size_v, scale, q, k, v, mask, sinks);

    llama_h2o_search search = {};

    search.n_find = from->n_find;
    a.search      = &search;

    const llama_h2o_cuda_search_space sizes_of(a, lse);
    const size_t n_scoring = size_t(a.n_head_kv) * sizes_of.n_groups;

    std::vector<uint32_t> scores_of_rows(a.n_stream * n_scoring * from->max_pages * LLAMA_H2O_PAGE, ~0u);
    std::vector<uint32_t> counts(a.n_stream * n_scoring * llama_h2o_device_text::N_COUNTS);

    std::vector<llama_h2o_device_text> texts;
    std::vector<const char *> pages;
    for (uint32_t i = 0; i < a.n_stream * from->n_pages; ++i) {
        pages.push_back(from->pages + i * from->nb_page);
    }
    // the newest pages of heads that search are on the device; only others are read from the host
    const size_t nb_head      = LLAMA_H2O_PAGE * from->nb_row;
    const size_t nb_near      = a.n_head_kv * nb_head;
    const uint32_t first_near = from->n_pages - from->n_near;

    std::vector<char> near(nb_near * from->n_near * a.n_stream);
    for (uint32_t s = 0; s < a.n_stream; ++s) {
        const size_t n_rows = size_t(s) * from->n_pages * LLAMA_H2O_PAGE;

        char * of_stream = near.data() + nb_near * from->n_near * s;
        for (uint32_t i = first_near; i < from->n_pages; ++i) {
            const char *& page = pages[s * from->n_pages + i];
            for (uint32_t head = 0; head < a.n_head_kv; ++head) {
                const auto & how = from->heads[head];
                if (how.codes >= 0) {
                    char * to = of_stream + (from->first_slot + i) % from->n_near * nb_near + how.codes * nb_head;
                    std::copy_n(page + how.keys, nb_head, to);
                }
            }
        }
        texts.push_back({ from->n_pages, from->n_unrotated, from->focus, from->first_slot, from->max_pages,
                pages.data() + s * from->n_pages, first_near, from->first_slot, from->n_near, nb_near, of_stream,
                from->codes + s * from->nb_codes, from->hidden + n_rows / 64 * a.n_head_kv,
                from->factors + size_t(s) * (from->n_pages - from->n_unrotated) * 2 * from->n_dims, from->heads,
                from->shares + s, from->gains + s * a.n_head_kv, from->interest + n_rows / LLAMA_H2O_PASSAGE,
                from->weights + n_rows, sizes_of.n_groups,
                scores_of_rows.data() + scores_of_rows.size() / a.n_stream * s,
                counts.data() + counts.size() / a.n_stream * s });
    }

    search.type          = ggml_type(from->type);
    search.nb_row        = from->nb_row;
    search.rotation      = { from->n_dims, 0, true };
    search.n_query_mix   = from->n_query_mix;
    search.cap           = from->cap;
    search.on_device     = texts.data();
    search.device_stride = 1;

    a.lse    = lse;
    a.scores = scores;
    a.out    = out;

    std::vector<float> work(sizes_of.size, NAN);
    a.work = work.data();

    if (!lse) {
        launch_attend(a, nullptr);
    }
    launch_search(a, lse, nullptr);
    if (!lse) {
        launch_combine(a, nullptr);
    }
}

// sizes: n_embd, n_head_kv, n_mix, n_tokens, first. k and v [n_cells][n_head_kv], pages [n_pages][n_head_kv][PAGE][2].
void archive(const uint32_t * sizes,
        int from_type,
        size_t nb_from,
        int to_type,
        size_t nb_to,
        const char * k,
        const char * v,
        const float * factors,
        const int32_t * rotations,
        const int32_t * cells,
        char * to) {
    const int32_t first = int32_t(sizes[4]);

    llama_h2o_archived_rows a = {};

    a.k         = { k, ggml_type(from_type), nb_from * sizes[1], nb_from, sizes[0], 0 };
    a.v         = { v, ggml_type(from_type), nb_from * sizes[1], nb_from, sizes[0], nb_to };
    a.n_mix     = sizes[2];
    a.how       = { sizes[0], 0, true };
    a.factors   = factors;
    a.rotations = rotations;
    a.cells     = cells;
    a.stride    = PAGE * 2 * nb_to;
    a.type      = ggml_type(to_type);
    a.nb_row    = 2 * nb_to;
    a.n_tokens  = sizes[3];
    a.first     = &first;
    a.n_head_kv = sizes[1];

    std::vector<char *> pages;
    for (uint32_t i = 0; i <= (sizes[4] % PAGE + sizes[3]) / PAGE; ++i) {
        pages.push_back(to + i * a.stride * a.n_head_kv);
    }
    a.pages = pages.data();

    launch_archive(a, nullptr);
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

// sizes: n_cells, n_heads, n_ages. pos is followed by the number of kept rows and the next position.
void choose(const uint32_t * sizes, const float * sums, const double * divisors, const int32_t * pos, uint32_t * bits) {
    launch_choose({ sums, divisors, pos, bits, sizes[0], sizes[1], sizes[2] }, nullptr);
}

// sizes: n_embd, n_dims, first, neox, n, n_mix
void rotate(const uint32_t * sizes,
        int type,
        size_t nb_row,
        char * keys,
        const float * factors,
        const int32_t * rows,
        const int32_t * rotations) {
    launch_rotate({ keys, ggml_type(type), nb_row, sizes[0], sizes[5], { sizes[1], sizes[2], sizes[3] != 0 }, factors,
                          rows, rotations, sizes[4] },
            nullptr);
}

} // extern "C"
