// The eviction policy: what a row is worth, apart from where rows lie and how they move. One small file each in policies/.

#pragma once

#include "policies/h2o-selection.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// The rows of one (layer, KV head) at a compaction.
struct llama_h2o_head_rows {
    uint32_t il;      // layer of the model
    uint32_t head;    // KV head of the layer
    uint32_t n_group; // query heads of the KV head
    uint32_t n_rows;
    size_t n_places; // for competing rows
    int64_t newest;  // position of the text

    const int32_t * pos;                 // [n_rows]
    const llama_h2o_standing * standing; // [n_rows]
    const float * attention;             // [n_rows] sum over queries, mean over the query heads of the group
    const float * squares;               // [n_rows] the same of squared probabilities; or anything, unless asked for
    const float * probe;                 // [.][n_rows] what the policy's probe measured, if it has one

    // queries that could see a row, its own included
    double n_seen(size_t i) const { return double(newest - pos[i] + 1); }
};

// What a policy measures of the rows at a compaction, where they lie. See h2o-probe.cpp.
enum class llama_h2o_probe_type {
    none,
    attention, // [1][n_rows] paid by the last queries: sum over them, mean over the query heads of the group
    keys,      // [1][n_rows] cosine with the mean direction of the keys
    expected,  // [n_group + 1][n_rows] logits of the expected query of each query head; length of V
};

// Whose scores are averaged before the choice, which is then the same for all of them.
enum class llama_h2o_scope { head, layer, cache };

class llama_h2o_policy {
public:
    virtual ~llama_h2o_policy() = default;

    std::string text; // by which it is found again: its name and all parameters

    // higher is kept; only competing rows matter
    virtual void score(const llama_h2o_head_rows & rows, double * score) const = 0;

    //
    // what it has to know
    //

    bool attention = false;
    bool squares   = false;

    uint32_t n_queries         = 0; // the last ones
    llama_h2o_probe_type probe = llama_h2o_probe_type::none;

    // of the expected query
    uint32_t n_horizon = 0;     // tokens ahead
    bool covariance    = false; // whether the spread of the queries counts

    uint32_t n_near  = 0;                      // attention from so few tokens away does not count
    double half_life = 0;                      // tokens after which attention counts for half; 0: it never fades
    bool weighs() const { return n_near > 0; } // whether a query's attention counts by its position

    llama_h2o_scope scope = llama_h2o_scope::head;

    // what is left of attention n_tokens later
    double remaining(int64_t n_tokens) const;
};

// The policy of a text that names it with all its parameters.
//   n_recent   the recent window. Only there all heads have the same rows, so that a policy looks at no more of the last
//              queries, and calls nothing near that lies further back
// Throws llama_h2o_policy_error, see h2o-policy-text.h.
std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(const std::string & text, uint32_t n_recent);

//
// for policies
//

// A number in (0, 1) drawn for a row, the same at every compaction.
double llama_h2o_draw(uint64_t seed, uint32_t il, uint32_t head, int32_t pos);

// Competing rows in the order of the text.
std::vector<uint32_t> llama_h2o_in_text_order(const llama_h2o_head_rows & rows);

// Above every position of a text, and above all that a policy measures.
constexpr double LLAMA_H2O_SAFE_SCORE = 0x1p31;

// Gives the n competing rows with the highest rank the safe score; of equal ones to the newer.
void llama_h2o_make_safe(const llama_h2o_head_rows & rows, const double * rank, size_t n, double * score);
