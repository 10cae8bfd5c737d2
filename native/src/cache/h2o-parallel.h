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

// Calls fn(i) for all i below n, which together look at n_rows rows, on n_threads threads at most. Rethrows the first
// exception; some calls may then be left out.
template <typename F>
void llama_h2o_parallel(size_t n, size_t n_rows, size_t n_threads, F fn) {
    // ggml's threads wait actively for a while after a graph, so another one needs some milliseconds until it is of use
    static constexpr size_t ROWS_PER_THREAD = 1 << 17;

    n_threads = std::min({ n, n_rows / ROWS_PER_THREAD, n_threads });

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
        for (size_t i = 1; i < n_threads; ++i) {
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
