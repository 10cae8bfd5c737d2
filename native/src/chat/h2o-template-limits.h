// Resource limits of chat templates: these are programs from model files, which can use unlimited time, memory and stack.

#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

struct h2o_template_limits {
    int64_t steps = INT64_MAX; // executed nodes and loop items
    int64_t bytes = INT64_MAX; // of new values
    int depth     = INT_MAX;   // of nested calls

    const char * error = "";

    // Throws once a limit is reached, and on every later call.
    void take(int64_t n_steps, int64_t n_bytes = 0) {
        steps = n_steps > steps ? -1 : steps - n_steps;
        bytes = n_bytes > bytes ? -1 : bytes - n_bytes;
        if (steps < 0 || bytes < 0) {
            throw std::runtime_error(error);
        }
    }

    // Counts the result of a node. Large results also count as steps, because most operations iterate over them.
    template <typename T>
    void take_result(const T & result) {
        size_t size = result->val_arr.size() * sizeof(result);
        for (const auto & part : result->val_str.parts) {
            size += sizeof(part) + part.val.size();
        }
        const bool is_new = result.use_count() == 1;
        take(1 + int64_t(size / 256), is_new ? int64_t(size) : 0);
    }
};

// Limits of the template that runs in this thread.
inline thread_local h2o_template_limits h2o_limits;

// A nested call, until the end of the scope.
struct h2o_nested_call {
    h2o_nested_call() {
        h2o_limits.take(h2o_limits.depth > 0 ? 0 : INT64_MAX);
        h2o_limits.depth--;
    }

    ~h2o_nested_call() { h2o_limits.depth++; }
};
