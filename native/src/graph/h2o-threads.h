// How many threads compute a graph. ggml's threads wait for each other after every node, actively: where one of them
// shares its core with another program, all wait whenever that one may not run, and fewer are faster.
//
// It shows in the processor time: threads that compute or wait take all of the time that passes, the one that may not
// run does not. So where time is missing there is a thread less, and now and then one is tried again.

#pragma once

struct llama_context;

class llama_h2o_threads {
public:
    // Of n_asked, at `now` in seconds.
    int choose(int n_asked, double now);

    // After a graph: the threads that computed it, and the seconds that passed and that the processor was used for it.
    void add(int n_threads, double passed, double used, double now);

private:
    static constexpr double WINDOW    = 0.1;  // s, that are looked at; the system counts in steps of some ms
    static constexpr double MISSING   = 0.25; // processors
    static constexpr double MIN_PAUSE = 0.25; // s, before one more is tried
    static constexpr double MAX_PAUSE = 4.0;

    int n_fewer     = 0;
    double pause    = MIN_PAUSE;
    double next_try = 0.0;

    // since the number changed
    double passed = 0.0;
    double used   = 0.0;
};

// While a graph is computed: may lower the threads that were asked for. Results do not depend on them, so it does nothing
// where our attention is not used, nor where devices compute and the processor waits.
class llama_h2o_thread_watch {
public:
    llama_h2o_thread_watch(const llama_context & ctx, int & n_threads);
    ~llama_h2o_thread_watch();

    llama_h2o_thread_watch(const llama_h2o_thread_watch &)             = delete;
    llama_h2o_thread_watch & operator=(const llama_h2o_thread_watch &) = delete;

private:
    llama_h2o_threads * threads = nullptr; // null: not watched

    int n_threads = 0;
    double passed = 0.0; // clocks, when the graph began
    double used   = 0.0;
};
