#include "graph/h2o-threads.h"

#include "cache/h2o-cache.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <ctime>

int llama_h2o_threads::choose(int n_asked, double now) {
    if (n_fewer > 0 && now >= next_try) {
        --n_fewer;
        passed = used = 0.0;
        next_try      = now + pause;
    }

    return std::max(1, n_asked - n_fewer);
}

void llama_h2o_threads::add(int n_threads, double passed_now, double used_now, double now) {
    passed += passed_now;
    used   += used_now;
    if (n_threads == 1 || passed < WINDOW) {
        return;
    }

    const double n_missing = n_threads - used / passed;

    passed = used = 0.0;
    if (n_missing > MISSING) {
        n_fewer  += std::clamp(int(std::lround(n_missing)), 1, n_threads - 1);
        next_try  = now + pause;
        pause     = std::min(2 * pause, MAX_PAUSE);
    } else if (n_fewer == 0) {
        pause = MIN_PAUSE;
    }
}

static double seconds(clockid_t clock) {
    timespec res = {};
    clock_gettime(clock, &res);

    return double(res.tv_sec) + 1e-9 * double(res.tv_nsec);
}

static bool is_ours(const llama_h2o & h2o) {
    const auto & layers = h2o.parts.layers;

    return std::all_of(layers.begin(), layers.end(),
            [](const llama_h2o_layer & l) { return l.attention.fused && l.attention.kernel; });
}

llama_h2o_thread_watch::llama_h2o_thread_watch(const llama_context & ctx, int & n_threads) : ctx(ctx) {
    llama_h2o * h2o = llama_h2o::of(&ctx);
    if (!h2o || n_threads == 1 || ctx.get_model().n_devices() > 0 || !is_ours(*h2o)) {
        return;
    }

    threads = &h2o->parts.threads;
    passed  = seconds(CLOCK_MONOTONIC);
    used    = seconds(CLOCK_PROCESS_CPUTIME_ID);

    n_threads       = threads->choose(n_threads, passed);
    this->n_threads = n_threads;
}

llama_h2o_thread_watch::~llama_h2o_thread_watch() {
    if (threads) {
        const double now = seconds(CLOCK_MONOTONIC);

        threads->add(n_threads, now - passed, seconds(CLOCK_PROCESS_CPUTIME_ID) - used, now);
    }
    if (const llama_h2o * h2o = llama_h2o::of(&ctx)) {
        for (const auto & st : h2o->parts.streams) {
            if (st.index) {
                st.index->fetch();
            }
        }
    }
}
