// The eviction policy: what a row is worth, apart from where rows lie and how they move. Those that run in the library are
// in h2o-policies.cpp; all others score rows through the C interface (llama_h2o_scorer).

#pragma once

#include "llama-h2o.h"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

// A text or a scorer that no policy can be made of; what() says why.
struct llama_h2o_policy_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class llama_h2o_policy {
public:
    virtual ~llama_h2o_policy() = default;

    std::string text; // by which it is found again: its name and all parameters

    const llama_h2o_scorer * scorer = nullptr; // its own, if it is outside of the library

    // higher is kept; only competing rows matter. Throws std::exception if it is outside
    virtual void score(const llama_h2o_head_rows & rows, double * score) const = 0;

    //
    // what it has to know
    //

    uint32_t needs        = 0; // llama_h2o_needs
    uint32_t n_queries    = 0; // the last ones
    uint32_t n_near       = 0; // attention from so few tokens away does not count
    double half_life      = 0; // tokens after which attention counts for half; 0: it never fades
    llama_h2o_scope scope = LLAMA_H2O_SCOPE_HEAD;

    bool has_need(llama_h2o_needs need) const { return (needs & need) != 0; }

    // whether a query's attention counts by its position
    bool weighs() const { return n_near > 0; }

    // where a score is nothing but the collected attention, divided by a number for how many queries could see the row: that
    // number, so that devices can choose. 0 where it is not
    virtual double divisor(double) const { return 0.0; }

    // what is left of attention n_tokens later
    double remaining(int64_t n_tokens) const;
};

// The policy of a text that names it with all its parameters.
//   n_recent   the recent window. Only there all heads have the same rows, so that a policy looks at no more of the last
//              queries, and calls nothing near that lies further back
// Throws llama_h2o_policy_error.
std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(const std::string & text, uint32_t n_recent);

// The one behind a scorer, of which it has a copy. Throws likewise.
std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(
        const std::string & text, const llama_h2o_scorer & scorer, uint32_t n_recent);
