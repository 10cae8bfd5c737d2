// Which archived rows come back: from how queries look at blocks of hidden rows to the rows that every head takes. Knows
// nothing of tensors. A row is hidden from a head if it is archived and the head does not hold it in the cache.

#pragma once

#include <cstdint>
#include <vector>

// How the queries of one KV head look at hidden and at resident rows: [n_rows] queries, token by token, the heads of the
// group side by side. Of sets of logits there is the largest, and the sum of exp(logit - that); minus infinity and 0 of
// none.
struct llama_h2o_scanned {
    uint32_t n_rows  = 0;
    uint32_t n_group = 0;

    // of the hidden keys of each block
    std::vector<float> hidden_max; // [n_blocks][n_rows]
    std::vector<float> hidden_sum; // [n_blocks][n_rows]

    // of all keys that are resident, and of attention sinks
    std::vector<float> resident_max; // [n_rows]
    std::vector<float> resident_sum; // [n_rows]

    // The sinks, a logit of each query head of the group, are resident for all queries.
    void add_sinks(const float * logits);
};

// The largest and the sum of two sets of logits become those of one.
void llama_h2o_add_logits(float & max, float & sum, float other_max, float other_sum);

// The shares of the queries' attention that go to blocks of hidden rows: one softmax over hidden and resident rows, a
// mean over the queries.
struct llama_h2o_block_masses {
    std::vector<float> mass;    // [n_blocks] sum over the query heads of the group
    std::vector<double> weight; // [n_blocks] sum over them of the squared share
};

llama_h2o_block_masses llama_h2o_weigh_blocks(const llama_h2o_scanned & scanned);

// What there is to choose from. Blocks and positions count from the first page of the archive on.
struct llama_h2o_hidden {
    static constexpr int32_t N_BLOCK = 16; // positions of a block

    int32_t start; // position of the first block
    int32_t first; // first position that is archived
    int32_t next;  // and the one behind the last

    std::vector<std::vector<uint8_t>> resident;   // of the KV heads of all layers: [next - start], not hidden from it
    std::vector<llama_h2o_block_masses> of_heads; // of those, too

    uint32_t n_query_heads; // of all layers

    int32_t n_blocks() const { return (next - start + N_BLOCK - 1) / N_BLOCK; }
    bool is_hidden(uint32_t head, int32_t pos) const { return pos >= first && !resident[head][pos - start]; }
};

// Positions that are chosen together, for all heads.
struct llama_h2o_recall_span {
    int32_t p0;
    int32_t p1;
    double weight; // the sum of its blocks'

    bool operator==(const llama_h2o_recall_span & other) const { return p0 == other.p0 && p1 == other.p1; }
};

struct llama_h2o_recall_choice {
    std::vector<llama_h2o_recall_span> spans; // ascending

    uint32_t n_rows = 0;      // of every head
    std::vector<int32_t> pos; // [n_heads][n_rows] ascending for each head

    // shares of all queries' attention, a mean over query heads
    double hidden = 0.0; // to hidden rows
    double missed = 0.0; // to those that are not chosen
};

// Takes the blocks with the largest weights, with the more of their neighbours the more they stand out, and of these for
// every head the first n_rows rows that are hidden from it.
llama_h2o_recall_choice llama_h2o_choose_rows(const llama_h2o_hidden & hidden, uint32_t n_rows);

// What the first positions of the spans are rotated to: those of the text, less the shift of re-bases, but never further
// away than a third of the positions, or than they are long together twice. Spans from further back are packed there, in
// the order of the text.
//   next    rotary position of the next token
//   n_pos   positions that the model was trained on
std::vector<int32_t> llama_h2o_place_spans(
        const std::vector<llama_h2o_recall_span> & spans, int32_t shift, int32_t next, int32_t n_pos);
