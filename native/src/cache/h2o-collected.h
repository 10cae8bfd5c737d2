// What a policy has collected of the rows of a stream, read and written by the host between two graphs.

#pragma once

#include "cache/h2o-host-rows.h"
#include "cache/h2o-parts.h"

#include <cstdint>
#include <map>

class llama_h2o_collected {
public:
    // The graphs before must be done.
    //   but_chosen   without that of devices that choose
    llama_h2o_collected(llama_h2o_parts & parts, uint32_t s, bool but_chosen = false);
    ~llama_h2o_collected() { commit(); } // a compaction that fails keeps what was forgotten

    // of a KV head of a layer, [n_cells]; null where it stays on the device
    float * scores(size_t ikv, uint32_t head) { return sums_of(parts.layers[ikv].tensors.scores, head); }

    // the same of squares; null unless the policy asks for them
    float * squares(size_t ikv, uint32_t head) { return sums_of(parts.layers[ikv].tensors.squares, head); }

    // Calls fn(sums) for each of those.
    template <typename F>
    void for_each(F fn) {
        for (auto & [sums, some] : rows) {
            for (int64_t head = 0; head < sums->ne[1]; ++head) {
                fn(some.f32() + head * n_cells);
            }
        }
    }

    // Takes away what the policy forgets until a position of the text. Returns what is left, as a factor.
    float decay(llama_pos pos);

    // Gives all back to the devices, for the last time.
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

// The weights of queries grow from one compaction to the next. Long before they leave the range of a float, what was
// collected is made smaller instead: as much as it will be behind p_last, the last of the positions that come, however
// many they are, so that no weight of theirs is above one.
void llama_h2o_keep_credit_small(llama_h2o_parts & parts, uint32_t s, llama_pos p_last);

// A score starts at zero when its cell is used again, and the cell with rows of its own position.
void llama_h2o_reset_free_cells(llama_h2o_parts & parts, uint32_t s);
