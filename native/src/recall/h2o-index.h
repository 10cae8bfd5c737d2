// What the queries of a text look through to find archived rows: codes of the keys (h2o-search.h), which of them a head does
// not hold itself, and where the pages of the archive count.

#pragma once

#include "kernels/h2o-search.h"
#include "recall/h2o-archive.h"
#include "recall/h2o-device-index.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// How much was looked at what was found: squared shares of attention.
struct llama_h2o_gains {
    uint64_t n_tokens = 0;        // that were measured
    std::vector<double> squares;  // [heads of all layers] by these
    uint32_t page = 0;            // where the passages begin
    std::vector<double> interest; // of passages: what was looked at lately
};

// Few heads look far: those that copy and look up, the retrieval heads (Wu et al., 2024), whatever the text. The first
// N_MEASURED tokens look in all heads. Then only a quarter of the heads look, those that gained most by squared shares of
// attention, for as many rows in all; the others need no codes any more.
//
// What they look at is where an answer is, and all heads are needed to read it: a token alone attends in every head to the
// whole of the passage that was looked at most. An older look counts half after HALF_LIFE tokens.
//
// Codes are a function of the rows in a page of the archive and of where the page counts, and nothing else: what is saved is
// the archive, and the gains. One thread at a time changes the index, but for encode() and hide() of different layers.
class llama_h2o_index {
public:
    static constexpr uint64_t N_MEASURED  = 512;
    static constexpr uint32_t HEADS_A_ONE = 4; // heads for each one that looks
    static constexpr uint32_t ALONE       = 4; // a token alone finds one in so many of what some do together
    static constexpr uint32_t HALF_LIFE   = 32;

    //   n_find   rows, the mean over the heads
    llama_h2o_index(const std::vector<llama_h2o_archive_layer> & layers, uint32_t n_find);

    // rows that a head finds at most
    uint32_t max_find() const;

    // Nothing is found until follow(): the archive changes.
    void suspend();

    // As if there had been no archive yet: after a failure amid follow(), encode() or hide().
    void clear();

    //   angles   radians per position of the pairs of a layer's keys; none where keys are not turned
    void set_rotation(uint32_t ikv, const std::vector<double> & angles, const llama_h2o_rotation & how);

    // Takes up what has changed in the archive since the last time: its pages may have moved. exclude() follows, encode() of
    // all layers where it returns true, and then hide().
    //   places   [n_pages] rotary positions that the keys of each page count from, ascending and never below 0
    bool follow(const llama_h2o_archive & archive, const std::vector<int32_t> & places);

    // No head is to find the rows of positions p0 <= p < p1.
    void exclude(int32_t p0, int32_t p1);

    void encode(const llama_h2o_archive & archive, uint32_t ikv);

    // Archived rows are hidden from a head that does not hold them.
    //   held   positions
    void hide(uint32_t ikv, uint32_t head, const std::vector<int32_t> & held);

    // Before so many tokens look.
    void prepare(uint32_t n_tokens);

    // What was measured so far.
    llama_h2o_gains gains() const;
    // What was measured when the text was as it is now. Nothing is found until follow() if it returns false: heads look
    // whose codes are gone.
    bool set_gains(const llama_h2o_gains & gains);
    void reset_gains() { set_gains({ 0, std::vector<double>(n_heads()), 0, {} }); }

    // threads that may look at the same time
    void set_slots(uint32_t n_slots);

    // Layers on a device are looked through there from now on.
    void add_device(std::unique_ptr<llama_h2o_device_index> device) { devices.push_back(std::move(device)); }

    // What has changed is copied to the devices: behind hide() of all layers.
    void update_devices(const llama_h2o_archive & archive);

    // whether they have room for it
    bool has_room() const;

    // what devices copy
    uint32_t first_page() const { return begin; }
    uint32_t n_pages() const { return uint32_t(pages.size()); }
    uint32_t n_head_kv(uint32_t ikv) const { return uint32_t(layers[ikv].pages.size()); }
    const llama_h2o_code_layout & layout(uint32_t ikv) const { return layers[ikv].layout; }
    size_t rotation_of(uint32_t ikv) const { return layers[ikv].rotation; }
    const std::vector<float> & factors(size_t rotation) const { return rotations[rotation].factors; }
    uint32_t n_factors(uint32_t ikv) const {
        return 2 * rotations[layers[ikv].rotation].how.n_dims;
    } // factors of a page

    // Valid as long as the index: for the op of a layer.
    const llama_h2o_search_text & text(uint32_t ikv) const { return texts[ikv]; }

    // how much was looked at rows since reset_weights(): see llama_h2o_search_text
    double weight(int64_t pos) const;
    double share() const;
    void reset_weights();

private:
    static constexpr uint32_t PAGE     = LLAMA_H2O_PAGE;
    static constexpr uint32_t PASSAGE  = LLAMA_H2O_PASSAGE;
    static constexpr uint32_t PASSAGES = PAGE / PASSAGE; // of a page

    struct layer_codes {
        llama_h2o_code_layout layout;
        std::vector<std::vector<char>> pages;      // [n_head_kv] codes, with n_dead pages in front
        std::vector<const char *> first;           // [n_head_kv] behind these
        std::vector<std::vector<uint64_t>> hidden; // [n_head_kv] see llama_h2o_search_text
        std::vector<const uint64_t *> first_hidden;
        std::vector<uint64_t> keys; // [n_head_kv] offsets in a page
        std::vector<uint64_t> values;
        size_t rotation;     // which of the turnings
        uint32_t first_head; // of all layers' heads
    };

    // of layers whose keys are turned alike
    struct rotation {
        std::vector<double> angles;
        llama_h2o_rotation how;
        std::vector<float> factors; // see llama_h2o_search_text
    };

    std::vector<layer_codes> layers;
    std::vector<rotation> rotations;
    std::vector<llama_h2o_search_text> texts; // of the layers

    std::vector<const char *> pages; // of the archive
    std::vector<int32_t> places;     // where they count
    size_t n_dead  = 0;
    uint32_t begin = 0;     // first page
    uint32_t fresh = 0;     // first page that is to be encoded
    bool has_fresh = false; // codes that devices do not have yet
    int32_t first  = 0;     // positions in the archive
    int32_t next   = 0;
    std::vector<uint64_t> wanted; // a bit for each row of the pages that may be found

    std::vector<std::vector<double>> weights;       // [n_slots] by position, from the first page on
    std::vector<double *> weight_rows;              // [n_slots]
    std::vector<double> head_gains;                 // of each layer: [n_slots][n_head_kv]
    std::vector<double> shares;                     // [n_slots]
    std::vector<std::vector<double>> slot_interest; // [n_slots] by passage: interest that is not yet in `measured`
    std::vector<double *> slot_interest_rows;       // [n_slots]

    // of the heads of all layers
    uint32_t n_mean;                // rows that they find
    llama_h2o_gains measured;       // before those in head_gains and looked; all squares once it is known who looks
    std::vector<bool> searching;    // empty: that is not known yet
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
