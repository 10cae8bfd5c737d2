// Per-head eviction for llama.cpp: a KV cache of fixed size, however long the text becomes.
//
// Terms, used everywhere in this project:
//
//   cell        one llama.cpp KV cell: a position and a sequence, shared by all layers and heads
//   row         the K and V vectors of one (layer, KV head, cell): the unit that is kept, moved or evicted
//   policy      the rule that gives every row a score
//   score       the value of a row. In the H2O policies it is the attention that the row has received so far:
//               the sum over queries, the mean over the query heads of its KV group
//   recent      rows of the last `recent` positions, never evicted
//   heavy       rows kept for their high score
//   pinned      rows of the first `pinned` positions or of pinned spans, never evicted
//   forgotten   rows of spans that the caller has dropped from the text (llama_h2o_forget())
//   budget      pinned + heavy + recent: rows per (layer, KV head) right after a compaction
//   slack       cells beyond the budget, which fill up between two compactions
//   capacity    budget + slack: the maximum number of cells in use
//   compaction  reduces the rows of every (layer, KV head) to the budget and frees the other cells
//   re-base     rotates the kept keys to lower RoPE positions when the positions of the model run out
//   archive     a copy of all rows of the tokens that are no longer recent, outside the cache
//   retrieved   archived rows that a query attends to ("found" in the names below)
//
// A compaction runs before a batch that would exceed the capacity. It chooses the rows of every (layer, KV head)
// separately, moves chosen rows out of the cells that will be freed over unchosen rows in the cells that stay, and frees
// the other cells. Afterwards every head has `budget` rows in the same cells, although of different token positions. All
// of these rows precede every later query, so llama.cpp's masks, slots and graphs need no change.
//
// Positions of a text count its tokens as if nothing were evicted, and grow without limit. Rotary embeddings (RoPE) only
// work for the positions that the model was trained on. When these run out, a re-base lowers the positions of all rows by
// half of the range: it rotates the stored keys, and new tokens continue after them. Rows that would get a negative
// position are packed at the start, in text order. If the keys cannot be rotated, the text ends there.
//
// If each embedding has several positions (M-RoPE), a batch passes four numbers for it: the position in the text, its
// index in the image (row by row from 0), and the width and height of the image. For audio the last three are -1. All
// embeddings of an image share one RoPE position, to which row and column are added. The next token follows after the
// longer side of the image. An image may end early or span several batches. Tokens that attend to each other
// (llama_set_causal_attn) must fit the slack.
//
// Recent rows stay in their own cells, so llama_memory_seq_rm() can remove the tail of a text within them. It returns
// false for an earlier position. Scores keep the attention from removed tokens, unless llama_h2o_mark() has marked the
// new end. llama_state_get_data() and the related functions save and restore everything. Saving only the windowed layers
// (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) is refused. Operations that cannot be exact here (copying a sequence, shifting
// positions) are refused; decoding then fails until the cache is cleared.
//
// With params.recall > 0 there is an archive. In every layer and KV head, the queries of every token search it for the
// rows that they would attend to most and that the head no longer holds. The queries attend to these retrieved rows and
// to the rows in the cells in one softmax. Archived rows precede every query. If the number of retrieved rows were as
// large as the text, the result would equal that of the full cache.
//
// Attach eviction to an empty context with llama_h2o_attach(), then call llama_decode() as usual. The eviction is freed
// with the context.
//
// Functions return 0 or a count on success and a negative LLAMA_H2O_ERR_* otherwise; llama_h2o_strerror() returns a
// message for each. No exception leaves this interface. Like the context, it is not thread-safe.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __GNUC__
#    define LLAMA_H2O_API __attribute__((visibility("default")))
#else
#    define LLAMA_H2O_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct gguf_context;
struct llama_context;
struct llama_model;

enum llama_h2o_status {
    LLAMA_H2O_OK                = 0,
    LLAMA_H2O_ERR_ARGUMENT      = -1,  // null pointer, or sequence, layer or size out of range
    LLAMA_H2O_ERR_PARAMS        = -2,  // recent or slack is 0, or the counts overflow
    LLAMA_H2O_ERR_CELLS         = -3,  // the context has fewer cells than the capacity
    LLAMA_H2O_ERR_NOT_EMPTY     = -4,  // the context has decoded tokens already
    LLAMA_H2O_ERR_ATTACHED      = -5,  // eviction is attached already
    LLAMA_H2O_ERR_NOT_ATTACHED  = -6,  // eviction is not attached
    LLAMA_H2O_ERR_SHARED_CELLS  = -7,  // several sequences share one stream of cells
    LLAMA_H2O_ERR_NO_CACHE      = -8,  // encoder or embedding model: no causal KV cache
    LLAMA_H2O_ERR_RECURRENT     = -9,  // recurrent model
    LLAMA_H2O_ERR_SLIDING       = -10, // all layers are limited to a window or a chunk of the text
    LLAMA_H2O_ERR_ALIBI         = -12, // ALiBi position bias
    LLAMA_H2O_ERR_SPARSE        = -13, // sparse attention: the model chooses the rows
    LLAMA_H2O_ERR_SHARED_LAYERS = -15, // a layer uses the K and V of a layer with a different number of query heads
    LLAMA_H2O_ERR_CACHE_KIND    = -16, // unsupported kind of KV cache
    LLAMA_H2O_ERR_ROW_BLOCKS    = -17, // the head size is not a multiple of the block size of the cache type
    LLAMA_H2O_ERR_MEMORY        = -18, // out of memory
    LLAMA_H2O_ERR_INTERNAL      = -19, // an unexpected failure inside llama.cpp
    LLAMA_H2O_ERR_N_POS         = -20, // the capacity exceeds n_pos
    LLAMA_H2O_ERR_PIN           = -22, // more pinned positions than pinned + heavy rows
    LLAMA_H2O_ERR_ATTENTION     = -23, // the requested attention type does not fit the processor, head size or cache
    LLAMA_H2O_ERR_ENLARGED      = -24, // the cache is enlarged already
    LLAMA_H2O_ERR_NOT_ENLARGED  = -25, // the cache is not enlarged
    LLAMA_H2O_ERR_POLICY        = -26, // invalid policy or scorer; the log contains the reason
    LLAMA_H2O_ERR_SPANS         = -28, // empty, unordered or overlapping spans
    LLAMA_H2O_ERR_SPLIT         = -29, // the heads of a layer are split over several devices
    LLAMA_H2O_ERR_NO_ARCHIVE    = -30, // eviction is attached without an archive (recall = 0)
    LLAMA_H2O_ERR_ARCHIVE_FILE  = -31, // unusable archive file; see llama_h2o_archive_error()
    LLAMA_H2O_ERR_ARCHIVE_TYPE  = -33, // the head size is not a multiple of the block size of the archive's type
    LLAMA_H2O_ERR_RECALL_HEADS  = -34, // archived keys of this head size cannot be searched
    LLAMA_H2O_ERR_ARCHIVE_SIZE  = -35, // archive_size is smaller than a page of the archive
    LLAMA_H2O_ERR_FORGOTTEN     = -36, // spans to forget are pinned or out of range, or spans to pin are forgotten
};

// llama.cpp's masks add window sizes to positions in 32 bits. Above this limit the sum would overflow, and tokens would
// attend to later ones.
enum llama_h2o_limits {
    LLAMA_H2O_MOST_POSITIONS = 2146435072, // 2^31 - 2^20
};

// Implementation of attention and scores. Types from PORTABLE on compute both in one CPU op, each for one instruction
// set. They need rows in CPU memory and the cache layout of flash attention.
enum llama_h2o_attention_type {
    LLAMA_H2O_ATTENTION_AUTO       = 0, // the fastest exact type, chosen per layer
    LLAMA_H2O_ATTENTION_OPS        = 1, // ggml ops, on every backend
    LLAMA_H2O_ATTENTION_PORTABLE   = 2,
    LLAMA_H2O_ATTENTION_NEON       = 3,
    LLAMA_H2O_ATTENTION_AVX2       = 4,
    LLAMA_H2O_ATTENTION_AVX512     = 5,
    LLAMA_H2O_ATTENTION_AVX512BF16 = 6, // rounds the queries of prompts to bf16: faster, not exact
};

// Data type of archived rows.
enum llama_h2o_archive_type {
    LLAMA_H2O_ARCHIVE_F16  = 0,
    LLAMA_H2O_ARCHIVE_Q8_0 = 1,
    LLAMA_H2O_ARCHIVE_Q4_0 = 2,
    LLAMA_H2O_ARCHIVE_F32  = 3,
};

// Bits of llama_h2o_get_notes(), for the user. All except the first name work that the CPU does for layers on a device with
// our kernels, and why.
enum llama_h2o_note {
    LLAMA_H2O_NOTE_FULL      = 1,  // the archive is full and has dropped its oldest tokens
    LLAMA_H2O_NOTE_HEADS     = 2,  // search and archiving: no kernel for this head size
    LLAMA_H2O_NOTE_PINNED    = 4,  // search and archiving: no more host memory can be pinned
    LLAMA_H2O_NOTE_CODES     = 8,  // search: too little device memory for the codes
    LLAMA_H2O_NOTE_ARCHIVING = 16, // archiving: no kernel for this cache type
    LLAMA_H2O_NOTE_CHOICE =
            32, // choice at a compaction: the device cannot move rows, or llama_h2o_share_fairly() is used
};

// Retention class of a row.
enum llama_h2o_standing {
    LLAMA_H2O_PINNED    = 0,
    LLAMA_H2O_RECENT    = 1,
    LLAMA_H2O_COMPETING = 2, // kept by score, in the budget left by pinned and recent rows
    LLAMA_H2O_FORGOTTEN = 3, // kept only if budget remains
};

// Input of a policy in addition to positions; flags.
enum llama_h2o_needs {
    LLAMA_H2O_NEEDS_ATTENTION       = 1,
    LLAMA_H2O_NEEDS_SQUARES         = 2, // includes LLAMA_H2O_NEEDS_ATTENTION
    LLAMA_H2O_NEEDS_QUERY_ATTENTION = 4,
    LLAMA_H2O_NEEDS_KEYS            = 8,
    LLAMA_H2O_NEEDS_VALUE_NORMS     = 16,
    LLAMA_H2O_NEEDS_QUERIES         = 32,
};

// Scores are averaged over this scope; all of its heads keep the same positions.
enum llama_h2o_scope {
    LLAMA_H2O_SCOPE_HEAD  = 0,
    LLAMA_H2O_SCOPE_LAYER = 1,
    LLAMA_H2O_SCOPE_CACHE = 2,
};

// The rows of one (layer, KV head) at a compaction, in cell order. Arrays that the policy does not need are null.
struct llama_h2o_head_rows {
    uint32_t il;      // layer of the model
    uint32_t head;    // KV head of the layer
    uint32_t n_group; // query heads of the KV head
    uint32_t n_rows;
    uint64_t n_places; // competing rows to keep
    int64_t newest;    // newest position of the text

    const int32_t * pos;      // [n_rows]
    const uint8_t * standing; // [n_rows] a llama_h2o_standing
    const float * attention;  // [n_rows] collected so far: sum over queries, mean over the query heads of the group
    const float * squares;    // [n_rows] the same for squared probabilities
    const float * query_attention; // [n_rows] of the last queries, now: the same sum and mean
    const float * value_norms;     // [n_rows] L2 norms of V

    // rotated, in the basis of the model (without a Hadamard transform)
    uint32_t n_embd_k;
    uint32_t n_queries;
    const float * keys;        // [n_rows][n_embd_k]
    const float * queries;     // [n_queries][n_group][n_embd_k], the last ones, in text order
    const int32_t * query_pos; // [n_queries]
    float kq_scale;            // factor of the products of queries and keys

    // their rotation
    bool rope_neox;             // pairs are (i, i + n_rope/2), not (2*i, 2*i + 1)
    uint32_t rope_first;        // first rotated element
    uint32_t n_rope;            // number of rotated elements
    const double * rope_angles; // [n_rope/2] radians per position; null if unknown
};

// A policy implemented by the caller.
struct llama_h2o_scorer {
    // Writes the scores of a head's rows, [n_rows]; rows with higher scores are kept. Only scores of competing rows are
    // used; they must be finite, also as floats. Called for one head after another, in the thread that decodes, pins or
    // shrinks. If it returns false, that operation fails and the text is unchanged.
    bool (*score)(void * data, const struct llama_h2o_head_rows * rows, double * scores);
    void * data; // owned by the caller; must outlive the context

    uint32_t needs;     // llama_h2o_needs
    uint32_t n_queries; // number of last queries that it needs, at most `recent`
    uint32_t n_near;    // attention over a shorter distance than this is not collected
    int32_t scope;      // a llama_h2o_scope
    double half_life;   // tokens after which collected attention counts half; 0: no decay
};

struct llama_h2o_params {
    uint32_t heavy;        // rows kept for their score, per (layer, KV head)
    uint32_t recent;       // newest positions that are never evicted, at least 1
    uint32_t pinned;       // first positions that are never evicted
    uint32_t slack;        // cells beyond the budget, at least 1
    uint32_t n_pos;        // RoPE positions, see llama_h2o_n_pos(); 0: the trained context length
    uint32_t recall;       // archived rows retrieved per token, mean per (layer, KV head); 0: no archive
    uint64_t archive_size; // maximum bytes of a sequence's archive, which drops its oldest rows; 0: no limit
    uint64_t pinned_size;  // maximum bytes of pinned host memory for archives that devices read; 0: no limit
    int32_t archive_type;  // a llama_h2o_archive_type; an int, so that invalid values can be reported
    int32_t attention;     // a llama_h2o_attention_type

    // Name and all parameters of the policy: "h2o-far:near=64,half_life=384". The built-in policies are in
    // native/src/policies; their docstrings in pyh2o/policies name the source and deviations from it. Copied.
    const char * policy;

    // Replaces the built-in policies; `policy` is then any text that identifies it in saved states. Copied. May be null.
    const struct llama_h2o_scorer * scorer;
};

// Positions p0 <= p < p1.
struct llama_h2o_span {
    int32_t p0;
    int32_t p1;
};

// Counters belong to the text of the sequence: clearing it resets them, and saved states contain them.
struct llama_h2o_stats {
    uint32_t n_cells;      // cells allocated per sequence
    uint32_t n_used;       // cells in use
    uint32_t n_layer;      // layers of the model
    uint32_t n_pinned;     // number of first positions that are never evicted
    uint32_t n_forgotten;  // number of forgotten positions
    int32_t pos_removable; // start of the tail that can be removed
    int32_t pos_limit;     // first position that the text cannot reach
    uint64_t n_compactions;
    uint64_t n_cells_freed;  // by compactions
    uint64_t n_rows_evicted; // by compactions, over all layers and KV heads
    uint64_t n_rows_moved;   // by compactions, over all layers and KV heads
    uint64_t n_rebases;
    uint64_t t_compactions_us; // time spent in compactions
    uint64_t t_rebases_us;     // time spent in re-bases
    uint64_t size_k;           // bytes allocated for K of layers with eviction, per sequence
    uint64_t size_v;           // the same for V
    uint64_t size_window;      // bytes for K and V of layers with a window
    uint64_t size_recurrent;   // bytes for the states of recurrent layers
    uint64_t size_scores;      // bytes for the scores and everything else that the policy collects
    uint32_t n_archived;       // tokens in the archive
    uint64_t n_unarchived;     // tokens dropped from the archive, because it was full
    uint64_t size_archive;     // bytes of the archive
    uint64_t n_looked;         // tokens decoded since llama_h2o_forget_found()
    double found;              // share of their attention on retrieved rows: mean over tokens, layers and query heads
};

// Abort callback.
struct llama_h2o_breaker {
    bool (*ask)(void * data); // called in the thread that decodes; true aborts
    void * data;
    int64_t interval_us; // between two calls, and before the first one
    int64_t next_us;     // time of the next call; internal
};

// What a layer of a model stores of a text.
struct llama_h2o_layer_info {
    int32_t rows_of;        // the layer whose rows it uses, normally itself; -1: none
    uint32_t window;        // attention window in tokens; 0: no limit
    bool chunked;           // attention is limited to the current chunk of `window` tokens
    bool recurrent;         // it has a state of fixed size, instead of rows or in addition to them
    uint32_t n_head_kv;     // KV heads as stored; 0 without rows
    uint32_t n_embd_head_k; // elements per head
    uint32_t n_embd_head_v;
};

// Return the message for a return code: one line with the cause and, if there is one, the remedy.
LLAMA_H2O_API const char * llama_h2o_strerror(int32_t status);

// Find the first token whose text repeats that of an earlier token, or -1: llama.cpp aborts on such a model file. ctx is
// the result of gguf_init_from_file().
LLAMA_H2O_API int32_t llama_h2o_find_repeated_token(const struct gguf_context * ctx, int64_t * token);

// Check whether this model supports eviction, before a context is allocated.
LLAMA_H2O_API int32_t llama_h2o_supports(const struct llama_model * model);

// Return the number of learned position embeddings; 0 if the model computes them. llama.cpp aborts on positions above.
LLAMA_H2O_API uint32_t llama_h2o_n_pos_learned(const struct llama_model * model);

// Return the number of RoPE positions for a context of n_ctx tokens: the trained context length. A LongRoPE model has one
// set of factors for short and one for long contexts: if n_ctx is at most its original context length, the result is that
// length. llama_h2o_attach() chooses the factors by n_pos.
LLAMA_H2O_API uint32_t llama_h2o_n_pos(const struct llama_model * model, uint32_t n_ctx);

// Return the host memory that llama.cpp allocates per cell of a context, in bytes: the metadata of the cell, and K and V of
// the layers that are not on a device. This is a lower bound: layers with a window have fewer cells and are not counted.
// 0 without a KV cache. Types are ggml types. llama.cpp does not check whether the memory is available.
LLAMA_H2O_API uint64_t llama_h2o_size_of_cell(
        const struct llama_model * model, int32_t type_k, int32_t type_v, bool offload_kqv);

// Describe what a layer stores in the memory of this context. Works without eviction, too, but not for unsupported kinds of
// memory.
LLAMA_H2O_API int32_t llama_h2o_get_layer(
        const struct llama_context * ctx, int32_t il, struct llama_h2o_layer_info * layer);

// Attach eviction to a context that has not decoded anything yet. The context needs n_ctx >= capacity cells per sequence,
// and kv_unified = false if it has several sequences.
LLAMA_H2O_API int32_t llama_h2o_attach(struct llama_context * ctx, struct llama_h2o_params params);

// Pin the first n_pinned positions of a sequence until it is cleared. They reduce the number of heavy rows; the budget
// does not change.
LLAMA_H2O_API int32_t llama_h2o_pin(struct llama_context * ctx, int32_t seq_id, uint32_t n_pinned);

// Pin spans of positions, ascending and disjoint, instead of those pinned by an earlier call. They may lie beyond the end of
// the text. Evicted rows are restored at once if the archive has them.
LLAMA_H2O_API int32_t llama_h2o_pin_spans(
        struct llama_context * ctx, int32_t seq_id, const struct llama_h2o_span * spans, uint32_t n_spans);

// Divide the text into segments that start at these positions (ascending, above 0). Until the sequence is cleared, each
// segment keeps a number of heavy rows in proportion to its length. n_starts = 0: no segments.
LLAMA_H2O_API int32_t llama_h2o_share_fairly(
        struct llama_context * ctx, int32_t seq_id, const int32_t * starts, uint32_t n_starts);

// Drop spans of positions, ascending and disjoint, until the sequence is cleared or its tail is removed back to them. Their
// rows are removed from every head, even if they are recent, and are neither archived nor retrieved. Only these rows are
// removed, and positions do not change. The newest position cannot be dropped, because decoding continues after it. Rows of
// other tokens, windows and recurrent states still reflect the dropped tokens. If the heads hold different numbers of these
// rows because of earlier compactions, only as many cells are freed as the head with the fewest allows. The other heads keep
// their oldest ones until the next compactions evict them first. The tail cannot be removed so that the text would end in a
// dropped span.
LLAMA_H2O_API int32_t llama_h2o_forget(
        struct llama_context * ctx, int32_t seq_id, const struct llama_h2o_span * spans, uint32_t n_spans);

// Get the dropped spans of a sequence, ascending and disjoint. Writes at most n_spans of them and returns their number.
LLAMA_H2O_API int32_t llama_h2o_get_forgotten(
        struct llama_context * ctx, int32_t seq_id, struct llama_h2o_span * spans, uint32_t n_spans);

// Set all rows of an empty sequence to zero. Needed after a text whose rows contain NaN or infinity: masked cells have weight
// 0, and 0 times NaN or infinity is NaN.
LLAMA_H2O_API int32_t llama_h2o_zero_rows(struct llama_context * ctx, int32_t seq_id);

// Mark the end of a sequence: store what the policy has collected so far. Removing the tail back to exactly this position
// restores it, and the text continues bit for bit as if the tail had never been decoded. The last 8 marks are kept. Removing
// a tail drops the marks after it. Compactions, re-bases, clearing, loading a state, llama_h2o_enlarge() and any other
// removal drop all marks.
LLAMA_H2O_API int32_t llama_h2o_mark(struct llama_context * ctx, int32_t seq_id);

// Return the number of tokens at the last mark that is not after pos, or 0.
LLAMA_H2O_API int32_t llama_h2o_marked(struct llama_context * ctx, int32_t seq_id, int32_t pos);

// Set the abort callback, which is called while the CPU computes; null removes it. The caller owns it. After an abort
// llama_decode() returns 2, and the aborted physical batch leaves no trace: its tokens are removed, and what the policy
// collected is restored bit for bit. Earlier physical batches stay, as do compactions and re-bases that ran before this one.
// With windowed layers the text continues with different rounding. Everything collected is copied before each batch, which
// is too slow for single tokens.
// Returns 1, or 0 if decoding cannot be aborted: devices compute all layers and there is no archive, a recurrent state is
// overwritten, the kind of memory is not supported, or the context already has another abort callback.
LLAMA_H2O_API int32_t llama_h2o_set_breaker(struct llama_context * ctx, struct llama_h2o_breaker * breaker);

// Replace the cache by a temporarily larger one of n_ctx cells per sequence with the same content, and return to the original
// one. In between nothing is evicted, so a prompt is evaluated with full attention. llama_h2o_shrink() runs one compaction
// unless all rows fit. Needs the memory of a full cache of that size; both functions reserve the graph again. The last logits
// remain valid. If either function fails, the context is unchanged.
LLAMA_H2O_API int32_t llama_h2o_enlarge(struct llama_context * ctx, uint32_t n_ctx);
LLAMA_H2O_API int32_t llama_h2o_shrink(struct llama_context * ctx);

// Get the attention that tokens decoded since llama_h2o_forget_found() gave to retrieved rows of positions
// p0 <= p < p0 + n: squared attention probabilities, summed over tokens, layers and query heads. Writes weights, [n].
LLAMA_H2O_API int32_t llama_h2o_get_found(
        struct llama_context * ctx, int32_t seq_id, int32_t p0, uint32_t n, double * weights);

// Reset these sums, and llama_h2o_stats.n_looked and found.
LLAMA_H2O_API int32_t llama_h2o_forget_found(struct llama_context * ctx, int32_t seq_id);

// Move the archive of a sequence to a file, which is created if it does not exist. States saved afterwards refer to the file
// and contain only what is not in it. A state that is loaded afterwards reuses the pages that it needs of an existing file;
// other pages are overwritten. Only one context may have a file open.
// A file that cannot be opened or belongs to another model, type or text is refused; the archive is then unchanged.
//   id   [16] random id of the text
LLAMA_H2O_API int32_t llama_h2o_archive_open(
        struct llama_context * ctx, int32_t seq_id, const char * path, const uint8_t * id);

// Return the error of a sequence's archive in one line, or "": its file was refused or lacks pages of a state, a page is
// damaged, or the disk is full and archiving has stopped. Valid until the next call.
LLAMA_H2O_API const char * llama_h2o_archive_error(struct llama_context * ctx, int32_t seq_id);

// Return notes for the user of a sequence: bits of llama_h2o_note.
LLAMA_H2O_API int32_t llama_h2o_get_notes(struct llama_context * ctx, int32_t seq_id);

// Get the statistics of a sequence. Without eviction, everything related to eviction is 0.
LLAMA_H2O_API int32_t llama_h2o_get_stats(
        const struct llama_context * ctx, int32_t seq_id, struct llama_h2o_stats * stats);

// Return the largest number of tokens per text whose queries are processed one at a time, which rounds differently from
// larger batches. 0 if ggml's ops compute attention in all layers.
LLAMA_H2O_API int32_t llama_h2o_n_few(struct llama_context * ctx);

// Return the name of GPU number i, or null if there are fewer.
LLAMA_H2O_API const char * llama_h2o_device_name(int32_t i);

// Return the device memory used by the context in bytes: weights of its model, caches and work space. Works without
// eviction, too.
LLAMA_H2O_API int64_t llama_h2o_device_bytes(const struct llama_context * ctx);

// Get the rows of a sequence in one layer. The score is the attention collected so far if the policy uses it, otherwise the
// score from the last compaction. Writes pos and score, both [n_head_kv][n_rows] with n_rows = llama_h2o_stats.n_used, and
// returns n_head_kv. The rows of a head are in cell order, which is not text order. If pos and score are null, it only
// returns n_head_kv; 0 for a layer without a KV cache.
LLAMA_H2O_API int32_t llama_h2o_get_rows(
        struct llama_context * ctx, int32_t seq_id, int32_t il, uint32_t n_rows, int32_t * pos, float * score);

#ifdef __cplusplus
}
#endif
