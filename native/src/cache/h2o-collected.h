// The scores that a policy has collected for the rows of a stream, read and written by the host between two graphs.

#pragma once

#include "cache/h2o-host-rows.h"
#include "cache/h2o-parts.h"

#include <cstdint>
#include <map>

class llama_h2o_collected {
public:
    // All earlier graphs must have finished.
    //   but_chosen   except those that stay on a device, which chooses by them
    llama_h2o_collected(llama_h2o_parts & parts, uint32_t s, bool but_chosen = false);
    ~llama_h2o_collected() { commit(); } // also if a compaction fails after decay()

    // of a KV head of a layer, [n_cells]; null where it stays on the device
    float * scores(size_t ikv, uint32_t head) { return sums_of(parts.layers[ikv].tensors.scores, head); }

    // the same of squares; null unless the policy asks for them
    float * squares(size_t ikv, uint32_t head) { return sums_of(parts.layers[ikv].tensors.squares, head); }

    // Calls fn(sums) for each head.
    template <typename F>
    void for_each(F fn) {
        for (auto & [sums, some] : rows) {
            for (int64_t head = 0; head < sums->ne[1]; ++head) {
                fn(some.f32() + head * n_cells);
            }
        }
    }

    // Applies the decay of the policy up to a position of the text. Returns the factor.
    float decay(llama_pos pos);

    // Writes everything back to the devices, once.
    void commit();

private:
    const llama_h2o_parts & parts;
    llama_h2o_stream & stream;
    const size_t n_cells;

    std::map<const ggml_tensor *, llama_h2o_host_rows> rows; // of the tensors that the layers have views of

    float * sums_of(const ggml_tensor * sums, uint32_t head) {
        const auto it = sums ? rows.find(sums->view_src) : rows.end();

        return it != rows.end() ? it->second.f32() + sums->view_offs / sizeof(float) + head * n_cells : nullptr;
    }
};

// The weights of queries grow from one compaction to the next. Long before they exceed the range of a float, this scales the
// collected scores down instead, as if p_last, the last new position, had been reached, so that no new weight exceeds one.
void llama_h2o_keep_credit_small(llama_h2o_parts & parts, uint32_t s, llama_pos p_last);

// Prepares freed cells for reuse: their scores are zero, and their rows belong to the position of the cell.
void llama_h2o_reset_free_cells(llama_h2o_parts & parts, uint32_t s);
