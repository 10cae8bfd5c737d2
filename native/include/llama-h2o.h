// Per-head eviction for llama.cpp: a KV cache of fixed size, however long the text becomes.
//
// The mental model, in the words used everywhere in this project:
//
//   cell      one llama.cpp KV cell: a position and a sequence, shared by all layers and heads
//   row       the K or V vector of one (layer, KV head, cell): what is kept, moved or dropped
//   policy    the rule that gives every row a score
//   score     what a row is worth; for the policies of the H2O family the attention it has collected:
//             sum over queries, mean over the query heads of its KV group
//   recent    rows of the last `recent` positions, never evicted
//   heavy     rows kept for their score
//   pinned    rows of the first `pinned` positions, or of pinned spans, never evicted
//   forgotten rows of spans that the text does without from some time on; they leave, and only they
//   budget    pinned + heavy + recent: rows per (layer, KV head) right after a compaction
//   slack     cells beyond the budget that fill up between two compactions
//   capacity  budget + slack: most cells that are ever in use
//   re-base   giving the kept rows lower positions for their rotary embedding
//   archive   a copy of all rows of every token that is no longer recent, outside the cache
//   found     rows of the archive that a query attends to, because they look like what it wants
//
// Before a batch that would exceed the capacity is decoded, a compaction chooses the rows of every
// (layer, KV head) on its own, moves the chosen rows of the cells that are about to be freed into
// the unchosen rows of the cells that stay, and frees the rest. Afterwards every head has `budget`
// rows in the same cells, although of different token positions. All of them are in the past of
// every coming query, so llama.cpp's masks, slots and graphs work as they are.
//
// Positions of a text count its tokens as if nothing were evicted, and go on for ever. Rotary
// embeddings (RoPE) know only the positions the model was trained on. When those are used up a
// re-base moves the rows of every head half of them back, by rotating the keys on; new tokens follow.
// Rows from further back are packed at the start, in the order of the text. Keys that cannot be
// rotated on end the text instead.
//
// Where embeddings have several positions each (M-RoPE), a batch gives for each the position in the text, its number in its
// picture, row by row from 0, and the picture's width and height; for sound three times -1. All of a picture count as one
// position for RoPE, to which row and column are added, and what follows begins behind the longer side. A picture may end
// early, or come in several batches. Tokens that see each other (llama_set_causal_attn) have to fit the slack.
//
// Recent rows stay in cells of their own, so the tail of a text can be removed and written again, as
// llama_memory_seq_rm() does; further back it returns false. The attention that removed tokens gave
// to others stays in the scores, unless llama_h2o_mark() has marked the new end. llama_state_get_data() and its kin save and restore everything;
// where some layers see a window, saving that alone (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) is refused.
// What has no exact meaning here (copying a sequence, shifting positions) is refused, and so is
// decoding after it until the cache is cleared.
//
// What was evicted is not lost if the params ask for an archive: in every layer and KV head the queries of every token look
// for the archived rows that they would attend to most and that the head does not hold any more, and attend to those that
// they find beside the rows in the cells, in one softmax. Archived rows are in the past of every query. How many are found
// is a number of the params; as many as there are would be the full cache.
//
// Attach eviction to an empty context with llama_h2o_attach() and go on with llama_decode(). The
// eviction lives and dies with the context.
//
// Functions return 0 or a count on success and a negative LLAMA_H2O_ERR_* otherwise;
// llama_h2o_strerror() has a text for each. No exception leaves this interface. Like the context
// itself, it must not be used from two threads at once.

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
    LLAMA_H2O_ERR_ARGUMENT      = -1,  // a null pointer, or a sequence, layer or size out of range
    LLAMA_H2O_ERR_PARAMS        = -2,  // recent or slack is 0, or the counts overflow
    LLAMA_H2O_ERR_CELLS         = -3,  // the context has fewer cells than the capacity
    LLAMA_H2O_ERR_NOT_EMPTY     = -4,  // the context has decoded tokens already
    LLAMA_H2O_ERR_ATTACHED      = -5,  // eviction is attached already
    LLAMA_H2O_ERR_NOT_ATTACHED  = -6,  // eviction is not attached
    LLAMA_H2O_ERR_SHARED_CELLS  = -7,  // several sequences share one stream of cells
    LLAMA_H2O_ERR_NO_CACHE      = -8,  // encoder or embedding model: no causal KV cache
    LLAMA_H2O_ERR_RECURRENT     = -9,  // recurrent model
    LLAMA_H2O_ERR_SLIDING       = -10, // all layers see a window or a chunk of the text only
    LLAMA_H2O_ERR_ALIBI         = -12, // ALiBi position bias
    LLAMA_H2O_ERR_SPARSE        = -13, // attention to rows that the model chooses itself
    LLAMA_H2O_ERR_SHARED_LAYERS = -15, // layers that use another layer's K and V with other numbers of heads
    LLAMA_H2O_ERR_CACHE_KIND    = -16, // a kind of KV cache that is not known here
    LLAMA_H2O_ERR_ROW_BLOCKS    = -17, // a head's row is not whole blocks of the cache type
    LLAMA_H2O_ERR_MEMORY        = -18, // out of memory
    LLAMA_H2O_ERR_INTERNAL      = -19, // an unexpected failure inside llama.cpp
    LLAMA_H2O_ERR_N_POS         = -20, // the capacity exceeds the positions that may be used
    LLAMA_H2O_ERR_PIN           = -22, // more pinned positions than the pinned and heavy rows
    LLAMA_H2O_ERR_ATTENTION     = -23, // attention cannot be computed in the way asked for
    LLAMA_H2O_ERR_ENLARGED      = -24, // the cache is enlarged already
    LLAMA_H2O_ERR_NOT_ENLARGED  = -25, // the cache is not enlarged
    LLAMA_H2O_ERR_POLICY        = -26, // a text or a scorer that no policy can be made of; the log says why
    LLAMA_H2O_ERR_SPANS         = -28, // spans that are empty, out of order or overlap
    LLAMA_H2O_ERR_SPLIT         = -29, // a layer's heads lie on several devices
    LLAMA_H2O_ERR_NO_ARCHIVE    = -30, // the params ask for no archive
    LLAMA_H2O_ERR_ARCHIVE_FILE  = -31, // the archive's file cannot be used; llama_h2o_archive_trouble() says why
    LLAMA_H2O_ERR_ARCHIVE_TYPE  = -33, // a head's row is not whole blocks of the archive's type
    LLAMA_H2O_ERR_RECALL_HEADS  = -34, // heads whose keys have no codes to be found by
    LLAMA_H2O_ERR_ARCHIVE_SIZE  = -35, // a page of the archive is larger than its limit
    LLAMA_H2O_ERR_FORGOTTEN = -36, // spans to be forgotten that are pinned or not there, or forgotten ones to be pinned
};

// Of any text. llama.cpp's masks add windows to positions, in 32 bits: behind these the sum would wrap, and tokens attend to
// what comes after them.
enum llama_h2o_limits {
    LLAMA_H2O_MOST_POSITIONS = 2146435072, // 2^31 - 2^20
};

// What computes attention and scores. The others are one op for both, each for another instruction
// set. They need rows in the CPU's memory and the layout of flash attention.
enum llama_h2o_attention_type {
    LLAMA_H2O_ATTENTION_AUTO       = 0, // the fastest exact one, layer by layer
    LLAMA_H2O_ATTENTION_OPS        = 1, // ggml ops, on every backend
    LLAMA_H2O_ATTENTION_PORTABLE   = 2,
    LLAMA_H2O_ATTENTION_NEON       = 3,
    LLAMA_H2O_ATTENTION_AVX2       = 4,
    LLAMA_H2O_ATTENTION_AVX512     = 5,
    LLAMA_H2O_ATTENTION_AVX512BF16 = 6, // many queries are rounded to bf16: faster, not exact
};

// Of the rows in the archive.
enum llama_h2o_archive_type {
    LLAMA_H2O_ARCHIVE_F16  = 0,
    LLAMA_H2O_ARCHIVE_Q8_0 = 1,
    LLAMA_H2O_ARCHIVE_Q4_0 = 2,
    LLAMA_H2O_ARCHIVE_F32  = 3,
};

// What the user of a text should know: bits of llama_h2o_get_notes(). All but the first name what the CPU computes for layers
// on a device that has our kernels.
enum llama_h2o_note {
    LLAMA_H2O_NOTE_FULL      = 1,  // the archive has reached its limit, and the oldest tokens have left it
    LLAMA_H2O_NOTE_HEADS     = 2,  // search and archiving: no kernel fits the heads
    LLAMA_H2O_NOTE_PINNED    = 4,  // search and archiving: no more of the host's memory can be pinned
    LLAMA_H2O_NOTE_CODES     = 8,  // search: the device has no room for codes
    LLAMA_H2O_NOTE_ARCHIVING = 16, // archiving: no kernel fits the rows in the cache
    LLAMA_H2O_NOTE_CHOICE    = 32, // the choice of a compaction: the device cannot move rows, or segments have shares
};

// What a row has to stay by.
enum llama_h2o_standing {
    LLAMA_H2O_PINNED    = 0,
    LLAMA_H2O_RECENT    = 1,
    LLAMA_H2O_COMPETING = 2, // for the places that pinned and recent rows leave
    LLAMA_H2O_FORGOTTEN = 3, // for those that nobody else takes
};

// What a policy has to see of the rows beside their positions; flags.
enum llama_h2o_needs {
    LLAMA_H2O_NEEDS_ATTENTION       = 1,
    LLAMA_H2O_NEEDS_SQUARES         = 2, // and attention with them
    LLAMA_H2O_NEEDS_QUERY_ATTENTION = 4,
    LLAMA_H2O_NEEDS_KEYS            = 8,
    LLAMA_H2O_NEEDS_VALUE_NORMS     = 16,
    LLAMA_H2O_NEEDS_QUERIES         = 32,
};

// Whose scores are averaged before the choice, which is then the same for all of them.
enum llama_h2o_scope {
    LLAMA_H2O_SCOPE_HEAD  = 0,
    LLAMA_H2O_SCOPE_LAYER = 1,
    LLAMA_H2O_SCOPE_CACHE = 2,
};

// The rows of one (layer, KV head) at a compaction, in the order of their cells. What a policy has not asked for is null.
struct llama_h2o_head_rows {
    uint32_t il;      // layer of the model
    uint32_t head;    // KV head of the layer
    uint32_t n_group; // query heads of the KV head
    uint32_t n_rows;
    uint64_t n_places; // for competing rows
    int64_t newest;    // position of the text

    const int32_t * pos;           // [n_rows]
    const uint8_t * standing;      // [n_rows] a llama_h2o_standing
    const float * attention;       // [n_rows] collected: sum over queries, mean over the query heads of the group
    const float * squares;         // [n_rows] the same of squared probabilities
    const float * query_attention; // [n_rows] that the last queries pay now: sum and mean likewise
    const float * value_norms;     // [n_rows] lengths of V

    // rotated, in the basis of the model
    uint32_t n_embd_k;
    uint32_t n_queries;
    const float * keys;        // [n_rows][n_embd_k]
    const float * queries;     // [n_queries][n_group][n_embd_k], the last ones, in the order of the text
    const int32_t * query_pos; // [n_queries]
    float kq_scale;            // what products of them are multiplied with

    // how they are rotated
    bool rope_neox;             // pairs are (i, i + n_rope/2), not (2*i, 2*i + 1)
    uint32_t rope_first;        // element that they begin at
    uint32_t n_rope;            // elements that are rotated
    const double * rope_angles; // [n_rope/2] radians per position; null if that is not known
};

// A policy outside of the library.
struct llama_h2o_scorer {
    // Gives the rows of a head their scores, [n_rows]: the higher ones stay. Only those of competing rows matter; they are
    // finite, also as floats. Asked for one head after the other, in the thread that decodes, pins or shrinks. False breaks
    // that off, which then fails; the text is what it was.
    bool (*score)(void * data, const struct llama_h2o_head_rows * rows, double * scores);
    void * data; // stays the caller's, as long as the context lives

    uint32_t needs;     // llama_h2o_needs
    uint32_t n_queries; // last queries that it looks at; no more than are recent
    uint32_t n_near;    // attention from so few tokens away is not collected
    int32_t scope;      // a llama_h2o_scope
    double half_life;   // tokens after which attention counts for half; 0: it never fades
};

struct llama_h2o_params {
    uint32_t heavy;        // rows kept for their score, per (layer, KV head)
    uint32_t recent;       // newest positions that are never evicted, at least 1
    uint32_t pinned;       // first positions that are never evicted
    uint32_t slack;        // cells beyond the budget, at least 1
    uint32_t n_pos;        // positions of rotary embeddings, see llama_h2o_n_pos(); 0: those the model was trained on
    uint32_t recall;       // archived rows that a token finds, the mean per (layer, KV head); 0: there is no archive
    uint64_t archive_size; // most bytes of the archive of a sequence, the oldest rows go; 0: no limit
    uint64_t pinned_size;  // most bytes of archives in pinned memory of the host, which devices read; 0: no limit
    int32_t archive_type;  // a llama_h2o_archive_type; here and below an int can also hold what is refused
    int32_t attention;     // a llama_h2o_attention_type

    // What gives a row its score, with all its parameters: "h2o-far:near=64,half_life=384". Those of the library are in
    // native/src/policies, and have a docstring with source and deviations in pyh2o/policies. The text is copied.
    const char * policy;

    // Gives the scores in the place of the policies here; the text above is then any that says which one it is. Copied. Null:
    // there is none.
    const struct llama_h2o_scorer * scorer;
};

// Positions p0 <= p < p1.
struct llama_h2o_span {
    int32_t p0;
    int32_t p1;
};

// Counters are of the text that the sequence has: they begin anew when it is cleared, and a saved state has them.
struct llama_h2o_stats {
    uint32_t n_cells;          // cells allocated for one sequence
    uint32_t n_used;           // cells the sequence uses now
    uint32_t n_layer;          // layers of the model
    uint32_t n_pinned;         // first positions of the sequence that are never evicted
    uint32_t n_forgotten;      // positions of the sequence that were forgotten
    int32_t pos_removable;     // first position of the tail that can be removed
    int32_t pos_limit;         // first position that a text cannot reach
    uint64_t n_compactions;    // of the sequence
    uint64_t n_cells_freed;    // by compactions of the sequence
    uint64_t n_rows_evicted;   // by compactions of the sequence, over all layers and KV heads
    uint64_t n_rows_moved;     // by compactions of the sequence, over all layers and KV heads
    uint64_t n_rebases;        // of the sequence
    uint64_t t_compactions_us; // time spent in compactions of the sequence
    uint64_t t_rebases_us;     // time spent in re-bases of the sequence
    uint64_t size_k;           // bytes allocated for K of the layers that are evicted: the share of a sequence
    uint64_t size_v;           // and for their V, likewise
    uint64_t size_window;      // for K and V of layers that see a window
    uint64_t size_recurrent;   // for the states of recurrent layers
    uint64_t size_scores;      // for the scores and what else the policy collects
    uint32_t n_archived;       // tokens in the archive of the sequence
    uint64_t n_unarchived;     // tokens of the sequence that had to leave its archive
    uint64_t size_archive;     // bytes that the archive of the sequence takes
    uint64_t n_looked;         // tokens decoded since llama_h2o_forget_found()
    double found;              // share of their attention that found rows got; mean over tokens, layers and query heads
};

// Who may break off what is decoded.
struct llama_h2o_breaker {
    bool (*ask)(void * data); // in the thread that decodes; true breaks off
    void * data;
    int64_t interval_us; // between two questions, and before the first one
    int64_t next_us;     // when the next one is due; not for the caller
};

// What a layer of a model keeps of a text.
struct llama_h2o_layer_info {
    int32_t rows_of;        // the layer whose rows it uses, its own as a rule; -1: none
    uint32_t window;        // tokens that it sees of the text; 0: all of them
    bool chunked;           // it sees no more than those of its own chunk of the text, which is as long as the window
    bool recurrent;         // it keeps a state of fixed size, in the place of rows or beside them
    uint32_t n_head_kv;     // heads of the rows, as they are stored; 0 without rows
    uint32_t n_embd_head_k; // and their elements
    uint32_t n_embd_head_v;
};

// The text for a return code: one line that names the cause and, where there is one, the cure.
LLAMA_H2O_API const char * llama_h2o_strerror(int32_t status);

// The first token of a model's file whose text an earlier one has, or -1: llama.cpp aborts on those. ctx is what
// gguf_init_from_file() returned.
LLAMA_H2O_API int32_t llama_h2o_find_repeated_token(const struct gguf_context * ctx, int64_t * token);

// Whether rows of this model can be evicted at all. Asks before memory is taken for a context.
LLAMA_H2O_API int32_t llama_h2o_supports(const struct llama_model * model);

// How many positions this model has learned an embedding for; 0 if it computes them. llama.cpp aborts on a position
// behind the last one.
LLAMA_H2O_API uint32_t llama_h2o_n_pos_learned(const struct llama_model * model);

// How many positions rotary embeddings may use if somebody wants a context of n_ctx tokens: those the model was trained on.
// A model with LongRoPE has factors for few positions and for many: if n_ctx is not more than its original context, the
// positions are those of that. llama_h2o_attach() chooses the factors by the n_pos that it is given.
LLAMA_H2O_API uint32_t llama_h2o_n_pos(const struct llama_model * model, uint32_t n_ctx);

// Bytes of host memory that llama.cpp takes for each cell of a context: what it notes of the cell, and the rows of K and V
// of the layers that do not lie on a device. That is the least: layers that see a window have fewer cells and are not
// counted. 0 without a KV cache. Types are those of ggml. llama.cpp takes the memory cell by cell, and asks nobody before.
LLAMA_H2O_API uint64_t llama_h2o_size_of_cell(
        const struct llama_model * model, int32_t type_k, int32_t type_v, bool offload_kqv);

// What a layer keeps in the memory of this context. Also for a context without eviction, and where rows cannot be evicted,
// but for kinds of memory that are not known here.
LLAMA_H2O_API int32_t llama_h2o_get_layer(
        const struct llama_context * ctx, int32_t il, struct llama_h2o_layer_info * layer);

// Attach eviction to a context that has not decoded anything yet. The context needs
// n_ctx >= capacity cells per sequence, and kv_unified = false if it has several sequences.
LLAMA_H2O_API int32_t llama_h2o_attach(struct llama_context * ctx, struct llama_h2o_params params);

// Never evict the first n_pinned positions of a sequence, from now on until the sequence is cleared.
// They take places of heavy rows; the budget stays what it is.
LLAMA_H2O_API int32_t llama_h2o_pin(struct llama_context * ctx, int32_t seq_id, uint32_t n_pinned);

// The same for spans of positions anywhere in the text, ascending and apart, in place of those given before. They may lie
// ahead of the text. Rows that were evicted come back at once, from the archive if it has them.
LLAMA_H2O_API int32_t llama_h2o_pin_spans(
        struct llama_context * ctx, int32_t seq_id, const struct llama_h2o_span * spans, uint32_t n_spans);

// Share the places of heavy rows fairly, from now on until the sequence is cleared: the text is cut at these positions,
// ascending and above 0, and every segment gets places in proportion to its length. n_starts = 0: no segments.
LLAMA_H2O_API int32_t llama_h2o_share_fairly(
        struct llama_context * ctx, int32_t seq_id, const int32_t * starts, uint32_t n_starts);

// Forget spans of positions, ascending and apart, until the sequence is cleared or its tail removed down to them: their rows
// leave every head, recent or not, are not archived, and are not found any more. Nothing else leaves, and positions go on. The
// newest position stays: decoding goes on behind it. What others have seen of them stays in their rows, in windows and states.
// Where heads had evicted some of these rows before, each another number, those that have more keep their oldest ones in the
// places that are left over; the next compactions take them first. The tail cannot be removed down to where its last position
// is a forgotten one.
LLAMA_H2O_API int32_t llama_h2o_forget(
        struct llama_context * ctx, int32_t seq_id, const struct llama_h2o_span * spans, uint32_t n_spans);

// The spans of a sequence that were forgotten, ascending and apart. Fills spans, of which there is room for n_spans, and returns
// how many there are.
LLAMA_H2O_API int32_t llama_h2o_get_forgotten(
        struct llama_context * ctx, int32_t seq_id, struct llama_h2o_span * spans, uint32_t n_spans);

// Set the rows of a sequence without text to zero. To be called after a text with rows that are no numbers: masked cells
// count by a weight of 0 in the next one, and 0 times those is no number either.
LLAMA_H2O_API int32_t llama_h2o_zero_rows(struct llama_context * ctx, int32_t seq_id);

// Remember what the policy has collected at the present end of a sequence. Removing the tail down to exactly such a mark
// restores it, and the text goes on bit for bit as if the tail had never been there. A few marks are kept, the oldest one
// goes. Removing a tail drops those behind it; compactions, re-bases, clearing, loading a state, a larger cache and
// removing anything else drop all.
LLAMA_H2O_API int32_t llama_h2o_mark(struct llama_context * ctx, int32_t seq_id);

// The last marked position up to pos, as a number of tokens, or 0.
LLAMA_H2O_API int32_t llama_h2o_marked(struct llama_context * ctx, int32_t seq_id, int32_t pos);

// Ask the breaker whether to break off, from now on and as long as the CPU computes; null: nobody. It stays the caller's.
// llama_decode() then returns 2, soon after, and the physical batch that was broken off has left no trace: its tokens are
// gone, and what the policy collected is bit for bit what it was. What was decoded before it stays, and so does what made
// room for it: compactions and re-bases. Where layers see a window, the text goes on to rounding. What was collected is
// copied before every batch: not worth it for a token.
// Returns 1, or 0 where nothing can be broken off: devices compute all layers, without an archive; states of recurrent layers
// are written over; a kind of memory is not known; or the context has an abort callback of somebody else's.
LLAMA_H2O_API int32_t llama_h2o_set_breaker(struct llama_context * ctx, struct llama_h2o_breaker * breaker);

// Give the context a larger cache for a while, of n_ctx cells per sequence, with all that it holds now, and go back
// to the old one. In between nothing is evicted, so that a prompt is read in full; at the end one compaction leaves
// the budget, unless all rows fit. Takes the memory of a full cache of that size; both reserve the graph again. The
// last logits stay. If either fails, the context is otherwise as it was.
LLAMA_H2O_API int32_t llama_h2o_enlarge(struct llama_context * ctx, uint32_t n_ctx);
LLAMA_H2O_API int32_t llama_h2o_shrink(struct llama_context * ctx);

// How much the tokens decoded since llama_h2o_forget_found() looked at evicted rows that they found, by their positions
// p0 <= p < p0 + n: squared shares of attention, added up over tokens, layers and query heads. Fills weights, [n].
LLAMA_H2O_API int32_t llama_h2o_get_found(
        struct llama_context * ctx, int32_t seq_id, int32_t p0, uint32_t n, double * weights);

LLAMA_H2O_API int32_t llama_h2o_forget_found(struct llama_context * ctx, int32_t seq_id);

// From now on the archive of a sequence lies in this file, which is made if there is none, and what it holds is written
// there. What a state that is loaded afterwards needs of a file that was there is held again; other pages of it are written
// over. States refer to the file, and hold only what is not in it. One context at a time has a file open.
// A file that cannot be opened, or is of another model, type or text, is refused; the archive then stays where it was.
//   id   [16], of the text; made by chance
LLAMA_H2O_API int32_t llama_h2o_archive_open(
        struct llama_context * ctx, int32_t seq_id, const char * path, const uint8_t * id);

// From now on the archive of a sequence lies in memory. What it held is dropped; the file stays as it is.
LLAMA_H2O_API int32_t llama_h2o_archive_close(struct llama_context * ctx, int32_t seq_id);

// What was written to the file is there after a power cut: before a state is saved that refers to it.
LLAMA_H2O_API int32_t llama_h2o_archive_flush(struct llama_context * ctx, int32_t seq_id);

// Whether states of a sequence hold all of its archive, whatever its file has, so that they can be loaded without it.
LLAMA_H2O_API int32_t llama_h2o_archive_in_states(struct llama_context * ctx, int32_t seq_id, bool all);

// What is wrong with the archive of a sequence, in one line: its file was refused, it lacks what a state needs, a page of it
// is damaged, or a disk is full and nothing is archived any more. Empty if nothing is. Valid until the next call.
LLAMA_H2O_API const char * llama_h2o_archive_trouble(struct llama_context * ctx, int32_t seq_id);

// What the user of a sequence should know: bits of llama_h2o_note.
LLAMA_H2O_API int32_t llama_h2o_get_notes(struct llama_context * ctx, int32_t seq_id);

// Also for a context without eviction: its budget, its scores and its counters are then 0.
LLAMA_H2O_API int32_t llama_h2o_get_stats(
        const struct llama_context * ctx, int32_t seq_id, struct llama_h2o_stats * stats);

// Most tokens of a text that are attended to one query at a time, which rounds otherwise than more of them at once do. 0
// where ggml's ops attend in all layers.
LLAMA_H2O_API int32_t llama_h2o_n_few(struct llama_context * ctx);

// The name of a GPU, or of another device that layers can run on, apart from the CPU; null if there are not so many.
LLAMA_H2O_API const char * llama_h2o_device_name(int32_t i);

// Bytes that the context takes of the memory of GPUs and other devices: its model's weights, its caches and its work
// space. Also for a context without eviction.
LLAMA_H2O_API int64_t llama_h2o_device_bytes(const struct llama_context * ctx);

// The rows that one layer holds for a sequence. The score is the attention collected, if the policy looks at it, or else
// what the policy gave the row at the last compaction. Fills pos and score, both [n_head_kv][n_rows] with
// n_rows = llama_h2o_stats.n_used, and returns n_head_kv. The rows of a head are in cell order,
// which is not the order of the text. With pos and score both null it only returns n_head_kv, and
// 0 for a layer without a KV cache.
LLAMA_H2O_API int32_t llama_h2o_get_rows(
        struct llama_context * ctx, int32_t seq_id, int32_t il, uint32_t n_rows, int32_t * pos, float * score);

#ifdef __cplusplus
}
#endif
