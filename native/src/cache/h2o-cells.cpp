#include "cache/h2o-cells.h"

#include <algorithm>

std::vector<uint32_t> llama_h2o_cells::used(uint32_t s) const {
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

std::vector<llama_pos> llama_h2o_cells::positions(uint32_t s, const std::vector<uint32_t> & cells) const {
    std::vector<llama_pos> res;
    res.reserve(cells.size());
    for (const uint32_t cell : cells) {
        res.push_back(streams[s].pos_get(cell));
    }

    return res;
}

void llama_h2o_cells::free(uint32_t s, const std::vector<uint32_t> & freed) {
    for (const uint32_t cell : freed) {
        streams[s].rm(cell);
        heads[s] = std::min(heads[s], cell);
    }
}

void llama_h2o_cells::free_lost(uint32_t s) {
    for (uint32_t i = 0; i < streams[s].size(); ++i) {
        if (!streams[s].is_empty(i) && !streams[s].seq_has(i, llama_seq_id(s))) {
            streams[s].rm(i);
        }
    }
}

void llama_h2o_cells::clear(uint32_t s) {
    streams[s].reset();
    heads[s] = 0;
}

void llama_h2o_cells::put(uint32_t s, uint32_t cell, llama_pos pos) {
    streams[s].pos_set(cell, pos);
    streams[s].seq_add(cell, llama_seq_id(s));
}
