// The archive, for ctypes. Functions return 0 if an exception was thrown; archive_error() returns its message.

#include "kernels/h2o-row-types.h"
#include "recall/h2o-archive.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

static constexpr uint32_t N_PAGE = llama_h2o_archive::N_PAGE;

static std::string error;

template <typename F>
static int32_t try_to(F fn) {
    try {
        fn();
    } catch (const std::exception & err) {
        error = err.what();
        return 0;
    }

    return 1;
}

extern "C" {

const char * archive_error() {
    return error.c_str();
}

void * archive_new(const llama_h2o_archive_layer * layers, uint32_t n_layer, int32_t type, uint64_t max_bytes) {
    void * res = nullptr;
    try_to([&] { res = new llama_h2o_archive({ layers, layers + n_layer }, ggml_type(type), max_bytes); });

    return res;
}

// Allocates pages in shared memory, with at most `most` uninitialised slabs.
//   n_made   [2] number of slabs allocated in this thread and in others
void archive_share(llama_h2o_archive * archive, int32_t most, int32_t * n_made) {
    archive->share([most, n_made, here = std::this_thread::get_id()](size_t size) -> llama_h2o_archive::page_memory {
        __atomic_add_fetch(n_made + (std::this_thread::get_id() != here), 1, __ATOMIC_RELAXED);
        if (n_made[0] + n_made[1] > most) {
            return nullptr;
        }
        llama_h2o_archive::page_memory res(new char[size], std::default_delete<char[]>());
        std::memset(res.get(), 0xa5, size);

        return res;
    });
}

bool archive_is_shared(const llama_h2o_archive * archive) {
    return archive->is_shared();
}

void archive_delete(llama_h2o_archive * archive) {
    delete archive;
}

// numbers: [7]
void archive_numbers(const llama_h2o_archive * archive, uint64_t * numbers) {
    numbers[0] = archive->first();
    numbers[1] = archive->next();
    numbers[2] = archive->n_dropped();
    numbers[3] = archive->page_begin();
    numbers[4] = archive->page_end();
    numbers[5] = archive->n_bytes();
    numbers[6] = archive->type();
}

void archive_clear(llama_h2o_archive * archive) {
    archive->clear();
}

int32_t archive_begin_at(llama_h2o_archive * archive, int32_t p) {
    return try_to([&] { archive->begin_at(p); });
}

int32_t archive_extend(llama_h2o_archive * archive, uint32_t n, const int32_t * token_ids, bool has_rows) {
    return try_to([&] { archive->extend(n, token_ids, has_rows); });
}

void archive_drop_rows(llama_h2o_archive * archive, int32_t p0, int32_t p1) {
    archive->drop_rows(p0, p1);
}

int32_t archive_end_extend(llama_h2o_archive * archive) {
    return try_to([&] { archive->end_extend(); });
}

// Sets all rows of a token; k and v contain those of all heads, layer by layer.
int32_t archive_set(llama_h2o_archive * archive, int32_t p, const float * k, const float * v) {
    return try_to([&] {
        for (uint32_t ikv = 0; ikv < archive->layers().size(); ++ikv) {
            const auto & layer = archive->layers()[ikv];
            for (uint32_t head = 0; head < layer.n_head_kv; ++head, k += layer.n_embd_k, v += layer.n_embd_v) {
                llama_h2o_from_floats(archive->type(), k, archive->k_to_set(ikv, head, p), layer.n_embd_k);
                llama_h2o_from_floats(archive->type(), v, archive->v_to_set(ikv, head, p), layer.n_embd_v);
            }
        }
    });
}

// Gets all rows of a token.
int32_t archive_get(const llama_h2o_archive * archive, int32_t p, float * k, float * v) {
    return try_to([&] {
        const uint32_t page = llama_h2o_archive::page_of(p);
        const uint32_t i    = uint32_t(p) % N_PAGE;
        for (uint32_t ikv = 0; ikv < archive->layers().size(); ++ikv) {
            const auto & layer = archive->layers()[ikv];
            for (uint32_t head = 0; head < layer.n_head_kv; ++head, k += layer.n_embd_k, v += layer.n_embd_v) {
                const char * k_row = archive->k(page, ikv, head) + i * archive->row_size(ikv);
                const char * v_row = archive->v(page, ikv, head) + i * archive->row_size(ikv);
                llama_h2o_to_floats(archive->type(), k_row, k, layer.n_embd_k);
                llama_h2o_to_floats(archive->type(), v_row, v, layer.n_embd_v);
            }
        }
    });
}

// Copies the N_PAGE stored rows of a head, K and V.
int32_t archive_page(
        const llama_h2o_archive * archive, uint32_t page, uint32_t ikv, uint32_t head, char * k, char * v) {
    return try_to([&] {
        const char * k_rows = archive->k(page, ikv, head);
        const char * v_rows = archive->v(page, ikv, head);
        const size_t n_k    = size_t(v_rows - k_rows);
        const size_t n_v    = archive->row_size(ikv) - n_k;
        for (uint32_t i = 0; i < N_PAGE; ++i) {
            std::memcpy(k + i * n_k, k_rows + i * archive->row_size(ikv), n_k);
            std::memcpy(v + i * n_v, v_rows + i * archive->row_size(ikv), n_v);
        }
    });
}

// Gets the id of a token that has rows.
int32_t archive_token(const llama_h2o_archive * archive, int32_t p, int32_t * token) {
    return try_to([&] {
        const char * rows = archive->k(llama_h2o_archive::page_of(p), 0, 0); // first rows of the page

        *token = llama_h2o_archive_header(rows - llama_h2o_archive_layout::PADDING).token[p % N_PAGE];
    });
}

//
// files
//

// id: [16]
int32_t archive_open_file(llama_h2o_archive * archive, const char * path, const uint8_t * id, bool moves) {
    llama_h2o_archive_id of_text;
    std::copy(id, id + of_text.size(), of_text.begin());

    return try_to([&] { moves ? archive->move_to_file(path, of_text) : archive->open_file(path, of_text); });
}

const char * archive_write_error(const llama_h2o_archive * archive) {
    return archive->error().c_str();
}

int32_t archive_release(const llama_h2o_archive * archive, uint32_t page) {
    return try_to([&] { archive->release(page); });
}

int32_t archive_drop_damaged(llama_h2o_archive * archive, uint32_t begin, uint32_t end, int32_t * n_dropped) {
    return try_to([&] { *n_dropped = archive->drop_damaged(begin, end); });
}

//
// states
//

// Writes the state, truncated to `size` bytes; returns its full size.
uint64_t archive_write_state(const llama_h2o_archive * archive, char * state, uint64_t size) {
    uint64_t n = 0;
    archive->write_state([&](const void * data, size_t n_data) {
        if (n + n_data <= size) {
            std::memcpy(state + n, data, n_data);
        }
        n += n_data;
    });

    return n;
}

int32_t archive_read_state(llama_h2o_archive * archive, const char * state, uint64_t size, int32_t * n_missing) {
    return try_to([&] {
        *n_missing = archive->read_state([&](void * data, size_t n_data) {
            if (n_data > size) {
                throw std::runtime_error("the state has an end");
            }
            std::memcpy(data, state, n_data);
            state += n_data;
            size  -= n_data;
        });
    });
}
}
