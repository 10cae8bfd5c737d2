#include "caches.h"

#include "recall/h2o-checksum.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

static constexpr int32_t N_LAYER  = 2; // as models.py writes them
static constexpr int32_t N_VOCAB  = 288;
static constexpr uint32_t N_CELLS = 256; // the fewest that llama.cpp makes
static constexpr uint32_t N_POS   = 64;  // small, for early re-bases

struct settings {
    const char * model;
    const char * policy;
    uint32_t needs; // of a policy outside of the library; 0: it is one inside
    ggml_type rows;
    bool flash_attention;
    uint32_t recall;
    llama_h2o_archive_type archived;
    uint64_t archive_size;
};

// Each takes another path through the parser of layers, queries or the archive.
static constexpr settings SETTINGS[] = {
    { "llama", "h2o-far:near=8,half_life=20", 0, GGML_TYPE_F16, true, 0, LLAMA_H2O_ARCHIVE_F16, 0 },
    { "llama", "queries", LLAMA_H2O_NEEDS_QUERY_ATTENTION, GGML_TYPE_F16, false, 0, LLAMA_H2O_ARCHIVE_F16, 0 },
    { "llama", "squares", LLAMA_H2O_NEEDS_SQUARES, GGML_TYPE_Q8_0, true, 0, LLAMA_H2O_ARCHIVE_F16, 0 },
    { "llama", "keys", LLAMA_H2O_NEEDS_KEYS | LLAMA_H2O_NEEDS_VALUE_NORMS, GGML_TYPE_F32, false, 0,
            LLAMA_H2O_ARCHIVE_F16, 0 },
    { "llama", "h2o", 0, GGML_TYPE_Q4_0, true, 12, LLAMA_H2O_ARCHIVE_Q4_0, 0 },
    { "llama", "h2o-decay:half_life=20", 0, GGML_TYPE_F16, false, 12, LLAMA_H2O_ARCHIVE_Q4_0, 1 << 15 },
    { "gemma2", "queries", LLAMA_H2O_NEEDS_QUERY_ATTENTION, GGML_TYPE_F16, true, 12, LLAMA_H2O_ARCHIVE_Q4_0, 0 },
    { "lfm2", "h2o-mean", 0, GGML_TYPE_F16, true, 0, LLAMA_H2O_ARCHIVE_F16, 0 },
};

size_t n_caches() {
    return std::size(SETTINGS);
}

using model_pointer = std::unique_ptr<llama_model, decltype(&llama_model_free)>;

static model_pointer load_model(const std::string & name) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();

    const char * folder = std::getenv("PYH2O_FUZZ_MODELS");
    expect(folder, "PYH2O_FUZZ_MODELS names the folder that tests/fuzz/models.py wrote to");
    const std::string path = std::string(folder) + "/" + name + ".gguf";
    model_pointer res(llama_model_load_from_file(path.c_str(), llama_model_default_params()), llama_model_free);
    expect(res != nullptr, "the model can be loaded");

    return res;
}

static llama_model * model_of(const std::string & name) {
    static std::map<std::string, model_pointer> all;

    const auto found = all.find(name);

    return found != all.end() ? found->second.get() : all.emplace(name, load_model(name)).first->second.get();
}

static llama_context * new_context(const settings & given) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = N_CELLS;
    params.n_batch              = 32;
    params.n_ubatch             = 16;
    params.n_threads            = 1;
    params.n_threads_batch      = 1;
    params.type_k               = given.rows;
    params.type_v               = given.rows;
    params.flash_attn_type = given.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;

    llama_context * res = llama_init_from_model(model_of(given.model), params);
    expect(res, "there is a context");

    return res;
}

static bool score_rows(void *, const llama_h2o_head_rows * rows, double * scores) {
    for (uint32_t i = 0; i < rows->n_rows; ++i) {
        scores[i] = rows->query_attention ? rows->query_attention[i]
                    : rows->squares       ? rows->attention[i] - rows->squares[i]
                                          : rows->keys[size_t(i) * rows->n_embd_k] * rows->value_norms[i];
    }

    return true;
}

cache::cache(size_t i) : ctx(new_context(SETTINGS[i])), params() {
    params.heavy        = 8;
    params.recent       = 6;
    params.pinned       = 2;
    params.slack        = 4;
    params.n_pos        = N_POS;
    params.recall       = SETTINGS[i].recall;
    params.archive_size = SETTINGS[i].archive_size;
    params.archive_type = SETTINGS[i].archived;
    params.policy       = SETTINGS[i].policy;

    const llama_h2o_scorer scorer = { score_rows, nullptr, SETTINGS[i].needs, 3, 0, LLAMA_H2O_SCOPE_HEAD, 0.0 };
    params.scorer                 = scorer.needs > 0 ? &scorer : nullptr;

    const int32_t status = llama_h2o_attach(ctx, params);
    expect(status == LLAMA_H2O_OK, llama_h2o_strerror(status));
}

cache & cache::of(size_t i) {
    model_of(SETTINGS[i].model); // outlives the contexts
    static std::vector<std::unique_ptr<cache>> all(n_caches());
    if (!all[i]) {
        all[i].reset(new cache(i));
    }

    return *all[i];
}

llama_h2o_stats cache::stats() const {
    llama_h2o_stats res;
    expect(llama_h2o_get_stats(ctx, 0, &res) == LLAMA_H2O_OK, "there are statistics");

    return res;
}

llama_pos cache::newest() const {
    return llama_memory_seq_pos_max(llama_get_memory(ctx), 0);
}

bool cache::is_empty() const {
    const auto now = stats();

    return newest() == -1 && now.n_used == 0 && now.n_archived == 0 && now.n_looked == 0 &&
           now.n_pinned == params.pinned && now.pos_removable == 0;
}

void cache::clear() {
    llama_memory_clear(llama_get_memory(ctx), true);
}

void cache::check_rows() const {
    const auto now = stats();
    expect(now.n_used <= params.heavy + params.recent + params.pinned + params.slack, "the capacity is kept");

    for (int32_t il = 0; il < N_LAYER; ++il) {
        const auto layer = rows_of(il);
        for (size_t i = 0; i < layer.pos.size(); ++i) {
            expect(layer.pos[i] >= 0 && layer.pos[i] <= newest(), "rows are those of the text");
            expect(std::isfinite(layer.score[i]), "scores are numbers");
        }
    }
}

cache::layer_rows cache::rows_of(int32_t il) const {
    const uint32_t n_used = stats().n_used;
    const int32_t n_heads = llama_h2o_get_rows(ctx, 0, il, n_used, nullptr, nullptr);

    layer_rows res;
    if (n_heads > 0 && n_used > 0) { // one with a window or a recurrent one has none that are evicted
        res.n_heads = uint32_t(n_heads);
        res.pos.resize(res.n_heads * n_used);
        res.score.resize(res.n_heads * n_used);
        const int32_t status = llama_h2o_get_rows(ctx, 0, il, n_used, res.pos.data(), res.score.data());
        expect(status == n_heads, "rows can be read");
    }

    return res;
}

bytes cache::state() const {
    bytes res(llama_state_seq_get_size(ctx, 0));
    expect(llama_state_seq_get_data(ctx, res.data(), res.size(), 0) == res.size(), "a state is as long as it says");

    return res;
}

bool cache::load(const bytes & state) {
    const size_t n_read = llama_state_seq_set_data(ctx, state.data(), state.size(), 0);
    expect(n_read <= state.size(), "nothing is read from behind the state");

    return n_read > 0;
}

int32_t cache::decode(const std::vector<llama_token> & tokens) {
    llama_pos pos     = newest();
    llama_batch batch = llama_batch_init(int32_t(tokens.size()), 0, 1);
    for (const llama_token token : tokens) {
        const int32_t i    = batch.n_tokens++;
        batch.token[i]     = token;
        batch.pos[i]       = ++pos;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = i + 1 == int32_t(tokens.size());
    }
    const int32_t status = llama_decode(ctx, batch);
    llama_batch_free(batch);

    return status;
}

bool cache::read(const std::vector<llama_token> & tokens) {
    return decode(tokens) == 0;
}

std::vector<float> cache::logits() const {
    const float * res = llama_get_logits_ith(ctx, -1);
    expect(res, "there are logits");

    return { res, res + N_VOCAB };
}

void cache::remove_tail(uint32_t n) {
    const llama_pos begin = std::max(stats().pos_removable, newest() + 1 - llama_pos(n));
    llama_memory_seq_rm(llama_get_memory(ctx), 0, begin, -1);
}

void cache::reset_found() {
    if (has_archive()) {
        expect(llama_h2o_forget_found(ctx, 0) == LLAMA_H2O_OK, "what was found can be forgotten");
        expect(stats().n_looked == 0 && stats().found == 0.0, "and is");
    }
}

std::vector<llama_token> random_tokens(uint32_t n, random_numbers & random) {
    std::vector<llama_token> res(n);
    std::generate(res.begin(), res.end(), [&] { return llama_token(random.next(N_VOCAB)); });

    return res;
}

void set_checksum(bytes & state) {
    // llama.cpp's header is not part of the checksum
    static constexpr size_t FRONT = 2 * sizeof(uint32_t);

    if (state.size() < FRONT + sizeof(uint64_t)) {
        return;
    }

    const size_t end = state.size() - sizeof(uint64_t);
    llama_h2o_checksum sum;
    sum.add(state.data() + FRONT, end - FRONT);
    const uint64_t value = sum.value();
    std::memcpy(state.data() + end, &value, sizeof(value));
}
