// All policies. A new one is a file beside this one, and a line here.

#pragma once

#include "policies/h2o-policy-text.h"
#include "policies/h2o-policy.h"

// what users call it, and the function in its file that makes it of its parameters
#define LLAMA_H2O_POLICIES(X)               \
    X("h2o", llama_h2o_new_sum)             \
    X("h2o-mean", llama_h2o_new_mean)       \
    X("h2o-decay", llama_h2o_new_decay)     \
    X("h2o-far", llama_h2o_new_far)         \
    X("h2o-layer", llama_h2o_new_layer)     \
    X("h2o-cells", llama_h2o_new_cells)     \
    X("roco", llama_h2o_new_roco)           \
    X("tova", llama_h2o_new_tova)           \
    X("snap", llama_h2o_new_snap)           \
    X("nacl", llama_h2o_new_nacl)           \
    X("keydiff", llama_h2o_new_keydiff)     \
    X("expected", llama_h2o_new_expected)   \
    X("streaming", llama_h2o_new_streaming) \
    X("random", llama_h2o_new_random)

using llama_h2o_policy_maker = std::unique_ptr<llama_h2o_policy>(llama_h2o_policy_text & text, uint32_t n_recent);

#define LLAMA_H2O_DECLARE(name, make) llama_h2o_policy_maker make;
LLAMA_H2O_POLICIES(LLAMA_H2O_DECLARE)
#undef LLAMA_H2O_DECLARE
