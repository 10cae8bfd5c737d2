// The choice of what is recalled, for ctypes.

#include "recall/h2o-recall-choice.h"

#include <algorithm>

extern "C" {

// sizes: n_rows, n_group, n_blocks. Sinks are [n_group], or null for none; mass and weight are [n_blocks].
void weigh_blocks(const uint32_t * sizes,
        const float * hidden_max,
        const float * hidden_sum,
        const float * resident_max,
        const float * resident_sum,
        const float * sinks,
        float * mass,
        double * weight) {
    const size_t n_rows   = sizes[0];
    const size_t n_blocks = sizes[2];

    llama_h2o_scanned scanned;
    scanned.n_rows  = sizes[0];
    scanned.n_group = sizes[1];
    scanned.hidden_max.assign(hidden_max, hidden_max + n_blocks * n_rows);
    scanned.hidden_sum.assign(hidden_sum, hidden_sum + n_blocks * n_rows);
    scanned.resident_max.assign(resident_max, resident_max + n_rows);
    scanned.resident_sum.assign(resident_sum, resident_sum + n_rows);

    if (sinks) {
        scanned.add_sinks(sinks);
    }

    const llama_h2o_block_masses masses = llama_h2o_weigh_blocks(scanned);
    std::copy(masses.mass.begin(), masses.mass.end(), mass);
    std::copy(masses.weight.begin(), masses.weight.end(), weight);
}

// Returns how many rows every head takes.
//   range      start, first, next
//   sizes      n_heads, n_query_heads, n_rows
//   resident   [n_heads][next - start]
//   mass       [n_heads][n_blocks], and so is weight
//   text       shift, rotary position of the next token, positions there are
//   pos        [n_heads][n_rows] at most
//   spans      room for [n_blocks] of begin, end, place
//   shares     hidden, missed
int32_t choose_rows(const int32_t * range,
        const uint32_t * sizes,
        const uint8_t * resident,
        const float * mass,
        const double * weight,
        const int32_t * text,
        int32_t * pos,
        int32_t * n_spans,
        int32_t * spans,
        double * span_weights,
        double * shares) {
    llama_h2o_hidden hidden = {};

    hidden.start         = range[0];
    hidden.first         = range[1];
    hidden.next          = range[2];
    hidden.n_query_heads = sizes[1];

    const size_t n_pos    = hidden.next - hidden.start;
    const size_t n_blocks = hidden.n_blocks();
    for (size_t head = 0; head < sizes[0]; ++head) {
        const uint8_t * flags = resident + head * n_pos;
        const float * m       = mass + head * n_blocks;
        const double * w      = weight + head * n_blocks;

        hidden.resident.emplace_back(flags, flags + n_pos);
        hidden.of_heads.push_back({ { m, m + n_blocks }, { w, w + n_blocks } });
    }

    const llama_h2o_recall_choice choice = llama_h2o_choose_rows(hidden, sizes[2]);
    const std::vector<int32_t> places    = llama_h2o_place_spans(choice.spans, text[0], text[1], text[2]);

    std::copy(choice.pos.begin(), choice.pos.end(), pos);
    for (size_t i = 0; i < choice.spans.size(); ++i) {
        spans[3 * i]     = choice.spans[i].p0;
        spans[3 * i + 1] = choice.spans[i].p1;
        spans[3 * i + 2] = places[i];
        span_weights[i]  = choice.spans[i].weight;
    }
    *n_spans  = int32_t(choice.spans.size());
    shares[0] = choice.hidden;
    shares[1] = choice.missed;

    return int32_t(choice.n_rows);
}
}
