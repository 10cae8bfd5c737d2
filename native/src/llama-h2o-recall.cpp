#include "llama-h2o-calls.h"

#include "cache/h2o-recall.h"

#include <algorithm>
#include <stdexcept>

// Calls fn(parts, stream) of a sequence that has an archive.
template <typename F>
static int32_t with_archive(llama_context * ctx, int32_t seq_id, F fn) {
    return llama_h2o_with_eviction(ctx, [&](llama_h2o & h2o) -> int32_t {
        if (!llama_h2o_has_seq(*llama_h2o::cache_of(ctx), seq_id)) {
            return LLAMA_H2O_ERR_ARGUMENT;
        }

        const uint32_t s = h2o.stream_of(seq_id);

        return h2o.parts.streams[s].archive ? fn(h2o.parts, s) : LLAMA_H2O_ERR_NO_ARCHIVE;
    });
}

int32_t llama_h2o_recall(llama_context * ctx, int32_t seq_id, uint32_t n_rows, uint32_t n_asking) {
    if (n_asking == 0) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        const auto & st = parts.streams[s];

        // all cells are the text's for the while
        if (llama_h2o::of(ctx)->is_enlarged()) {
            return LLAMA_H2O_ERR_ENLARGED;
        }
        if (st.archive->next() > st.archive->first() && st.question.find_last(1, 1).empty()) {
            return LLAMA_H2O_ERR_NO_QUERIES;
        }

        return int32_t(llama_h2o_recall_rows(parts, s, n_rows, n_asking));
    });
}

int32_t llama_h2o_drop_recalled(llama_context * ctx, int32_t seq_id) {
    return with_archive(ctx, seq_id, [](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        llama_h2o_drop_rows(parts, s);

        return LLAMA_H2O_OK;
    });
}

int32_t llama_h2o_get_recalled(llama_context * ctx, int32_t seq_id, llama_h2o_recalled_span * spans, uint32_t n_spans) {
    if (n_spans > 0 && !spans) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) {
        const auto & all = parts.streams[s].recalled.spans;
        for (size_t i = 0; i < all.size() && i < n_spans; ++i) {
            spans[i] = { all[i].p0, all[i].p1, all[i].weight };
        }

        return int32_t(all.size());
    });
}

// Calls fn(stream); what is wrong with the file is kept in one line.
template <typename F>
static int32_t change_archive(llama_context * ctx, int32_t seq_id, F fn) {
    return with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        auto & st = parts.streams[s];
        try {
            fn(st);
        } catch (const std::runtime_error & err) {
            st.archive_trouble = err.what();
            return LLAMA_H2O_ERR_ARCHIVE_FILE;
        }

        return LLAMA_H2O_OK;
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
    return with_archive(ctx, seq_id, [](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        llama_h2o_drop_rows(parts, s);
        parts.streams[s].archive->close_file();
        parts.streams[s].archive_trouble.clear();

        return LLAMA_H2O_OK;
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

int32_t llama_h2o_archive_lost(llama_context * ctx, int32_t seq_id, llama_h2o_lost_rows * lost) {
    if (!lost) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) {
        const auto rows = parts.streams[s].archive->lost();

        *lost = { rows.begin, rows.p0, rows.p1 };

        return rows.p1 - rows.p0;
    });
}

int32_t llama_h2o_archive_restore(llama_context * ctx, int32_t seq_id, llama_h2o_lost_rows lost) {
    return change_archive(
            ctx, seq_id, [&](llama_h2o_stream & st) { st.archive->restore({ lost.begin, lost.p0, lost.p1 }); });
}

const char * llama_h2o_archive_trouble(llama_context * ctx, int32_t seq_id) {
    const char * res = "";
    with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        res = parts.streams[s].archive_trouble.c_str();

        return LLAMA_H2O_OK;
    });

    return res;
}
