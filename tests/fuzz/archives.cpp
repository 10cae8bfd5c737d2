#include "archives.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static constexpr uint32_t N_PAGE = llama_h2o_archive::N_PAGE;

std::unique_ptr<llama_h2o_archive> new_archive(uint8_t settings) {
    static constexpr ggml_type TYPES[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };

    std::vector<llama_h2o_archive_layer> layers = { { 1, 32, 32 } };
    if (settings & 4) {
        layers.push_back({ 2, 32, 0 }); // V is a part of K
    }
    const ggml_type type     = TYPES[settings & 3];
    const uint64_t page_size = llama_h2o_archive_layout(layers, type).size();

    return std::make_unique<llama_h2o_archive>(layers, type, (settings >> 3 & 3) * page_size);
}

static void set_random_row(char * to, ggml_type type, uint32_t n, random_numbers & random) {
    std::vector<float> row(n);
    std::generate(row.begin(), row.end(), [&] { return 0.125f * float(random.next(64)) - 4.0f; });
    ggml_quantize_chunk(type, row.data(), to, 0, 1, n, nullptr);
}

void extend(llama_h2o_archive & archive, uint32_t n, random_numbers & random) {
    const int32_t first = archive.next();

    std::vector<int32_t> tokens(n);
    std::generate(tokens.begin(), tokens.end(), [&] { return int32_t(random.next(1000)); });
    archive.extend(n, tokens.data());

    for (int32_t p = std::max(first, archive.first()); p < archive.next(); ++p) {
        for (uint32_t ikv = 0; ikv < archive.layers().size(); ++ikv) {
            const auto & layer = archive.layers()[ikv];
            for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
                set_random_row(archive.k_to_set(ikv, head, p), archive.type(), layer.n_embd_k, random);
                if (layer.n_embd_v > 0) {
                    set_random_row(archive.v_to_set(ikv, head, p), archive.type(), layer.n_embd_v, random);
                }
            }
        }
    }
    archive.end_extend();
}

bytes state_of(const llama_h2o_archive & archive) {
    bytes res;
    archive.write_state([&](const void * data, size_t size) {
        const auto * begin = static_cast<const uint8_t *>(data);
        res.insert(res.end(), begin, begin + size);
    });

    return res;
}

bool read_state(llama_h2o_archive & archive, const bytes & state, int32_t & n_missing) {
    size_t at = 0;
    try {
        n_missing = archive.read_state([&](void * data, size_t size) {
            if (size > state.size() - at) {
                throw std::runtime_error("the state ends");
            }
            std::memcpy(data, state.data() + at, size);
            at += size;
        });
    } catch (const std::exception &) {
        return false;
    }

    return true;
}

// Rows of all heads, concatenated.
static bytes rows_of(const llama_h2o_archive & archive, uint32_t page) {
    bytes res;
    const auto add = [&](const char * rows, uint64_t size) {
        res.insert(res.end(), rows, rows + size);
    };
    for (uint32_t ikv = 0; ikv < archive.layers().size(); ++ikv) {
        for (uint32_t head = 0; head < archive.layers()[ikv].n_head_kv; ++head) {
            add(archive.k(page, ikv, head), N_PAGE * archive.row_size(ikv)); // V lies between
        }
    }

    return res;
}

void check_rows(const llama_h2o_archive & archive) {
    expect(archive.first() >= 0 && archive.first() <= archive.next(), "what is held begins before it ends");
    expect(archive.n_dropped() >= 0, "an archive begins where it began, or behind");

    const bool is_empty = archive.first() == archive.next();
    expect(is_empty || archive.page_end() == llama_h2o_archive::page_of(archive.next() - 1) + 1, "all pages are there");
    for (uint32_t page = archive.page_begin(); page < archive.page_end(); ++page) {
        rows_of(archive, page);
        archive.release(page);
    }
}

void check_same(const llama_h2o_archive & one, const llama_h2o_archive & other) {
    expect(one.first() == other.first() && one.next() == other.next(), "both hold the same positions");
    for (uint32_t page = one.page_begin(); page < one.page_end(); ++page) {
        expect(rows_of(one, page) == rows_of(other, page), "both have the same rows");
    }
}

memory_file::memory_file(const bytes & content) : fd(memfd_create("archive", MFD_CLOEXEC)) {
    expect(fd >= 0, "there is a file in memory");
    expect(write(fd, content.data(), content.size()) == ssize_t(content.size()), "it can be written");
}

memory_file::~memory_file() {
    close(fd);
}

std::string memory_file::path() const {
    return "/proc/self/fd/" + std::to_string(fd);
}

bytes memory_file::content() const {
    struct stat info;
    expect(fstat(fd, &info) == 0, "it has a size");

    bytes res(size_t(info.st_size));
    expect(pread(fd, res.data(), res.size(), 0) == ssize_t(res.size()), "it can be read");

    return res;
}
