#include "policies/h2o-policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <locale>
#include <map>
#include <sstream>
#include <vector>

double llama_h2o_policy::remaining(int64_t n_tokens) const {
    return half_life > 0.0 ? std::exp2(-double(n_tokens) / half_life) : 1.0;
}

namespace {

// queries that could attend to a row, including its own token
double n_seen(const llama_h2o_head_rows & rows, uint32_t i) {
    return double(rows.newest - rows.pos[i] + 1);
}

// H2O as in the authors' implementation (h2o_hf/utils_real_drop): the collected attention of a row. With a half-life, it halves
// every so many tokens.
struct h2o_sum : llama_h2o_policy {
    explicit h2o_sum(double half_life) {
        needs           = LLAMA_H2O_NEEDS_ATTENTION;
        this->half_life = half_life;
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        std::copy_n(rows.attention, rows.n_rows, score);
    }

    double divisor(double) const override { return 1.0; }
};

// The mean collected attention per query that could attend to the row, so that age is no advantage.
struct h2o_mean : llama_h2o_policy {
    h2o_mean() { needs = LLAMA_H2O_NEEDS_ATTENTION; }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = rows.attention[i] / n_seen(rows, i);
        }
    }

    double divisor(double n_seen) const override { return n_seen; }
};

// The weighted mean of the attention from queries that are not near; older queries have less weight.
struct h2o_far final : llama_h2o_policy {
    h2o_far(uint32_t n_near, double half_life) : rate(std::log(2.0) / half_life), norm(std::expm1(-rate)) {
        needs           = LLAMA_H2O_NEEDS_ATTENTION;
        this->n_near    = n_near;
        this->half_life = half_life;

        for (size_t n = 0; n < N_KNOWN; ++n) {
            known[n] = weigh(double(n));
        }
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            // half of all rows are recent, and divisions would be a third of the time of a compaction
            const bool competes = rows.standing[i] == LLAMA_H2O_COMPETING;

            score[i] = competes ? rows.attention[i] / divisor(n_seen(rows, i)) : 0.0;
        }
    }

    // total weight of n_seen queries; at least one, for rows without distant queries
    double divisor(double n_seen) const override {
        const double n = std::max(n_seen - n_near, 1.0);

        return n < N_KNOWN ? known[size_t(n)] : weigh(n);
    }

    double weigh(double n) const { return std::expm1(-n * rate) / norm; }

    const double rate; // of the decay, per token
    const double norm; // so that the latest query has weight one

    // cached: most rows are not older, and there are up to a thousand heads
    static constexpr size_t N_KNOWN = 16384;
    std::vector<double> known       = std::vector<double>(N_KNOWN);
};

// StreamingLLM: attention sinks and a window.
struct streaming : llama_h2o_policy {
    explicit streaming(uint32_t n_sinks) : n_sinks(n_sinks) {}

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = uint32_t(rows.pos[i]) < n_sinks ? SAFE_SCORE : double(rows.pos[i]);
        }
    }

    static constexpr double SAFE_SCORE = 0x1p31; // above every position

    const uint32_t n_sinks;
};

// A policy of the caller.
struct scored_outside : llama_h2o_policy {
    scored_outside(const llama_h2o_scorer & scorer, uint32_t n_recent) : own(scorer) {
        this->scorer = &own;

        needs = own.needs;
        if (has_need(LLAMA_H2O_NEEDS_SQUARES)) {
            needs |= LLAMA_H2O_NEEDS_ATTENTION;
        }
        n_queries = std::min(own.n_queries, n_recent);
        n_near    = std::min(own.n_near, n_recent);
        half_life = own.half_life;
        scope     = llama_h2o_scope(own.scope);
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        if (!own.score(own.data, &rows, score)) {
            throw std::runtime_error("the scorer of policy " + text + " failed");
        }
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            // llama_h2o_get_rows() returns scores as floats
            const bool is_number = std::abs(score[i]) <= double(std::numeric_limits<float>::max());
            if (rows.standing[i] == LLAMA_H2O_COMPETING && !is_number) {
                throw std::runtime_error("a score of the policy " + text + " is infinite or NaN");
            }
        }
    }

    const llama_h2o_scorer own;
};

// Parses a text such as `h2o-far:near=64,half_life=384`, as written by pyh2o/policies. It must contain all parameters: defaults
// are in Python.
class policy_text {
public:
    explicit policy_text(const std::string & text) {
        std::istringstream in(text);
        in.imbue(std::locale::classic());
        in >> std::noskipws;
        std::getline(in, name, ':');

        std::string parameter;
        double value = 0.0;
        while (std::getline(in, parameter, '=')) {
            in >> value;
            const bool is_number =
                    !in.fail() && (in.peek() == std::istringstream::traits_type::eof() || in.get() == ',');
            if (!is_number || !values.emplace(parameter, value).second) {
                fail(parameter + " is no number, or given twice");
            }
        }
    }

    // limited to 32 bits, like positions
    uint32_t count(const char * parameter, double least) {
        const double value = number(parameter, least);
        if (value > std::numeric_limits<int32_t>::max() || value != std::floor(value)) {
            fail(std::string(parameter) + " is out of its limits");
        }

        return uint32_t(value);
    }

    double number(const char * parameter, double least) {
        const auto it = values.find(parameter);
        if (it == values.end() || !(it->second >= least)) {
            fail(std::string(parameter) + " is missing or out of its limits");
        }

        const double value = it->second;
        values.erase(it);

        return value;
    }

    double half_life() { return number("half_life", std::numeric_limits<double>::denorm_min()); }

    // Returns the policy after checking that all parameters were read.
    std::unique_ptr<llama_h2o_policy> made(std::unique_ptr<llama_h2o_policy> policy) const {
        if (!values.empty()) {
            fail("it has no parameter " + values.begin()->first);
        }

        return policy;
    }

    [[noreturn]] void fail(const std::string & what) const {
        throw llama_h2o_policy_error("policy " + name + ": " + what);
    }

    std::string name;

private:
    std::map<std::string, double> values; // not read yet
};

std::unique_ptr<llama_h2o_policy> make_policy(policy_text text, uint32_t n_recent) {
    if (text.name == "h2o") {
        return text.made(std::make_unique<h2o_sum>(0.0));
    }
    if (text.name == "h2o-mean") {
        return text.made(std::make_unique<h2o_mean>());
    }
    if (text.name == "h2o-decay") {
        return text.made(std::make_unique<h2o_sum>(text.half_life()));
    }
    if (text.name == "h2o-far") {
        const uint32_t n_near = std::min(text.count("near", 1), n_recent);

        return text.made(std::make_unique<h2o_far>(n_near, text.half_life()));
    }
    if (text.name == "streaming") {
        return text.made(std::make_unique<streaming>(text.count("sinks", 0)));
    }
    text.fail("there is none");
}

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(const std::string & text, uint32_t n_recent) {
    std::unique_ptr<llama_h2o_policy> policy = make_policy(policy_text(text), n_recent);

    policy->text = text;

    return policy;
}

std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(
        const std::string & text, const llama_h2o_scorer & scorer, uint32_t n_recent) {
    constexpr uint32_t OF_QUERIES = LLAMA_H2O_NEEDS_QUERY_ATTENTION | LLAMA_H2O_NEEDS_QUERIES;

    const bool asks_nobody = (scorer.needs & OF_QUERIES) != 0 && scorer.n_queries == 0;

    if (!scorer.score || asks_nobody || scorer.scope < LLAMA_H2O_SCOPE_HEAD || scorer.scope > LLAMA_H2O_SCOPE_CACHE ||
            !std::isfinite(scorer.half_life) || scorer.half_life < 0.0) {
        throw llama_h2o_policy_error("policy " + text + ": its scorer is incomplete, or a value is out of range");
    }

    std::unique_ptr<llama_h2o_policy> policy = std::make_unique<scored_outside>(scorer, n_recent);

    policy->text = text;

    return policy;
}
