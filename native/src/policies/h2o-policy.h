// The eviction policy: what a row is worth, apart from where rows lie and how they move. One small file each in policies/.

#pragma once

#include "llama-h2o.h"

#include "policies/h2o-selection.h"

#include <cstddef>
#include <cstdint>
#include <memory>
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

    // higher is kept; only competing rows matter
    virtual void score(const llama_h2o_head_rows & rows, double * score) const = 0;

    //
    // what it has to know
    //

    bool attention = false;
    bool squares   = false;

    uint32_t n_queries         = 0; // the last ones
    llama_h2o_probe_type probe = llama_h2o_probe_type::none;

    uint32_t n_near  = 0;                      // attention from so few tokens away does not count
    double half_life = 0;                      // tokens after which attention counts for half; 0: it never fades
    bool weighs() const { return n_near > 0; } // whether a query's attention counts by its position

    llama_h2o_scope scope = llama_h2o_scope::head;

    // what is left of attention n_tokens later
    double remaining(int64_t n_tokens) const;
};

// LLAMA_H2O_OK, or why the parameters make no sense.
int32_t llama_h2o_check_policy(const llama_h2o_policy_params & params);

// The parameters that the policy looks at; the others are 0.
llama_h2o_policy_params llama_h2o_own_params(const llama_h2o_policy_params & params);

std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(const llama_h2o_params & params);

// one for each llama_h2o_policy_type, in policies/
std::unique_ptr<llama_h2o_policy> llama_h2o_new_sum();
std::unique_ptr<llama_h2o_policy> llama_h2o_new_mean();
std::unique_ptr<llama_h2o_policy> llama_h2o_new_decay(double half_life);
std::unique_ptr<llama_h2o_policy> llama_h2o_new_far(uint32_t n_near, double half_life);
std::unique_ptr<llama_h2o_policy> llama_h2o_new_layer();
std::unique_ptr<llama_h2o_policy> llama_h2o_new_cells();
std::unique_ptr<llama_h2o_policy> llama_h2o_new_roco(double guard);
std::unique_ptr<llama_h2o_policy> llama_h2o_new_tova();
std::unique_ptr<llama_h2o_policy> llama_h2o_new_snap(uint32_t n_queries, uint32_t n_pool);
std::unique_ptr<llama_h2o_policy> llama_h2o_new_nacl(uint32_t n_queries, double random, uint64_t seed);
std::unique_ptr<llama_h2o_policy> llama_h2o_new_keydiff();
std::unique_ptr<llama_h2o_policy> llama_h2o_new_expected(uint32_t n_queries, double epsilon);
std::unique_ptr<llama_h2o_policy> llama_h2o_new_streaming(uint32_t n_sinks);
std::unique_ptr<llama_h2o_policy> llama_h2o_new_random(uint64_t seed);

//
// for policies
//

// A number in (0, 1) drawn for a row, the same at every compaction.
double llama_h2o_draw(uint64_t seed, uint32_t il, uint32_t head, int32_t pos);

// Competing rows in the order of the text.
std::vector<uint32_t> llama_h2o_in_text_order(const llama_h2o_head_rows & rows);

// Gives the n competing rows with the highest rank a score that no other beats; of equal ones to the newer.
void llama_h2o_make_safe(const llama_h2o_head_rows & rows, const double * rank, size_t n, double * score);
