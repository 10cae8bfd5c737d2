#include "recall/h2o-archive-layout.h"

#include "recall/h2o-checksum.h"

#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

static constexpr uint64_t PADDING = llama_h2o_archive_layout::PADDING;

static constexpr uint64_t PAGE_MAGIC = 0x68326f7061676501; // "h2opage", and the version in the last byte

static uint64_t checksum_of(const void * data, size_t size) {
    llama_h2o_checksum res;
    res.add(data, size);

    return res.value();
}

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

static uint64_t row_bytes(ggml_type type, uint32_t n_embd) {
    const int64_t n_block = ggml_blck_size(type);
    if (n_embd % n_block != 0) {
        throw std::runtime_error("a head's row of " + std::to_string(n_embd) + " elements is not whole blocks of " +
                                 std::to_string(n_block) + ": the archive has to be of type f16");
    }

    return ggml_row_size(type, n_embd);
}

llama_h2o_archive_layout::llama_h2o_archive_layout(std::vector<llama_h2o_archive_layer> layers, ggml_type type) :
    type_rows(type), shapes(std::move(layers)) {
    check_type(type);

    uint64_t end = PADDING;
    for (const auto & layer : shapes) {
        if (layer.n_embd_k == 0) {
            throw std::runtime_error("a head's row of 0 elements cannot be archived");
        }

        const uint64_t size_k = row_bytes(type, layer.n_embd_k);
        rows.push_back({ end, size_k, size_k + row_bytes(type, layer.n_embd_v) });
        end = rows.back().offset(layer.n_head_kv);
    }
    n_bytes = padded(end);
}

uint64_t llama_h2o_archive_layout::checksum() const {
    const uint32_t type = type_rows;

    llama_h2o_checksum res;
    res.add(&type, sizeof(type));
    res.add(shapes.data(), shapes.size() * sizeof(shapes[0]));

    return res.value();
}

uint64_t llama_h2o_archive_layout::checksum_rows(const char * page) const {
    return checksum_of(page + PADDING, n_bytes - PADDING);
}

void llama_h2o_archive_page_header::start(int32_t begin, int32_t p, uint64_t text_before) {
    this->magic       = PAGE_MAGIC;
    this->page        = uint32_t(p) / N_PAGE;
    this->begin       = begin;
    this->first       = p;
    this->text_before = text_before;
}

uint64_t llama_h2o_archive_page_header::text() const {
    return checksum_of(this, offsetof(llama_h2o_archive_page_header, checksum_rows));
}

bool llama_h2o_archive_page_header::is_whole() const {
    // no text gets beyond the last page of all
    static constexpr uint32_t MAX_PAGES = std::numeric_limits<int32_t>::max() / N_PAGE;

    return magic == PAGE_MAGIC && page < MAX_PAGES && uint32_t(first) / N_PAGE == page &&
           count == N_PAGE - uint32_t(first) % N_PAGE && begin >= 0 && begin <= first;
}

bool llama_h2o_archive_page_header::is_sound() const {
    return checksum == checksum_of(this, offsetof(llama_h2o_archive_page_header, checksum));
}

void llama_h2o_archive_page_header::set_checksum() {
    checksum = checksum_of(this, offsetof(llama_h2o_archive_page_header, checksum));
}
