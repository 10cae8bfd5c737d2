#include "policies/h2o-policy-list.h"

std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(const std::string & text, uint32_t n_recent) {
#define ENTRY(name, make) { name, make },
    static const std::map<std::string, llama_h2o_policy_maker *> makers = { LLAMA_H2O_POLICIES(ENTRY) };
#undef ENTRY

    llama_h2o_policy_text parameters(text);

    const auto entry = makers.find(parameters.name());
    if (entry == makers.end()) {
        throw llama_h2o_policy_error("there is no policy " + parameters.name());
    }

    std::unique_ptr<llama_h2o_policy> policy = entry->second(parameters, n_recent);

    policy->text = parameters.canonical();

    return policy;
}
