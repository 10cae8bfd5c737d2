#include "recall/h2o-archive-layout.h"

#include <stdexcept>
#include <string>
#include <utility>

static constexpr uint32_t N_PAGE  = llama_h2o_archive_layout::N_PAGE;
static constexpr uint64_t PADDING = llama_h2o_archive_layout::PADDING;

static uint64_t padded(uint64_t size) {
    return (size + PADDING - 1) / PADDING * PADDING;
}

static void check_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
            return;
        default:
            throw std::runtime_error("the archive's rows are of type f32, f16, q8_0 or q4_0");
    }
}

static uint64_t row_size(ggml_type type, uint32_t n_embd) {
    const int64_t n_block = ggml_blck_size(type);
    if (n_embd == 0 || n_embd % n_block != 0) {
        throw std::runtime_error("a head's row of " + std::to_string(n_embd) + " elements is not whole blocks of " +
                                 std::to_string(n_block) + ": the archive has to be of type f16");
    }

    return ggml_row_size(type, n_embd);
}

llama_h2o_archive_layout::llama_h2o_archive_layout(std::vector<llama_h2o_archive_layer> layers, ggml_type type) :
    type_rows(type), shapes(std::move(layers)) {
    check_type(type);

    uint64_t end = begin_k();
    for (const auto & layer : shapes) {
        k.push_back({ end, row_size(type, layer.n_embd_k) });
        end = k.back().offset(layer.n_head_kv);
    }

    v_part = padded(end);

    end = begin_v();
    for (const auto & layer : shapes) {
        v.push_back({ end, row_size(type, layer.n_embd_v) });
        end = v.back().offset(layer.n_head_kv);
    }

    n_bytes = padded(end);
}
