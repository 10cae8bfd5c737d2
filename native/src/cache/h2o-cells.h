// The cells of the cache, per stream. Each stream has one sequence, with the same number.

#pragma once

#include "llama-kv-cells.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

class llama_h2o_cells {
public:
    //   heads   [n_stream] cell at which the search for free cells starts
    llama_h2o_cells(std::vector<llama_kv_cells> & streams, std::vector<uint32_t> & heads) :
        streams(streams), heads(heads) {}

    size_t n_stream() const { return streams.size(); }

    const llama_kv_cells & operator[](uint32_t s) const { return streams[s]; }

    uint32_t head(uint32_t s) const { return heads[s]; }

    // cells in use, ascending
    std::vector<uint32_t> used(uint32_t s) const {
        const auto & cells = streams[s];

        std::vector<uint32_t> res;
        res.reserve(cells.get_used());
        for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
            if (!cells.is_empty(i)) {
                res.push_back(i);
            }
        }

        return res;
    }

    std::vector<llama_pos> positions(uint32_t s, const std::vector<uint32_t> & cells) const {
        std::vector<llama_pos> res;
        res.reserve(cells.size());
        for (const uint32_t cell : cells) {
            res.push_back(streams[s].pos_get(cell));
        }

        return res;
    }

    // the newest position, or -1
    llama_pos newest(uint32_t s) const { return streams[s].seq_pos_max(llama_seq_id(s)); }

    void free(uint32_t s, const std::vector<uint32_t> & freed) {
        for (const uint32_t cell : freed) {
            streams[s].rm(cell);
            heads[s] = std::min(heads[s], cell);
        }
    }

    // frees cells with a position but without a sequence, which an allocation failure can leave
    void free_lost(uint32_t s) {
        for (uint32_t i = 0; i < streams[s].size(); ++i) {
            if (!streams[s].is_empty(i) && !streams[s].seq_has(i, llama_seq_id(s))) {
                streams[s].rm(i);
            }
        }
    }

    void clear(uint32_t s) {
        streams[s].reset();
        heads[s] = 0;
    }

    // fills an empty cell
    void put(uint32_t s, uint32_t cell, llama_pos pos) {
        streams[s].pos_set(cell, pos);
        streams[s].seq_add(cell, llama_seq_id(s));
    }

    void set_head(uint32_t s, uint32_t head) { heads[s] = head; }

private:
    std::vector<llama_kv_cells> & streams;
    std::vector<uint32_t> & heads;
};
