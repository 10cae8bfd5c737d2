// Adapts the number of threads of a graph to other load. ggml's threads busy-wait for each other after every node: if one of them
// shares its core with another program, all wait while it is descheduled, and fewer threads are faster.
//
// This shows in the processor time: running and waiting threads use all of the elapsed time, a descheduled thread does not. If
// processor time is missing, the number of threads decreases by one; from time to time one more is tried.

#pragma once

struct llama_context;

class llama_h2o_threads {
public:
    // The number of threads to use, out of n_asked, at time `now` in seconds.
    int choose(int n_asked, double now);

    // Reports a graph: its threads, its elapsed time and its processor time, in seconds.
    void add(int n_threads, double passed, double used, double now);

private:
    static constexpr double WINDOW    = 0.1;  // s of measurement; the clock of the system has steps of some ms
    static constexpr double MISSING   = 0.25; // threads
    static constexpr double MIN_PAUSE = 0.25; // s before one more thread is tried
    static constexpr double MAX_PAUSE = 4.0;

    int n_fewer     = 0;
    double pause    = MIN_PAUSE;
    double next_try = 0.0;

    // since the last change
    double passed = 0.0;
    double used   = 0.0;
};

// Exists while a graph is computed or queued. May lower its number of threads, but not without our attention, whose results do
// not depend on the number of threads, or if devices compute and the processor waits. Then queues copies of what the graph sums up
// on devices.
class llama_h2o_thread_watch {
public:
    llama_h2o_thread_watch(const llama_context & ctx, int & n_threads);
    ~llama_h2o_thread_watch();

    llama_h2o_thread_watch(const llama_h2o_thread_watch &)             = delete;
    llama_h2o_thread_watch & operator=(const llama_h2o_thread_watch &) = delete;

private:
    const llama_context & ctx;
    llama_h2o_threads * threads = nullptr; // null: not adapted

    int n_threads = 0;
    double passed = 0.0; // clocks at the start of the graph
    double used   = 0.0;
};
