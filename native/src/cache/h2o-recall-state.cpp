#include "cache/h2o-parts.h"
#include "cache/h2o-state-io.h"
#include "cache/h2o-state.h"

#include <algorithm>
#include <cmath>
#include <string>

void llama_h2o_write_recall(llama_h2o_state_writer & out, const llama_h2o_stream & st) {
    if (!st.archive) {
        return;
    }

    st.archive->write_state([&](const void * data, size_t size) { out.write(data, size); });
    out.write(uint32_t(st.tokens.size()));
    out.write(st.tokens);

    const llama_h2o_gains gains = st.index->gains();
    out.write(gains.n_tokens);
    out.write(gains.squares);
    out.write(gains.page);
    out.write(uint32_t(gains.interest.size()));
    out.write(gains.interest);
}

void llama_h2o_read_recall(llama_h2o_state_reader & in, llama_h2o_parts & parts, uint32_t s) {
    auto & st = parts.streams[s];
    if (!st.archive) {
        return;
    }

    st.index->suspend();
    const int32_t n_missing = st.archive->read_state([&](void * data, size_t size) { in.read(data, size); });
    if (n_missing > 0) {
        st.archive_error = "the archive's file lacks rows, or they are damaged: " + std::to_string(n_missing) +
                           " tokens before position " + std::to_string(st.archive->first()) +
                           " cannot be found any more";
    }

    uint32_t n_tokens;
    in.read(n_tokens);
    llama_h2o_expect(n_tokens <= parts.n_capacity(), "counts that are out of range");
    st.tokens.resize(n_tokens);
    in.read(st.tokens);

    llama_h2o_gains gains = st.index->gains();
    in.read(gains.n_tokens);
    in.read(gains.squares);
    uint32_t n_passages;
    in.read(gains.page);
    in.read(n_passages);
    gains.interest.clear();
    while (gains.interest.size() <
            n_passages) { // one at a time: if the count is wrong, reading fails at the end of the state before much memory is allocated
        double x;
        in.read(x);
        gains.interest.push_back(x);
    }
    for (const auto * sums : { &gains.squares, &gains.interest }) {
        llama_h2o_expect(std::all_of(sums->begin(), sums->end(), [](double x) { return std::isfinite(x) && x >= 0.0; }),
                "gains that are negative or not finite");
    }
    st.index->set_gains(gains);
}

void llama_h2o_expect_recall(const llama_h2o_parts & parts, uint32_t s, int32_t pos_removable) {
    const auto & st = parts.streams[s];
    if (!st.archive) {
        return;
    }

    const int32_t newest = parts.cells.newest(s);

    llama_h2o_expect(st.archive->next() <= newest + 1, "an archive beyond the end of the text");
    llama_h2o_expect(st.archive->next() <= std::max(0, pos_removable - 1), "an archive of tokens that are recent");
    // If archiving has stopped, no tokens are recorded; a new archive starts with the recent ones.
    const int32_t next =
            std::max(st.archive->next(), pos_removable - 1); // result of llama_h2o_next_to_archive() afterwards
    const bool is_whole = st.archive->next() == next || st.archive->first() == st.archive->next();
    llama_h2o_expect(st.tokens.empty() || (is_whole && newest + 1 - next == int32_t(st.tokens.size())),
            "a gap between the archive and the tokens after it");
}
