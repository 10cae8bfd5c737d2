#include "cache/h2o-state-recall.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-parts.h"
#include "cache/h2o-recall.h"
#include "cache/h2o-state-checks.h"

#include <algorithm>
#include <cmath>
#include <limits>

// Without gaps, so that every byte that is written has a value.
struct recall_head {
    uint32_t n_question; // queries of the ring
    uint32_t n_tokens;   // whose ids are kept, because they are not archived yet
    uint32_t n_rows;     // of every head
    uint32_t n_spans;    // that they are from
    double hidden;
    double missed;
};

void llama_h2o_write_recall(llama_h2o_state_writer & out, const llama_h2o_stream & st) {
    if (!st.archive) {
        return;
    }

    const auto & recalled = st.recalled;

    st.archive->write_state([&](const void * data, size_t size) { out.write(data, size); }, st.archive_in_states);
    out.write(recall_head {
            uint32_t(st.question.size()),
            uint32_t(st.tokens.size()),
            uint32_t(recalled.cells.size()),
            uint32_t(recalled.spans.size()),
            recalled.hidden,
            recalled.missed,
    });
    out.write(st.question.slots());
    out.write(st.tokens);
    out.write(recalled.spans);
    out.write(recalled.cells);
    out.write(recalled.pos);
}

// Sums of many probabilities are rounded.
static bool is_share(double x) {
    return x >= 0.0 && x <= 1.001;
}

// Returns how many tokens it held when it was written: some may be missing in its file by now.
static int32_t read_archive(llama_h2o_state_reader & in, llama_h2o_parts & parts, uint32_t s) {
    const auto & st = parts.streams[s];

    const int32_t n_missing = st.archive->read_state([&](void * data, size_t size) { in.read(data, size); });
    if (n_missing > 0) {
        llama_h2o_note_lost_rows(parts, s, n_missing);
    }

    return st.archive->next() - st.archive->first() + n_missing;
}

void llama_h2o_read_recall(llama_h2o_state_reader & in, llama_h2o_parts & parts, uint32_t s) {
    auto & st = parts.streams[s];
    if (!st.archive) {
        return;
    }

    const int32_t n_archived = read_archive(in, parts, s);

    recall_head head;
    in.read(head);
    llama_h2o_expect(head.n_question == st.question.size() && head.n_rows <= parts.params.recall &&
                             head.n_spans <= uint32_t(n_archived) && (head.n_rows > 0) == (head.n_spans > 0) &&
                             head.n_tokens <= parts.n_capacity() && is_share(head.hidden) && is_share(head.missed),
            "counts that are out of range");

    std::vector<llama_h2o_query_slot> question(head.n_question);
    in.read(question);
    st.question.set_slots(question);

    st.tokens.resize(head.n_tokens);
    in.read(st.tokens);

    auto & recalled = st.recalled;
    recalled.cells.resize(head.n_rows);
    recalled.pos.resize(size_t(head.n_rows) * parts.n_heads());
    recalled.hidden = head.hidden;
    recalled.missed = head.missed;
    in.read(recalled.spans, head.n_spans);
    in.read(recalled.cells);
    in.read(recalled.pos);
}

void llama_h2o_take_recalled_cells(llama_h2o_parts & parts, uint32_t s, uint32_t n_span) {
    const auto & recalled = parts.streams[s].recalled.cells;

    for (size_t i = 0; i < recalled.size(); ++i) {
        llama_h2o_expect(recalled[i] < n_span && parts.cells[s].is_empty(recalled[i]) &&
                                 (i == 0 || recalled[i] > recalled[i - 1]),
                "a cell that is out of range");
        llama_h2o_take_recalled_cell(parts, s, recalled[i]);
    }
}

// Rows are copied again by their positions, so that the spans must hold them.
static void check_recalled(const llama_h2o_parts & parts, uint32_t s) {
    const auto & archive  = *parts.streams[s].archive;
    const auto & recalled = parts.streams[s].recalled;

    int32_t end = 0;
    for (const auto & span : recalled.spans) {
        llama_h2o_expect(span.p0 >= end && span.p1 > span.p0 && span.p1 <= archive.next() && std::isfinite(span.weight),
                "recalled spans that are out of order");
        end = span.p1;
    }
    for (uint32_t h = 0; h < parts.n_heads(); ++h) {
        const int32_t * pos = recalled.pos.data() + h * recalled.cells.size();

        auto span = recalled.spans.begin();
        for (size_t i = 0; i < recalled.cells.size(); ++i) {
            span = std::find_if(span, recalled.spans.end(), [&](const auto & one) { return pos[i] < one.p1; });

            const bool is_in_span = span != recalled.spans.end() && pos[i] >= span->p0;
            llama_h2o_expect(is_in_span && (i == 0 || pos[i] > pos[i - 1]), "recalled rows that are out of order");
        }
    }
}

// A key was rotated to its position less what re-bases had taken off by then. Rows that were computed again may have more
// taken off than the text has now, but from there to any of the n_pos positions must be a number.
static void check_shifts(const llama_h2o_archive & archive, uint32_t n_pos) {
    static constexpr int64_t MAX_TURN = std::numeric_limits<int32_t>::max();

    for (int32_t p = archive.first(); p < archive.next(); ++p) {
        const int64_t shift = archive.shift(p);
        llama_h2o_expect(shift >= 0 && shift - p + n_pos <= MAX_TURN, "an archive of positions that are out of range");
    }
}

void llama_h2o_check_recall(const llama_h2o_parts & parts, uint32_t s, int32_t shift, int32_t pos_removable) {
    const auto & st = parts.streams[s];
    if (!st.archive) {
        return;
    }

    const int32_t newest = parts.cells.newest(s);

    llama_h2o_expect_queries(st.question.slots(), newest, shift);
    llama_h2o_expect(st.archive->next() <= newest + 1, "an archive that goes on behind the text");
    llama_h2o_expect(st.archive->next() <= std::max(0, pos_removable - 1), "an archive of tokens that are recent");
    // None are kept any more where the archive could not be written; another archive begins with what is recent.
    const int32_t next  = std::max(st.archive->next(), pos_removable - 1); // as llama_h2o_next_to_archive() has it soon
    const bool is_whole = st.archive->next() == next || st.archive->first() == st.archive->next();
    llama_h2o_expect(st.tokens.empty() || (is_whole && newest + 1 - next == int32_t(st.tokens.size())),
            "an archive that ends before the tokens behind it");
    check_shifts(*st.archive, parts.params.n_pos);
    check_recalled(parts, s);
}
