// A fast checksum for states and archives. It detects accidental damage, not forgery.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Detects every change of a single word; misses other changes with a probability of 2^-64.
class llama_h2o_checksum {
public:
    void add(const void * data, size_t size) {
        const auto * bytes = static_cast<const uint8_t *>(data);

        for (n_bytes += size; size > 0 && n_begun > 0; ++bytes, --size) {
            add(*bytes);
        }
        for (; size >= sizeof(uint64_t); bytes += sizeof(uint64_t), size -= sizeof(uint64_t)) {
            uint64_t word;
            std::memcpy(&word, bytes, sizeof(word));
            state = mixed(word);
        }
        for (; size > 0; ++bytes, --size) {
            add(*bytes);
        }
    }

    // of all bytes and their number
    uint64_t value() const {
        llama_h2o_checksum res = *this;
        res.state              = res.mixed(begun);
        return res.mixed(n_bytes);
    }

private:
    uint64_t state   = 0xcbf29ce484222325;
    uint64_t n_bytes = 0;
    uint64_t begun   = 0; // the first bytes of a word
    size_t n_begun   = 0;

    void add(uint8_t byte) {
        begun |= uint64_t(byte) << (8 * n_begun);
        if (++n_begun == sizeof(begun)) {
            state   = mixed(begun);
            begun   = 0;
            n_begun = 0;
        }
    }

    // both steps can be undone, so no two states become one
    uint64_t mixed(uint64_t word) const {
        const uint64_t res = (state ^ word) * 0x9e3779b97f4a7c15;

        return res ^ (res >> 32);
    }
};
