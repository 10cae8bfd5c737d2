#include "cache/h2o-cache.h"
#include "cache/h2o-caches.h"
#include "cache/h2o-state-io.h"
#include "cache/h2o-window.h"
#include "recall/h2o-checksum.h"

#include "ggml-backend.h"

#include "llama-context.h"
#include "llama-io.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

// Computes the checksum of all data that passes through, except tensors that llama.cpp leaves on their device.
struct summing {
    const bool stays_on_device;

    llama_h2o_checksum checksum = {};
    std::vector<uint8_t> piece  = {};

    explicit summing(uint32_t flags) : stays_on_device(flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) {}
};

class summing_writer : public llama_io_write_i, summing {
public:
    summing_writer(llama_io_write_i & io, uint32_t flags) : summing(flags), io(io) {}

    void write(const void * src, size_t size) override {
        io.write(src, size);
        checksum.add(src, size);
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (stays_on_device) {
            io.write_tensor(tensor, offset, size);
            return;
        }

        piece.resize(size);
        ggml_backend_tensor_get(tensor, piece.data(), offset, size);
        write(piece.data(), size);
    }

    size_t n_bytes() override { return io.n_bytes(); }

    void write_checksum() {
        const uint64_t value = checksum.value();
        io.write(&value, sizeof(value));
    }

private:
    llama_io_write_i & io;
};

class summing_reader : public llama_io_read_i, summing {
public:
    summing_reader(llama_io_read_i & io, uint32_t flags) : summing(flags), io(io) {}

    void read(void * dst, size_t size) override {
        io.read(dst, size);
        checksum.add(dst, size);
    }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (stays_on_device) {
            io.read_tensor(tensor, offset, size);
            return;
        }

        piece.resize(size);
        read(piece.data(), size);
        ggml_backend_tensor_set(tensor, piece.data(), offset, size);
    }

    size_t n_bytes() override { return io.n_bytes(); }

    // whether the checksum that follows matches everything read so far
    bool read_checksum() {
        uint64_t value;
        io.read(&value, sizeof(value));

        return value == checksum.value();
    }

private:
    llama_io_read_i & io;
};

//
// cleaning up after a rejected state
//

// Zeroes the i-th of n_parts equal parts of a tensor.
static void zero_part(ggml_tensor * tensor, size_t i, size_t n_parts) {
    const std::vector<uint8_t> zeros(ggml_nbytes(tensor) / n_parts);

    ggml_backend_tensor_set(tensor, zeros.data(), i * zeros.size(), zeros.size());
}

static void zero_stream(const std::vector<llama_h2o_layer> & layers, uint32_t s, size_t n_stream) {
    for (const auto & layer : layers) {
        for (const auto & [tensor, layout] : layer.rows()) {
            zero_part(tensor, s, n_stream);
        }
    }
}

static void zero_free_cells(const llama_memory_recurrent & recurrent) {
    // the cells also have copies of earlier states, for rollbacks
    const size_t n = size_t(recurrent.size) * (1 + recurrent.n_rs_seq);

    for (const auto * tensors : { &recurrent.r_l, &recurrent.s_l, &recurrent.p_l }) {
        for (ggml_tensor * tensor : *tensors) {
            for (size_t i = 0; tensor && i < n; ++i) {
                if (recurrent.cells[i % recurrent.size].is_empty()) {
                    zero_part(tensor, i, n);
                }
            }
        }
    }
}

// Empty cells are masked by a weight of 0, which does not help against NaN or infinity.
void llama_h2o::zero_rows(llama_seq_id seq_id) {
    const uint32_t s = stream_of(seq_id);

    zero_stream(parts.layers, s, parts.streams.size());
    if (parts.window) {
        zero_stream(parts.window->layers, s, parts.streams.size());
    }
    if (parts.recurrent) {
        zero_free_cells(*parts.recurrent);
    }
}

// Empties all parts of a sequence. llama.cpp would not remove negative positions of a corrupt state.
static void empty_parts(const llama_h2o_parts & parts, uint32_t s, llama_seq_id seq_id) {
    if (parts.window) {
        parts.window->cells.clear(s);
    }
    if (parts.recurrent) {
        for (auto & cell : parts.recurrent->cells) {
            cell.pos = cell.has_seq_id(seq_id) ? std::max(0, cell.pos) : cell.pos;
        }
    }
}

// Checks that all parts of a memory belong to the same text and can continue it; seq_id < 0: for all sequences.
static void expect_whole_texts(const llama_h2o & h2o, const llama_h2o_caches & caches, llama_seq_id seq_id) {
    const auto & window = h2o.parts.window;

    const llama_memory_i * others[] = { caches.window, caches.recurrent };

    const llama_seq_id begin = std::max(0, seq_id);
    const llama_seq_id end   = seq_id < 0 ? llama_seq_id(caches.growing->get_n_seq_max()) : seq_id + 1;
    for (llama_seq_id id = begin; id < end; ++id) {
        const llama_pos newest = caches.growing->seq_pos_max(id);

        for (const llama_memory_i * other : others) {
            llama_h2o_expect(
                    !other || (other->seq_pos_max(id) == newest && other->seq_pos_min(id) >= std::min(0, newest)),
                    "parts of different texts");
        }
        llama_h2o_expect(!window || window->is_whole(h2o.stream_of(id)), "a window with missing or duplicate rows");
    }
}

// Refuses to save or restore only the window: its rotations depend on the re-bases of the other layers.
static void check_flags(const llama_h2o_parts & parts, uint32_t flags) {
    if (parts.window && (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        throw std::runtime_error("with eviction, windowed layers can only be saved and restored with the whole state");
    }
}

void llama_h2o::write_memory(llama_context & ctx, llama_io_write_i & io, llama_seq_id seq_id, uint32_t flags) {
    const llama_memory_i & memory = *ctx.get_memory();
    const llama_h2o * h2o         = of(&ctx);
    if (!h2o) {
        memory.state_write(io, seq_id, flags);
        return;
    }
    check_flags(h2o->parts, flags);

    summing_writer out(io, flags);
    memory.state_write(out, seq_id, flags);
    out.write_checksum();
}

void llama_h2o::read_memory(llama_context & ctx, llama_io_read_i & io, llama_seq_id seq_id, uint32_t flags) {
    llama_memory_i & memory = *ctx.get_memory();
    llama_h2o * h2o         = of(&ctx);
    if (!h2o) {
        memory.state_read(io, seq_id, flags);
        return;
    }
    check_flags(h2o->parts, flags);

    const llama_h2o_caches caches = llama_h2o_caches::of(&memory);
    if (caches.window && seq_id >= 0) {
        caches.window->seq_rm(seq_id, -1, -1); // llama.cpp does not clear it if the state has none of it
    }

    summing_reader in(io, flags);
    try {
        memory.state_read(in, seq_id, flags);
        llama_h2o_expect(in.read_checksum(), "a wrong checksum: it is damaged");
        if (!(flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
            expect_whole_texts(*h2o, caches, seq_id);
        }
    } catch (...) {
        // partly restored data is useless
        if (seq_id < 0) {
            memory.clear(true);
        } else {
            empty_parts(h2o->parts, h2o->stream_of(seq_id), seq_id);
            memory.seq_rm(seq_id, -1, -1);
            h2o->zero_rows(seq_id);
        }
        h2o->empty_streams(seq_id);
        throw;
    }
}
