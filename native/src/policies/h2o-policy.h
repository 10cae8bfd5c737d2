// Eviction policies: they score rows, independent of how rows are stored and moved. Built-in policies are in h2o-policies.cpp;
// all others score rows through the C interface (llama_h2o_scorer).

#pragma once

#include "llama-h2o.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

// An invalid policy text or scorer; what() is the reason.
struct llama_h2o_policy_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class llama_h2o_policy {
public:
    virtual ~llama_h2o_policy() = default;

    std::string text; // name and all parameters, which identify the policy in states

    const llama_h2o_scorer * scorer = nullptr; // null: built-in

    // rows with higher scores are kept; only scores of competing rows are used. Throws std::exception if a scorer fails
    virtual void score(const llama_h2o_head_rows & rows, double * score) const = 0;

    //
    // its input
    //

    uint32_t needs        = 0; // llama_h2o_needs
    uint32_t n_queries    = 0; // the last ones
    uint32_t n_near       = 0; // attention over a shorter distance is not collected
    double half_life      = 0; // tokens after which attention counts half; 0: no decay
    llama_h2o_scope scope = LLAMA_H2O_SCOPE_HEAD;

    bool has_need(llama_h2o_needs need) const { return (needs & need) != 0; }

    // whether the weight of attention depends on the position of the query
    bool weighs() const { return n_near > 0; }

    // if scores are the collected attention divided by a function of the number of queries that could attend to the row: that
    // function, so that devices can choose rows. Otherwise 0
    virtual double divisor(double) const { return 0.0; }

    // decay factor of attention after n_tokens
    double remaining(int64_t n_tokens) const;
};

// Creates a built-in policy from its text, with all parameters.
//   n_recent   the recent window, the limit of the policy's last queries and near distance: older rows differ between heads
// Throws llama_h2o_policy_error.
std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(const std::string & text, uint32_t n_recent);

// Creates a policy from a scorer, which it copies. Throws llama_h2o_policy_error.
std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(
        const std::string & text, const llama_h2o_scorer & scorer, uint32_t n_recent);
