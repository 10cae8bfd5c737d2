// The cells of the cache, stream by stream, as llama.cpp keeps them: one sequence per stream, of the same number.

#pragma once

#include "llama-kv-cells.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class llama_h2o_cells {
public:
    //   heads   [n_stream] where the search for free cells begins
    llama_h2o_cells(std::vector<llama_kv_cells> & streams, std::vector<uint32_t> & heads) :
        streams(streams), heads(heads) {}

    size_t n_stream() const { return streams.size(); }

    const llama_kv_cells & operator[](uint32_t s) const { return streams[s]; }

    uint32_t head(uint32_t s) const { return heads[s]; }

    // in use, ascending
    std::vector<uint32_t> used(uint32_t s) const;

    // their positions in the text
    std::vector<llama_pos> positions(uint32_t s, const std::vector<uint32_t> & cells) const;

    // the newest position, or -1
    llama_pos newest(uint32_t s) const { return streams[s].seq_pos_max(llama_seq_id(s)); }

    void free(uint32_t s, const std::vector<uint32_t> & freed);

    // those with a position that is nobody's, where memory ran out while they were taken
    void free_lost(uint32_t s);

    void clear(uint32_t s);

    // uses an empty cell
    void put(uint32_t s, uint32_t cell, llama_pos pos);

    void set_head(uint32_t s, uint32_t head) { heads[s] = head; }

private:
    std::vector<llama_kv_cells> & streams;
    std::vector<uint32_t> & heads;
};
