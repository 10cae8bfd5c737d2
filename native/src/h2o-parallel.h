// Work of the host that is split over threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

// How many threads of n_threads have enough to do. Those of ggml wait actively for a while after a graph, so another one
// needs some milliseconds until it is of use.
inline size_t llama_h2o_useful_threads(size_t n_rows, size_t n_threads) {
    static constexpr size_t ROWS_PER_THREAD = 1 << 17;

    return std::clamp<size_t>(n_rows / ROWS_PER_THREAD, 1, std::max<size_t>(n_threads, 1));
}

// Calls fn(i) for all i below n, on n_threads threads at most. Rethrows the first exception; some calls may then be left
// out.
template <typename F>
void llama_h2o_parallel(size_t n, size_t n_threads, F fn) {
    std::atomic<size_t> next { 0 };
    std::mutex mutex;
    std::exception_ptr error;

    const auto work = [&] {
        try {
            for (size_t i = next++; i < n; i = next++) {
                fn(i);
            }
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex);
            error = error ? error : std::current_exception();
        }
    };

    std::vector<std::thread> threads;
    threads.reserve(n_threads);
    try {
        for (size_t i = 1; i < std::min(n, n_threads); ++i) {
            threads.emplace_back(work);
        }
    } catch (const std::system_error &) {
        // fewer will do
    }
    work();
    for (auto & thread : threads) {
        thread.join();
    }

    if (error) {
        std::rethrow_exception(error);
    }
}
