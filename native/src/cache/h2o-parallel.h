// Parallel loops on the host.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

// Calls fn(i) for all i < n on at most n_threads threads; all calls together read n_rows rows. Rethrows the first exception;
// other calls may then be skipped.
template <typename F>
void llama_h2o_parallel(size_t n, size_t n_rows, size_t n_threads, F fn) {
    // ggml's threads busy-wait after a graph, so a new thread needs some milliseconds before it gets a core
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
        // fewer threads are enough
    }
    work();
    for (auto & thread : threads) {
        thread.join();
    }

    if (error) {
        std::rethrow_exception(error);
    }
}
