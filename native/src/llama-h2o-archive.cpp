#include "llama-h2o-calls.h"

#include "cache/h2o-archiving.h"

#include <algorithm>
#include <stdexcept>

// Calls fn(parts, stream) of a sequence that has an archive.
template <typename F>
static int32_t with_archive(llama_context * ctx, int32_t seq_id, F fn) {
    return llama_h2o_with_stream(ctx, seq_id, [&](llama_h2o & h2o, uint32_t s) -> int32_t {
        return h2o.parts.streams[s].archive ? fn(h2o.parts, s) : LLAMA_H2O_ERR_NO_ARCHIVE;
    });
}

int32_t llama_h2o_get_found(llama_context * ctx, int32_t seq_id, int32_t p0, uint32_t n, double * weights) {
    if (p0 < 0 || (n > 0 && !weights)) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        parts.ctx.synchronize();
        for (uint32_t i = 0; i < n; ++i) {
            weights[i] = parts.streams[s].index->weight(int64_t(p0) + i);
        }

        return LLAMA_H2O_OK;
    });
}

int32_t llama_h2o_forget_found(llama_context * ctx, int32_t seq_id) {
    return with_archive(ctx, seq_id, [](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        parts.ctx.synchronize();
        parts.streams[s].forget_found();

        return LLAMA_H2O_OK;
    });
}

// Calls fn(stream); what is wrong with the file is kept in one line.
template <typename F>
static int32_t change_archive(llama_context * ctx, int32_t seq_id, F fn) {
    return with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        auto & st = parts.streams[s];

        int32_t res = LLAMA_H2O_OK;
        parts.ctx.synchronize();
        st.index->suspend();
        try {
            fn(st);
        } catch (const std::runtime_error & err) {
            st.archive_trouble = err.what();
            res                = LLAMA_H2O_ERR_ARCHIVE_FILE;
        }
        llama_h2o_update_index(parts, s); // its pages may lie elsewhere now

        return res;
    });
}

int32_t llama_h2o_archive_open(llama_context * ctx, int32_t seq_id, const char * path, const uint8_t * id) {
    if (!path || !id) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return change_archive(ctx, seq_id, [&](llama_h2o_stream & st) {
        llama_h2o_archive_id text;
        std::copy(id, id + text.size(), text.begin());

        st.archive->move_to_file(path, text);
        st.archive_trouble.clear();
    });
}

int32_t llama_h2o_archive_close(llama_context * ctx, int32_t seq_id) {
    return change_archive(ctx, seq_id, [](llama_h2o_stream & st) {
        st.archive->close_file();
        st.archive_trouble.clear();
    });
}

int32_t llama_h2o_archive_flush(llama_context * ctx, int32_t seq_id) {
    return change_archive(ctx, seq_id, [](llama_h2o_stream & st) {
        st.archive->flush();
        if (!st.archive->error().empty()) {
            throw std::runtime_error(st.archive->error());
        }
    });
}

int32_t llama_h2o_archive_in_states(llama_context * ctx, int32_t seq_id, bool all) {
    return change_archive(ctx, seq_id, [&](llama_h2o_stream & st) { st.archive_in_states = all; });
}

const char * llama_h2o_archive_trouble(llama_context * ctx, int32_t seq_id) {
    const char * res = "";
    with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        res = parts.streams[s].archive_trouble.c_str();

        return LLAMA_H2O_OK;
    });

    return res;
}
