/* kvc.h - the public C API of kvcompress: status, formats, pool, table, codecs, attention.
 *
 * libc only; no torch, no Python. Shape letters: B batch, H KV heads, G query heads per KV head, Hq = G*H,
 * T new tokens, D head dim (key_dim, value_dim), P columns of a table. Sizes are int64_t; strides count elements.
 * Functions that can fail return a kvc_status. On failure nothing changes except outputs and what their comment says;
 * kvc_error() returns a message (expected, got, hint). No function keeps a pointer to its arguments unless its comment
 * says so. Outputs must not overlap inputs; indices (tables, rows, seals, moves) are read only once, so that checked
 * values cannot change before they are used.
 */
#ifndef KVC_H
#define KVC_H

#include "page.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef KVC_EXPORT /* building the shared library */
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- status */

typedef enum kvc_status { KVC_OK = 0, KVC_E_VALUE, KVC_E_TYPE, KVC_E_MEMORY } kvc_status;

/* Message of the last failure in this thread ("" if none); valid until its next failure. */
const char *kvc_error(void);

/* ---------------------------------------------------------------- memory */

/* Makes the n-th allocation from now fail (1 = the next one); 0 turns it off. For tests; process-wide. */
void kvc_alloc_fail_at(int64_t n);
/* Number of blocks that are allocated and not freed (without pool slabs). */
int64_t kvc_alloc_live(void);
/* Fills new memory, including pages, with ones (NaN), so that tests detect reads of uninitialized memory. */
void kvc_alloc_poison(bool on);

/* ---------------------------------------------------------------- formats and CPU */

typedef struct kvc_format_info {
    const char *name, *about;
    int bits, group, keys, rotated, dim_multiple; /* keys: enum kvc_keys; the rest as in formats.def */
} kvc_format_info;

/* NULL for an unknown code. */
const kvc_format_info *kvc_format_get(int format);
/* KVC_OK if `format` supports rows of `dim`; else KVC_E_VALUE with the reason. */
kvc_status kvc_format_check(int format, int64_t dim);
/* KVC_OK if pages may hold `page_size` tokens; else KVC_E_VALUE, with `op` in its message. */
kvc_status kvc_page_size_check(int64_t page_size, const char *op);
/* Bytes of a page, metadata included; 0 if a format, its dim or the page size is not supported. */
int64_t kvc_page_bytes(int key, int value, int64_t key_dim, int64_t value_dim, int64_t page_size);

/* The kernel level in use, selected once: the best supported one, or KVCOMPRESS_ISA (KVC_E_VALUE if it is not available). */
kvc_status kvc_isa(const char **name);
/* Name of the i-th level that is compiled in and supported by this CPU, best last; NULL after the last. */
const char *kvc_isa_available(int i);
/* Name of the i-th CPU feature that levels need, and whether CPU and system support it; NULL after the last. */
const char *kvc_cpu_feature(int i, bool *there);

/* ---------------------------------------------------------------- threads */

/* How to run `body(begin, end, context)` over [0, n) in parallel. `run` NULL: in the calling thread. */
typedef struct kvc_exec {
    void (*run)(int64_t n, void (*body)(int64_t begin, int64_t end, void *context), void *context);
} kvc_exec;

/* ---------------------------------------------------------------- pool: pages in slabs, with reference counts */

typedef struct kvc_pool kvc_pool;

typedef struct kvc_pool_stats {
    int64_t reserved; /* bytes of address space */
    int64_t resident; /* bytes held from the system: pages in use and slack */
    int64_t used;     /* bytes of slots with references */
    int64_t slots, slabs;
} kvc_pool_stats;

/* Reserves address space for `max_bytes` (0: the machine's memory); memory is allocated as pages are used. The base
 * address never changes. Thread-safe; a thread that adds a reference must already hold one. */
kvc_status kvc_pool_new(int64_t max_bytes, kvc_pool **pool);
/* A pool in the address space that all such pools of the process share: one base; extents include memory of other pools. */
kvc_status kvc_pool_new_shared(kvc_pool **pool);
/* Pools are reference-counted; the last release frees everything. */
kvc_pool *kvc_pool_retain(kvc_pool *pool);
void kvc_pool_release(kvc_pool *pool);
/* A slot of at least `bytes`, aligned to KVC_ALIGN, contents undefined, one reference. O(1). */
kvc_status kvc_pool_alloc(kvc_pool *pool, int64_t bytes, int64_t *offset);
/* Announces that new slots of `bytes` in total will be written at once: from 4 MiB on they use huge pages (fewer faults). */
void kvc_pool_expect(kvc_pool *pool, int64_t bytes);
/* Keeps up to `bytes` free bytes resident for later appends, since new memory costs more than writing pages into it. 0,
 * the default: freed memory is returned to the system. A lower number returns memory at once. KVC_E_VALUE below 0. */
kvc_status kvc_pool_keep(kvc_pool *pool, int64_t bytes);
/* Limits the extent (shared pools: the slabs), for readers of memory at fixed addresses. KVC_E_VALUE if it is larger. */
kvc_status kvc_pool_limit(kvc_pool *pool, int64_t bytes);
/* Adds or removes a reference; the last one frees the slot. `offset` must come from kvc_pool_alloc. */
void kvc_pool_ref(kvc_pool *pool, int64_t offset);
void kvc_pool_unref(kvc_pool *pool, int64_t offset);
int64_t kvc_pool_refs(const kvc_pool *pool, int64_t offset);
/* Bytes of the slot in use at `offset`; 0 if there is none. */
int64_t kvc_pool_bytes(const kvc_pool *pool, int64_t offset);
uint8_t *kvc_pool_base(const kvc_pool *pool);
/* Bytes from the base to the end of the last slab: the length of the arena for ops. Never shrinks. */
int64_t kvc_pool_extent(const kvc_pool *pool);
void kvc_pool_get_stats(const kvc_pool *pool, kvc_pool_stats *stats);
/* Checks every invariant (counts, free lists, sums); for tests. */
kvc_status kvc_pool_check(const kvc_pool *pool);

/* ---------------------------------------------------------------- table: the pages of B sequences in one layer */

typedef struct kvc_spec {
    int64_t heads, key_dim, value_dim; /* H, Dk, Dv */
    int64_t page_size, sinks, recent;  /* tokens */
    int raw, key, value;               /* formats: of open pages; of sealed pages */
    bool direct;                       /* append to sealed pages directly (no open page) */
} kvc_spec;

/* Formats of sealed pages whose first token has an index below `end`. */
typedef struct kvc_span {
    int64_t end;
    int key, value;
} kvc_span;
#define KVC_MAX_SPANS 16

/* State of a layer. Ops read the arrays as tensors; `version` counts how often one of them was reallocated (growth,
 * another batch size, an eviction, added or removed slots or scores). A reader that outlives that keeps its array with
 * kvc_array_retain. Ht = 1: a uniform table, where an entry refers to H consecutive pages, head h at entry + h * page
 * bytes. Ht = H: a ragged table, where each head has its own pages and length; a table becomes ragged when heads first
 * keep different tokens, and uniform again by a reset. */
typedef struct kvc_table {
    kvc_pool *pool;
    kvc_spec spec;
    int64_t batch, table_heads, columns; /* B, Ht, P (capacity) */
    int64_t *entries;                    /* [B, Ht, P] KVC_NONE or an entry */
    int64_t *rows;                       /* [B, Ht, 2] stored tokens (dead ones included), slot of token 0 */
    int32_t *slots;         /* [B, Ht, capacity] slot of each stored token, -1 dead; NULL while slot = start + index */
    int64_t slot_capacity;  /* tokens; 0 while slots is NULL */
    float *scores;          /* [B, H, capacity] score of each stored token, 0 for new ones; NULL unless `scored` */
    int64_t score_capacity; /* tokens */
    bool scored;
    int64_t seen;      /* slots so far, padding included */
    int64_t rewritten; /* tokens of pages that evictions rewrote, per entry (group of heads) */
    int64_t version;
    struct kvc_plan *plan; /* the planned append or eviction, or NULL */
    kvc_span spans[KVC_MAX_SPANS];
    int64_t n_spans;
} kvc_table;

/* Adds or removes a reference to an array of a table; the last one frees it. NULL is allowed. */
void *kvc_array_retain(void *array);
void kvc_array_release(void *array);

/* Checks the spec (KVC_E_VALUE). The pool is retained. */
kvc_status kvc_table_new(kvc_pool *pool, const kvc_spec *spec, int64_t batch, kvc_table **table);
void kvc_table_free(kvc_table *table);
/* A table that shares all pages of this one (counted). */
kvc_status kvc_table_clone(const kvc_table *table, kvc_table **out);

/* Capacity for `tokens` tokens per row: `entries` and `rows` are then reallocated only for more tokens, another batch size,
 * or evictions. */
kvc_status kvc_table_reserve(kvc_table *table, int64_t tokens);

/* Precision by position: pages sealed from now on get the formats of the first span that contains them, and those of the
 * spec after the last span. Ends must be ascending. KVC_E_VALUE for formats that the spec does not support. */
kvc_status kvc_table_set_spans(kvc_table *table, const kvc_span *spans, int64_t n);

/* An append in three steps, so that a failure in between changes nothing:
 * plan      allocates space for T tokens per row: new pages, private copies of shared open pages, pages to seal.
 *           `real` is [B, T] (1: token, 0: padding, which is never stored) or NULL for no padding.
 *           Afterwards entries are those after the append; rows still have the lengths before it.
 * (the op seals, writes and attends)
 * commit    frees the raw pages that were sealed, advances rows, slots and seen.
 * rollback  restores the state before plan. Both do nothing without a plan. */
kvc_status kvc_table_plan(kvc_table *table, int64_t T, const uint8_t *real);
void kvc_table_commit(kvc_table *table);
void kvc_table_rollback(kvc_table *table);
/* Pages to seal in the planned append: [n, 2] (raw entry, sealed entry). */
const int64_t *kvc_table_seals(const kvc_table *table, int64_t *n);
/* True if the planned append needs no new pages and seals none; entries are then unchanged. */
bool kvc_table_only_fills(const kvc_table *table);

/* A token (of all heads of an entry) that an eviction copies from page to page. Its codes are copied unchanged if the format
 * has no statistics over the page; else the page is re-encoded from all of its tokens. from_token -1: the whole page,
 * unchanged. */
typedef struct kvc_move {
    int64_t line; /* moves of a line are performed in order */
    int64_t from, from_token, to, to_token;
    int64_t layout; /* page size in tokens of both pages */
} kvc_move;

/* New formats of closed pages: (key << 8 | value) by column, [B, heads, columns], heads as in the eviction; -1: no change.
 * The remaining tokens of a page with other formats are re-encoded, together with other pages of its line with the same new
 * formats. Shared pages do not change. Raw is not allowed. */
typedef struct kvc_demotion {
    const int32_t *formats;
    int64_t columns;
} kvc_demotion;

/* An eviction in three steps, as an append:
 * plan_evict  `demote` may be NULL. `keep` is [B, heads, width], by index: 0 evicts a stored token. heads 1: all heads of a
 *             uniform table; H: for each head. Sinks (column 0) must be kept. Changes nothing yet.
 * (the op copies: kvc_compact, with the store's table_heads 1 if `heads` of kvc_table_moves is H)
 * commit      replaces the arrays and frees unused pages; rollback discards the plan.
 * The order of tokens in closed pages changes; open pages keep theirs. Shared pages are never written. Pages with
 * statistics over their tokens, and shared pages, keep dead tokens (slot -1) until more than 1/4 of the tokens of such pages
 * in the row are dead; then the emptiest pages are rewritten until at most 1/16 are. */
kvc_status kvc_table_plan_evict(kvc_table *table, const uint8_t *keep, const kvc_demotion *demote, int64_t heads,
                                int64_t width);
const kvc_move *kvc_table_moves(const kvc_table *table, int64_t *n, int64_t *heads);
/* True if the planned eviction changes anything. */
bool kvc_table_evicts(const kvc_table *table);
/* Enables scores of stored tokens (all 0), or removes them. */
kvc_status kvc_table_keep_scores(kvc_table *table, bool on);
/* scores = scores * decay + received (attention of a call), [B, H, width], by index; width at most that of the scores. */
kvc_status kvc_table_observe(kvc_table *table, const float *received, int64_t width, float decay);
/* Number of live stored tokens of each sequence, summed over heads: live [B]. */
void kvc_table_live(const kvc_table *table, int64_t *live);
/* Number of stored tokens of the longest line, dead ones included. */
int64_t kvc_table_longest(const kvc_table *table);

/* Contents of a table from a file, a prefix or a tier: arrays as in kvc_table. */
typedef struct kvc_contents {
    int64_t batch, table_heads, columns, slot_capacity, score_capacity, seen;
    const int64_t *entries, *rows;
    const int32_t *slots; /* or NULL */
    const float *scores;  /* or NULL */
} kvc_contents;

/* Fills an empty table (seen 0) with `contents`; takes over one reference to each entry. Everything is checked, including
 * the slot size of each page, as files may be malicious. On KVC_E_VALUE nothing changes. */
kvc_status kvc_table_restore(kvc_table *table, const kvc_contents *contents);

/* Removes all tokens with slot >= `seen`. Exact in raw pages; in a sealed page the remaining tokens keep their codes, and
 * the others are dead. KVC_E_VALUE unless 0 <= seen <= table->seen. */
kvc_status kvc_table_crop(kvc_table *table, int64_t seen);
/* Frees the full pages at the front of each row whose tokens all have slots below before[b], but never the last page. The
 * first slot of the row is updated; with chunk (0: none; else a multiple of page_size) it stays equal modulo `chunk`.
 * dropped: number of pages, over all rows. KVC_E_VALUE with sinks or spans. */
kvc_status kvc_table_drop(kvc_table *table, const int64_t *before, int64_t chunk, int64_t *dropped);
/* New batch: row i is old row index[i]; pages are shared. KVC_E_VALUE for an index out of range. */
kvc_status kvc_table_select(kvc_table *table, const int64_t *index, int64_t n);
/* The same for `count` tables (the layers of a model): for all of them, or none. */
kvc_status kvc_tables_select(kvc_table *const *tables, int64_t count, const int64_t *index, int64_t n);
/* Removes all tokens; keeps the arrays. batch > 0: new batch size. */
kvc_status kvc_table_reset(kvc_table *table, int64_t batch);

typedef struct kvc_table_stats {
    int64_t seen, kept; /* slots; live stored tokens over all rows (of heads that differ, their mean, rounded up) */
    int64_t rewritten;  /* rewritten tokens (see kvc_table_plan_evict) */
    int64_t sealed_bytes, open_bytes, sink_bytes; /* of pages, each counted once per table entry group */
    int64_t table_bytes;                          /* entries, rows, slots */
    int64_t sealed_pages, open_pages;
} kvc_table_stats;
void kvc_table_get_stats(const kvc_table *table, kvc_table_stats *stats);

/* ---------------------------------------------------------------- codecs */

/* Element types of dense arrays. */
typedef enum kvc_dtype { KVC_F32 = 0, KVC_F16, KVC_BF16 } kvc_dtype;

/* Quantizes n contiguous rows of D elements in natural order, without centering: codes are n * D * bits / 8 bytes
 * (below 8 bits byte j of a row holds dims j, D*bits/8 + j, .., lowest bits first), scales the metadata of the rows
 * (kvc_meta_planes elements of kvc_meta_size bytes per row: for each group its scale, then its zero point). Formats
 * with metadata of K per channel use that of V. KVC_E_VALUE for NaN or Inf (codes and scales are then undefined), a raw
 * format, or an unsupported D. */
kvc_status kvc_quantize(int format, kvc_dtype dtype, const void *x, int64_t n, int64_t D, uint8_t *codes,
                        uint8_t *scales, const kvc_exec *exec);
kvc_status kvc_dequantize(int format, const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t D, float *x,
                          const kvc_exec *exec);

/* A strided dense [B, H, T, D] array whose last dim is contiguous. */
typedef struct kvc_dense {
    void *data;
    int64_t stride[3]; /* elements: B, H, T */
    kvc_dtype dtype;
} kvc_dense;

/* x [B, query_heads, T, D], rows of head h times matrix h / (query_heads / H) of by [H][D][D] (fp32), to contiguous `out` of
 * `dtype`. Computed in fp32, bitwise equal on every level. KVC_E_VALUE for invalid D or H. */
kvc_status kvc_map_heads(const kvc_dense *x, int64_t B, int64_t query_heads, int64_t T, int64_t D, const float *by,
                         int64_t H, void *out, kvc_dtype dtype, const kvc_exec *exec);

/* Packs full pages: k [B, H, T, Dk], v [B, H, T, Dv], T a multiple of page_size, into contiguous
 * pages [B, T / page_size, H, page bytes]. */
kvc_status kvc_pack(int key, int value, const kvc_dense *k, const kvc_dense *v, int64_t B, int64_t H, int64_t T,
                    int64_t key_dim, int64_t value_dim, int64_t page_size, uint8_t *pages, const kvc_exec *exec);

/* Rows quantized by another engine: codes [B, H, T, D] as in an 8-bit page format (int8: code + 128), strides in bytes
 * (B, H, T), the last dim contiguous; fp16 scales, contiguous [B, H, T]. */
typedef struct kvc_coded {
    const uint8_t *codes;
    int64_t stride[3];
    const uint16_t *scales;
} kvc_coded;

/* Packs them into pages as kvc_pack; codes and scales are copied. KVC_E_VALUE for formats other than int8, fp8_e4m3 and
 * fp8_e5m2, for codes that are NaN or Inf, and for scales that are negative or not finite. */
kvc_status kvc_pack_codes(int key, int value, const kvc_coded *k, const kvc_coded *v, int64_t B, int64_t H, int64_t T,
                          int64_t key_dim, int64_t value_dim, int64_t page_size, uint8_t *pages, const kvc_exec *exec);

/* ---------------------------------------------------------------- attention */

/* The stored tokens of B sequences, as arrays: see kvc_table. */
typedef struct kvc_store {
    uint8_t *arena;
    int64_t arena_bytes;
    const int64_t *table; /* [B, Ht, P], Ht = 1 (an entry is a group of H pages) or H (a page per head) */
    const int64_t *rows;  /* [B, Ht, 2] stored tokens before this call, slot of token 0 */
    const int32_t *slots; /* [B, Ht, slot_capacity] or NULL */
    int64_t slot_capacity;
    int64_t batch, heads, table_heads, columns; /* B, H, Ht, P */
    int64_t key_dim, value_dim, page_size, sinks;
} kvc_store;

/* The store of a table; valid until an array is reallocated (`version`) or tokens are added or removed. */
kvc_store kvc_table_store(const kvc_table *table);

/* Seals, attends and appends in one call:
 * 1. every pair of `seals` is encoded: raw entry -> sealed entry (which the table already contains). The raw page may be
 *    filled by this call: it is sealed with the new tokens, and queries of this call still read it raw;
 * 2. q attends to the stored tokens, and exactly (dense) to the call's k and v, by slot: causal, within the window, never
 *    to padding or dead tokens; a query without visible tokens has out = 0 and lse = -inf, a query with NaN or Inf, or
 *    whose scores overflow, has NaN in both;
 * 3. k and v (without padding) are written after the stored tokens, in the format of their page.
 * Shapes and entries are checked before anything is written. Errors in k and v (NaN, Inf: KVC_E_VALUE) and KVC_E_MEMORY
 * may occur later: then sealed entries of `seals` and bytes after the stored tokens may have been written, but no stored
 * token, once the raw entries are restored in the table.
 * T = 0: only attends; Tq = 0: only appends. Query i has slot seen + T - Tq + i. */
typedef struct kvc_attend_args {
    kvc_store store;
    kvc_dense q, k, v;          /* [B, Hq, Tq, Dk], [B, H, T, Dk], [B, H, T, Dv] */
    bool latent;                /* MLA: the key is k and v, concatenated; the value is k. q has Dk + Dv dims, out Dk */
    int64_t query_heads, Tq, T; /* Hq */
    const uint8_t *real;        /* [B, T] or NULL */
    const int64_t *seals;       /* [n_seals, 2] */
    int64_t n_seals, seen;      /* seen: slot of the first new token */
    /* Sliding window in slots, the query included; 0: all; -n: chunks of n slots from a row's token 0. */
    int64_t window;
    float scale, softcap; /* softcap 0 = none */
    const float *s_aux;   /* [Hq] attention-sink logits, or NULL */
    kvc_dense out;        /* [B, Hq, Tq, Dv] in any dtype; */
    float *lse;           /* [B, Hq, Tq] natural log, without s_aux */
    /* Accumulated attention: NULL, or fp32 [B, H, accumulated_width], accumulated_width at least the tokens of the longest
     * row after the call: for each token in stored order, new ones last, the sum over Tq and the group of
     * exp(score - lse); 0 after the last. Queries of padding, or with NaN or Inf, do not count. Source: H2O (Zhang et al.
     * 2023). */
    float *accumulated;
    int64_t accumulated_width;
    /* NULL, or [B, Hq, Tq]: compute accumulated attention relative to this lse, which may cover more tokens (of other
     * ranks). Then queries count if their lse is finite, regardless of `real`. */
    const float *given_lse;
    kvc_exec exec;
} kvc_attend_args;

kvc_status kvc_attend(const kvc_attend_args *args);
/* kvc_attend with error feedback for full pages of rotated formats: for K and V NULL, or [H][dim + 1][dim]. Row d of a
 * head's matrix has the weight of an error in each later dim for dim d (0 up to d); the last row has the cost of an error in
 * each dim: the factorization L D L^T of a metric (L^T without its diagonal of ones, then D). Codes are chosen from the last
 * dim to the first, each compensating for the errors of later dims, which minimizes the error in this metric. Source:
 * Babai's nearest plane algorithm, as in GPTQ (arXiv 2210.17323). */
kvc_status kvc_attend_feedback(const kvc_attend_args *args, const float *key_feedback, const float *value_feedback);

/* Performs the moves of an eviction (kvc_table_moves). Uses only the arena, H, table_heads, the dims and the page geometry
 * of the store. All moves are checked before anything is written, separately and together: no two moves to one token, moves
 * to a re-encoded page are consecutive, no line writes a page that another line reads or writes. KVC_E_MEMORY may occur
 * later; then only new pages have been written. */
kvc_status kvc_compact(const kvc_store *store, const kvc_move *moves, int64_t n, const kvc_exec *exec);

/* Scores of stored tokens, by index, without a dense copy: out [B, H, width], 0 where there is no live token.
 * KVC_KEY_NORM, KVC_VALUE_NORM: L2 norm of the row; KVC_KEY_COSINE: cosine of K and the mean of the head's normalized keys
 * (0 for a zero key). */
enum kvc_token_score { KVC_KEY_NORM, KVC_VALUE_NORM, KVC_KEY_COSINE, KVC_TOKEN_SCORES };
kvc_status kvc_score_tokens(const kvc_store *store, int kind, int64_t width, float *out, const kvc_exec *exec);

/* Dequantizes stored tokens, by slot: k [B, H, width, Dk], v [B, H, width, Dv], slots 0..width-1; zero for slots that are
 * not stored. Finite values stay finite in any dtype. */
kvc_status kvc_read(const kvc_store *store, int64_t width, const kvc_dense *k, const kvc_dense *v,
                    const kvc_exec *exec);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
