// What a policy has collected of the rows of a stream, read and written by the host between two graphs.

#pragma once

#include "cache/h2o-host-rows.h"
#include "cache/h2o-parts.h"

#include <cstdint>
#include <vector>

class llama_h2o_collected {
public:
    // The graphs before must be done.
    llama_h2o_collected(llama_h2o_parts & parts, uint32_t s);

    // of a KV head of a layer, [n_cells]
    float * scores(size_t ikv, uint32_t head) { return rows[0][ikv].f32() + head * n_cells; }

    // the same of squares; null unless the policy asks for them
    float * squares(size_t ikv, uint32_t head) {
        return rows[1].empty() ? nullptr : rows[1][ikv].f32() + head * n_cells;
    }

    // Takes away what the policy forgets until a position of the text.
    void forget(llama_pos pos);

    void commit();

private:
    const llama_h2o_parts & parts;
    llama_h2o_stream & stream;
    const size_t n_cells;

    std::vector<llama_h2o_host_rows> rows[2]; // of the layers: scores, and squares unless there are none
};

// The weights of queries grow from one compaction to the next. Long before they leave the range of a float, what was
// collected is made smaller instead: as much as it will be behind p_last, the last of the positions that come, however
// many they are, so that no weight of theirs is above one.
void llama_h2o_keep_credit_small(llama_h2o_parts & parts, uint32_t s, llama_pos p_last);

// A score starts at zero when its cell is used again, and the cell with rows of its own position.
void llama_h2o_reset_free_cells(llama_h2o_parts & parts, uint32_t s);
