// The search index of a text's archive: codes of the keys (h2o-search.h), the rows that each head does not hold in its cells,
// and the RoPE position of each page.

#pragma once

#include "kernels/h2o-search.h"
#include "recall/h2o-archive.h"
#include "recall/h2o-device-index.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// Attention to retrieved rows: sums of squared attention probabilities.
struct llama_h2o_gains {
    uint64_t n_tokens = 0;        // measured tokens
    std::vector<double> squares;  // [heads of all layers] of the measured tokens
    uint32_t page = 0;            // first page of `interest`
    std::vector<double> interest; // by passage, with decay
};

// Only a few heads attend to distant tokens, in every text: retrieval heads (Wu et al., 2024). All heads search for the first
// N_MEASURED tokens. Then only the quarter of the heads with the largest gains (squared attention to retrieved rows) searches,
// for the same number of rows in total. The other heads need no codes.
//
// Retrieval heads locate an answer, but all heads are needed to read it: a single token attends in every head to the whole
// passage with the largest interest. Interest halves every HALF_LIFE tokens.
//
// Codes depend only on the rows in a page and on the RoPE position of the page, so a state contains only the archive and the
// gains. Only one thread at a time may change the index, except for encode() and hide() of different layers.
class llama_h2o_index {
public:
    static constexpr uint64_t N_MEASURED  = 512;
    static constexpr uint32_t HEADS_A_ONE = 4; // heads per head that searches
    static constexpr uint32_t ALONE       = 4; // a single token retrieves 1/ALONE of n_together
    static constexpr uint32_t HALF_LIFE   = 32;

    //   n_find   retrieved rows, mean over the heads
    llama_h2o_index(const std::vector<llama_h2o_archive_layer> & layers, uint32_t n_find);

    // maximum retrieved rows per head
    uint32_t max_find() const;

    // Disables the search until follow(), because the archive will change.
    void suspend();

    // Empties the index, after a failure in follow(), encode() or hide().
    void clear();

    //   angles   radians per position for each pair of a layer's keys; empty if keys are not rotated
    void set_rotation(uint32_t ikv, const std::vector<double> & angles, const llama_h2o_rotation & how);

    // Follows changes of the archive, whose pages may have moved. Then call exclude(), encode() of all layers if it returned
    // true, and hide().
    //   places   [n_pages] RoPE position of the first key of each page, ascending, not negative
    bool follow(const llama_h2o_archive & archive, const std::vector<int32_t> & places);

    // Excludes the rows of positions p0 <= p < p1 from the search in all heads.
    void exclude(int32_t p0, int32_t p1);

    void encode(const llama_h2o_archive & archive, uint32_t ikv);

    // Marks the archived rows that a head does not hold as hidden: only these are searched.
    //   held   positions
    void hide(uint32_t ikv, uint32_t head, const std::vector<int32_t> & held);

    // Call it before n_tokens tokens search.
    void prepare(uint32_t n_tokens);

    llama_h2o_gains gains() const;
    // Restores gains from an earlier point of the text. If it returns false, follow() is needed, because heads search whose codes
    // were dropped.
    bool set_gains(const llama_h2o_gains & gains);
    void reset_gains() { set_gains({ 0, std::vector<double>(n_heads()), 0, {} }); }

    // maximum number of threads that search at the same time
    void set_slots(uint32_t n_slots);

    // Lets a device search for its layers.
    void add_device(std::unique_ptr<llama_h2o_device_index> device) { devices.push_back(std::move(device)); }

    // Queues a copy of the attention sums of devices to the host, after the graph of a batch.
    void fetch() {
        for (auto & device : devices) {
            device->fetch();
        }
    }

    // Copies changes to the devices; call it after hide() of all layers.
    void update_devices(const llama_h2o_archive & archive);

    // whether all devices have enough memory for it
    bool has_room() const;

    // data that devices copy
    uint32_t first_page() const { return begin; }
    uint32_t n_pages() const { return uint32_t(pages.size()); }
    uint32_t n_head_kv(uint32_t ikv) const { return uint32_t(layers[ikv].pages.size()); }
    const llama_h2o_code_layout & layout(uint32_t ikv) const { return layers[ikv].layout; }
    size_t rotation_of(uint32_t ikv) const { return layers[ikv].rotation; }
    const std::vector<float> & factors(size_t rotation) const { return rotations[rotation].factors; }
    uint32_t n_factors(uint32_t ikv) const {
        return 2 * rotations[layers[ikv].rotation].how.n_dims;
    } // factors of a page

    // For the op of a layer; valid as long as the index.
    const llama_h2o_search_text & text(uint32_t ikv) const { return texts[ikv]; }

    // attention to rows since reset_weights(), see llama_h2o_search_text
    double weight(int64_t pos) const;
    double share() const;
    void reset_weights();

private:
    static constexpr uint32_t PAGE     = LLAMA_H2O_PAGE;
    static constexpr uint32_t PASSAGE  = LLAMA_H2O_PASSAGE;
    static constexpr uint32_t PASSAGES = PAGE / PASSAGE; // per page

    struct layer_codes {
        llama_h2o_code_layout layout;
        std::vector<std::vector<char>> pages;      // [n_head_kv] codes, with n_dead pages in front
        std::vector<const char *> first;           // [n_head_kv] first live page
        std::vector<std::vector<uint64_t>> hidden; // [n_head_kv] see llama_h2o_search_text
        std::vector<const uint64_t *> first_hidden;
        std::vector<uint64_t> keys; // [n_head_kv] offsets in a page
        std::vector<uint64_t> values;
        size_t rotation;     // index in rotations
        uint32_t first_head; // number among the heads of all layers
    };

    // shared by layers with equal rotations
    struct rotation {
        std::vector<double> angles;
        llama_h2o_rotation how;
        std::vector<float> factors; // see llama_h2o_search_text
    };

    std::vector<layer_codes> layers;
    std::vector<rotation> rotations;
    std::vector<llama_h2o_search_text> texts; // per layer

    std::vector<const char *> pages; // of the archive
    std::vector<int32_t> places;     // RoPE position of each
    size_t n_dead  = 0;
    uint32_t begin = 0;     // first page
    uint32_t fresh = 0;     // first page to encode
    bool has_fresh = false; // codes not yet copied to devices
    int32_t first  = 0;     // positions in the archive
    int32_t next   = 0;
    std::vector<uint64_t> wanted; // a bit for each row that may be retrieved

    std::vector<std::vector<double>> weights;       // [n_slots] by position, from the first page on
    std::vector<double *> weight_rows;              // [n_slots]
    std::vector<double> head_gains;                 // of each layer: [n_slots][n_head_kv]
    std::vector<double> shares;                     // [n_slots]
    std::vector<std::vector<double>> slot_interest; // [n_slots] by passage: not yet in `measured`
    std::vector<double *> slot_interest_rows;       // [n_slots]

    // for the heads of all layers
    uint32_t n_mean;                // retrieved rows per head
    llama_h2o_gains measured;       // without head_gains and slot_interest; final once heads are chosen
    std::vector<bool> searching;    // per head; empty: not chosen yet, all search
    std::vector<uint32_t> n_hidden; // rows
    std::vector<uint32_t> n_alone;  // see llama_h2o_search_text
    std::vector<uint32_t> n_together;

    std::vector<std::unique_ptr<llama_h2o_device_index>> devices;

    uint32_t n_heads() const { return uint32_t(n_hidden.size()); }
    void collect(bool rows) const;
    bool is_searching(uint32_t ikv, uint32_t head) const {
        return searching.empty() || searching[layers[ikv].first_head + head];
    }
    void choose_heads();
    std::vector<double> interest() const;
    void set_slot_interest(size_t n_slots);
    void align_interest();
    void choose_focus(bool may_be);
    void drop_front(uint32_t n_pages);
    void set_factors();
    void set_texts();
};
