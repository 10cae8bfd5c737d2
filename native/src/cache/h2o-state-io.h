// Reading and writing the numbers, lists and tensors of a saved state.

#pragma once

#include "ggml-backend.h"

#include "llama-impl.h"
#include "llama-io.h"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

// Checks a condition of a state that is being restored. Throws std::runtime_error with what the state has instead.
inline void llama_h2o_expect(bool fits, const char * what) {
    if (!fits) {
        throw std::runtime_error(format("the state does not fit: it has %s", what));
    }
}

class llama_h2o_state_writer {
public:
    explicit llama_h2o_state_writer(llama_io_write_i & io) : io(io) {}

    void write(const void * data, size_t size) {
        if (size > 0) {
            io.write(data, size);
        }
    }

    // T must not have padding, so that every written byte is defined
    template <typename T>
    void write(const T & value) {
        write(&value, sizeof(value));
    }

    template <typename T>
    void write(const std::vector<T> & data) {
        write(data.data(), data.size() * sizeof(T));
    }

    // part of a tensor
    void write(const ggml_tensor * tensor, size_t offset, size_t size) {
        if (ggml_backend_buffer_is_host(tensor->buffer)) {
            write(static_cast<const uint8_t *>(tensor->data) + offset, size);
            return;
        }

        piece.resize(size);
        ggml_backend_tensor_get(tensor, piece.data(), offset, size);
        write(piece);
    }

private:
    llama_io_write_i & io;
    std::vector<uint8_t> piece;
};

class llama_h2o_state_reader {
public:
    explicit llama_h2o_state_reader(llama_io_read_i & io) : io(io) {}

    void read(void * data, size_t size) {
        if (size > 0) {
            io.read(data, size);
        }
    }

    template <typename T>
    void read(T & value) {
        read(&value, sizeof(value));
    }

    template <typename T>
    void read(std::vector<T> & data) {
        read(data.data(), data.size() * sizeof(T));
    }

    // part of a tensor. The returned bytes are valid until the next call
    const std::vector<uint8_t> & read(ggml_tensor * tensor, size_t offset, size_t size) {
        piece.resize(size);
        read(piece);
        ggml_backend_tensor_set(tensor, piece.data(), offset, size);

        return piece;
    }

private:
    llama_io_read_i & io;
    std::vector<uint8_t> piece;
};
