/* kvc.h - the public C API of kvcompress: status, formats, pool, table, codecs, attention.
 *
 * libc only; no torch, no Python. Shape letters: B batch, H KV heads, G query heads per KV head, Hq = G*H,
 * T new tokens, D head dim (key_dim, value_dim), P columns of a table. Sizes are int64_t; strides count elements.
 * Functions that can fail return a kvc_status and then leave all as it was, but for what they were to fill and what
 * they say; kvc_error() says what was wanted, what was got, and a hint. No function keeps a pointer to its arguments
 * unless it says so. Outputs share no memory with inputs; indices (tables, rows, seals, moves) are read once, so that what
 * is checked is what is followed.
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

/* Text of the last failure in this thread ("" if none); valid until the next failure in it. */
const char *kvc_error(void);

/* ---------------------------------------------------------------- memory */

/* Makes the n-th allocation from now fail (1 = the next one); 0 turns it off. For tests; process-wide. */
void kvc_alloc_fail_at(int64_t n);
/* Blocks that are allocated now and not yet freed (pool slabs not included). */
int64_t kvc_alloc_live(void);
/* Fills new memory, pages too, with bytes of ones (NaN), so that tests see who reads what nobody wrote. */
void kvc_alloc_poison(bool on);

/* ---------------------------------------------------------------- formats and CPU */

typedef struct kvc_format_info {
    const char *name, *about;
    int bits, group, keys, rotated, dim_multiple; /* keys: enum kvc_keys; the rest as in formats.def */
} kvc_format_info;

/* NULL for a code that is no format. */
const kvc_format_info *kvc_format_get(int format);
/* KVC_OK if `format` can store rows of `dim`; else KVC_E_VALUE with the reason. */
kvc_status kvc_format_check(int format, int64_t dim);
/* Bytes of a page, metadata included. */
int64_t kvc_page_bytes(int key, int value, int64_t key_dim, int64_t value_dim, int64_t page_size);

/* The kernel level in use, chosen once: the best that runs here, or KVCOMPRESS_ISA (KVC_E_VALUE: it names none of them). */
kvc_status kvc_isa(const char **name);
/* Name of the i-th level that is compiled in and runs on this CPU, best last; NULL past the end. */
const char *kvc_isa_available(int i);
/* Name of the i-th feature of CPUs that levels ask for, and whether it and the system offer it; NULL past the last. */
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

/* Reserves address space for `max_bytes` (0: the machine's memory); takes memory only as pages are used. One base
 * address for life: nothing moves. Threads may share a pool; whoever takes a reference holds one already. */
kvc_status kvc_pool_new(int64_t max_bytes, kvc_pool **pool);
/* In the address space that all such pools of the process share: one base, extents that cover others' memory. */
kvc_status kvc_pool_new_shared(kvc_pool **pool);
/* Pools are counted too; the last release gives everything back. */
kvc_pool *kvc_pool_retain(kvc_pool *pool);
void kvc_pool_release(kvc_pool *pool);
/* A slot of at least `bytes`, aligned to KVC_ALIGN, contents undefined, one reference. O(1). */
kvc_status kvc_pool_alloc(kvc_pool *pool, int64_t bytes, int64_t *offset);
/* Until told otherwise, slots of `bytes` in all will be written at once: from 4 MiB in huge pages, for fewer faults. */
void kvc_pool_expect(kvc_pool *pool, int64_t bytes);
/* Up to so many free bytes stay with the pool, for appends to come: new memory costs more than the pages written into it.
 * 0, as at first: freed memory goes back. A lower number gives what is empty back at once. KVC_E_VALUE: below 0. */
kvc_status kvc_pool_keep(kvc_pool *pool, int64_t bytes);
/* The extent (shared: what slabs cover) grows no further, for who reads memory that stays. KVC_E_VALUE: it is more. */
kvc_status kvc_pool_limit(kvc_pool *pool, int64_t bytes);
/* One reference more, or less; the slot is freed with the last. `offset` must come from kvc_pool_alloc. */
void kvc_pool_ref(kvc_pool *pool, int64_t offset);
void kvc_pool_unref(kvc_pool *pool, int64_t offset);
int64_t kvc_pool_refs(const kvc_pool *pool, int64_t offset);
/* Bytes of the slot in use that begins at `offset`; 0 if none does. */
int64_t kvc_pool_bytes(const kvc_pool *pool, int64_t offset);
uint8_t *kvc_pool_base(const kvc_pool *pool);
/* Bytes from the base that slabs reach to: the length of the arena that ops are given. Never shrinks. */
int64_t kvc_pool_extent(const kvc_pool *pool);
void kvc_pool_get_stats(const kvc_pool *pool, kvc_pool_stats *stats);
/* Checks every invariant (counts, free lists, sums); for tests. */
kvc_status kvc_pool_check(const kvc_pool *pool);

/* ---------------------------------------------------------------- table: the pages of B sequences in one layer */

typedef struct kvc_spec {
    int64_t heads, key_dim, value_dim; /* H, Dk, Dv */
    int64_t page_size, sinks, recent;  /* tokens */
    int raw, key, value;               /* formats: of open pages; of sealed pages */
    bool direct;                       /* append straight into sealed pages (no open page) */
} kvc_spec;

/* Pages whose first token is stored at an index below `end` are sealed in these formats. */
typedef struct kvc_span {
    int64_t end;
    int key, value;
} kvc_span;
#define KVC_MAX_SPANS 16

/* State of a layer. The arrays are read by ops as tensors; `version` counts the times that one of them moved (growth,
 * another batch size, an eviction, slots or scores that come or go). A reader that outlives a move holds its array by
 * kvc_array_retain. Ht = 1: a uniform table, an entry names a group of H consecutive pages, head h at entry + h * page
 * bytes. Ht = H: a ragged one, each head has pages and a length of its own; a table becomes ragged when heads first
 * keep different tokens, and uniform again by reset. */
typedef struct kvc_table {
    kvc_pool *pool;
    kvc_spec spec;
    int64_t batch, table_heads, columns; /* B, Ht, P (capacity) */
    int64_t *entries;                    /* [B, Ht, P] KVC_NONE or an entry */
    int64_t *rows;                       /* [B, Ht, 2] stored tokens (dead ones included), slot of token 0 */
    int32_t *slots;         /* [B, Ht, capacity] slot of each stored token, -1 dead; NULL while slot = start + index */
    int64_t slot_capacity;  /* tokens; 0 while slots is NULL */
    float *scores;          /* [B, H, capacity] a number for each stored token, 0 for new ones; NULL unless `scored` */
    int64_t score_capacity; /* tokens */
    bool scored;
    int64_t seen;      /* slots so far, pads included */
    int64_t rewritten; /* tokens of pages that evictions wrote anew, for each group of heads that an entry names */
    int64_t version;
    struct kvc_plan *plan; /* the append or eviction under way, or NULL */
    kvc_span spans[KVC_MAX_SPANS];
    int64_t n_spans;
} kvc_table;

/* One reference more, or less, to an array of a table; it is freed with the last. NULL is fine. */
void *kvc_array_retain(void *array);
void kvc_array_release(void *array);

/* Checks the spec (KVC_E_VALUE). The pool is retained. */
kvc_status kvc_table_new(kvc_pool *pool, const kvc_spec *spec, int64_t batch, kvc_table **table);
void kvc_table_free(kvc_table *table);
/* A table that shares all pages of this one (counted). */
kvc_status kvc_table_clone(const kvc_table *table, kvc_table **out);

/* Room for `tokens` tokens a row: `entries` and `rows` then move only for more, another batch size, or evictions. */
kvc_status kvc_table_reserve(kvc_table *table, int64_t tokens);

/* Precision by position: pages that are sealed from now on take the formats of the first span that reaches them, and the
 * spec's behind the last. Ends must ascend. KVC_E_VALUE for a format that the spec would not take. */
kvc_status kvc_table_set_spans(kvc_table *table, const kvc_span *spans, int64_t n);

/* An append in three steps, so that a failure in the middle changes nothing:
 * plan      finds room for T tokens a row: new pages, private copies of shared open pages, pages to seal.
 *           `real` is [B, T] (1 token, 0 pad; pads are never stored) or NULL for all real.
 *           Afterwards entries are those after the append; rows still have the length before it.
 * (the op seals, writes and attends)
 * commit    releases the pages that were sealed, advances rows, slots and seen.
 * rollback  puts all back as before plan. Both do nothing without a plan. */
kvc_status kvc_table_plan(kvc_table *table, int64_t T, const uint8_t *real);
void kvc_table_commit(kvc_table *table);
void kvc_table_rollback(kvc_table *table);
/* Pages to seal in the append under way: [n, 2] (raw entry, sealed entry). */
const int64_t *kvc_table_seals(const kvc_table *table, int64_t *n);
/* Does the append under way go into pages that are there, and seal none? Entries are then as before it. */
bool kvc_table_only_fills(const kvc_table *table);

/* A token (of every head that an entry names) that an eviction copies: from page to page, in the codes that it has
 * where the page's format keeps none for the page as a whole; else the page is written anew from all that comes to it.
 * from_token -1: the whole page as it is. */
typedef struct kvc_move {
    int64_t line; /* moves of a line are done in order */
    int64_t from, from_token, to, to_token;
    int64_t layout; /* tokens that both pages are laid out for */
} kvc_move;

/* Formats that closed pages shall have: (key << 8 | value) by column, [B, heads, columns], heads as an eviction's; -1: as
 * it is. A page that has others is written anew in these, with what stays of it, together with the other pages of its
 * line that shall have the same; but not a shared page. Never to raw. */
typedef struct kvc_demotion {
    const int32_t *formats;
    int64_t columns;
} kvc_demotion;

/* An eviction in three steps, as an append:
 * plan_evict  `demote` may be NULL. `keep` is [B, heads, width], by index: 0 drops a stored token. heads 1: all heads of a uniform table alike;
 *             H: each head's own. Sinks (column 0) must be kept. Afterwards nothing has changed yet.
 * (the op copies: kvc_compact, with the store's table_heads 1 if `heads` of kvc_table_moves is H)
 * commit      puts the new arrays in place, lets pages go that nobody needs; rollback forgets it all.
 * Tokens of closed pages are mixed; the open page keeps its order. Pages that others share are never written. Pages with
 * statistics over their tokens, and shared ones, keep dead tokens (slot -1) until more than 1/4 of what such pages of the
 * row hold is dead; then the emptiest are written anew until at most 1/16 is. */
kvc_status kvc_table_plan_evict(kvc_table *table, const uint8_t *keep, const kvc_demotion *demote, int64_t heads,
                                int64_t width);
const kvc_move *kvc_table_moves(const kvc_table *table, int64_t *n, int64_t *heads);
/* Would the planned eviction change anything? */
bool kvc_table_evicts(const kvc_table *table);
/* Scores of stored tokens from now on (all 0), or none. */
kvc_status kvc_table_keep_scores(kvc_table *table, bool on);
/* scores = scores * fade + mass, [B, H, width], by index; width at most that of the scores. */
kvc_status kvc_table_observe(kvc_table *table, const float *mass, int64_t width, float fade);
/* Stored tokens that live, of all heads of each sequence: live [B]. */
void kvc_table_live(const kvc_table *table, int64_t *live);
/* Stored tokens of the longest line, dead ones included. */
int64_t kvc_table_longest(const kvc_table *table);

/* What a table holds, as a file, a prefix or another tier kept it: arrays as in kvc_table, each of its own. */
typedef struct kvc_contents {
    int64_t batch, table_heads, columns, slot_capacity, score_capacity, seen;
    const int64_t *entries, *rows;
    const int32_t *slots; /* or NULL */
    const float *scores;  /* or NULL */
} kvc_contents;

/* An empty table (seen 0) takes over `contents`; one reference to each entry used passes to it. Everything is checked,
 * down to the bytes of each page's slot: a file may lie. KVC_E_VALUE then, and nothing has changed. */
kvc_status kvc_table_restore(kvc_table *table, const kvc_contents *contents);

/* Forgets all tokens whose slot is >= `seen`. In a raw page exact; in a sealed page the codes of the tokens that
 * stay are kept as they are and the rest of that page is dead. KVC_E_VALUE unless 0 <= seen <= table->seen. */
kvc_status kvc_table_crop(kvc_table *table, int64_t seen);
/* Frees the full pages at the front of each row whose tokens all have slots below before[b]; never the last page of a row.
 * The slot of a row's first token becomes that of the first one left; chunk (0: none; else a multiple of page_size):
 * equal to the old one modulo `chunk`. dropped: pages, over all rows. KVC_E_VALUE with sinks or spans. */
kvc_status kvc_table_drop(kvc_table *table, const int64_t *before, int64_t chunk, int64_t *dropped);
/* New batch: row i is old row index[i] (pages shared, counted). KVC_E_VALUE for an index out of range. */
kvc_status kvc_table_select(kvc_table *table, const int64_t *index, int64_t n);
/* The same of `count` tables, the layers of a model: all of them, or none. */
kvc_status kvc_tables_select(kvc_table *const *tables, int64_t count, const int64_t *index, int64_t n);
/* Drops all tokens; keeps the arrays. A new batch size if `batch` > 0. */
kvc_status kvc_table_reset(kvc_table *table, int64_t batch);

typedef struct kvc_table_stats {
    int64_t seen, kept; /* slots; live stored tokens over all rows (of heads that differ, their mean, rounded up) */
    int64_t rewritten;  /* tokens that were written anew (see kvc_table_plan_evict) */
    int64_t sealed_bytes, open_bytes, sink_bytes; /* of pages, each counted once per table entry group */
    int64_t table_bytes;                          /* entries, rows, slots */
    int64_t sealed_pages, open_pages;
} kvc_table_stats;
void kvc_table_get_stats(const kvc_table *table, kvc_table_stats *stats);

/* ---------------------------------------------------------------- codecs */

/* Element types of dense arrays. */
typedef enum kvc_dtype { KVC_F32 = 0, KVC_F16, KVC_BF16 } kvc_dtype;

/* Quantizes n contiguous rows of D elements in natural order, without centring: codes are n * D * bits / 8 bytes
 * (below 8 bits byte j of a row holds dims j, D*bits/8 + j, .., lowest bits first), scales the rows' metadata side by
 * side (kvc_meta_planes elements of kvc_meta_size bytes a row: for each group its scale, then its zero point). Formats
 * with K's metadata per channel take V's. KVC_E_VALUE on NaN or Inf (codes and scales are then undefined), on a raw
 * format, on a D that the format does not take. */
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
 * `dtype`. In fp32, the same bytes on every level. KVC_E_VALUE for a D or an H that there cannot be. */
kvc_status kvc_map_heads(const kvc_dense *x, int64_t B, int64_t query_heads, int64_t T, int64_t D, const float *by,
                         int64_t H, void *out, kvc_dtype dtype, const kvc_exec *exec);

/* Packs full pages: k [B, H, T, Dk], v [B, H, T, Dv], T a multiple of page_size, into contiguous
 * pages [B, T / page_size, H, page bytes]. */
kvc_status kvc_pack(int key, int value, const kvc_dense *k, const kvc_dense *v, int64_t B, int64_t H, int64_t T,
                    int64_t key_dim, int64_t value_dim, int64_t page_size, uint8_t *pages, const kvc_exec *exec);

/* Rows that another engine quantized: codes [B, H, T, D] as a page's 8-bit format stores them (int8: code + 128), strides
 * in bytes (B, H, T), the last dim contiguous; fp16 scales, contiguous [B, H, T]. */
typedef struct kvc_coded {
    const uint8_t *codes;
    int64_t stride[3];
    const uint16_t *scales;
} kvc_coded;

/* Packs them into pages as kvc_pack does; codes and scales are copied. KVC_E_VALUE for a format that is not int8,
 * fp8_e4m3 or fp8_e5m2, for codes that are NaN or Inf, for scales that are not finite or below 0. */
kvc_status kvc_pack_codes(int key, int value, const kvc_coded *k, const kvc_coded *v, int64_t B, int64_t H, int64_t T,
                          int64_t key_dim, int64_t value_dim, int64_t page_size, uint8_t *pages, const kvc_exec *exec);

/* ---------------------------------------------------------------- attention */

/* The stored tokens of B sequences, as tensors give them: see kvc_table. */
typedef struct kvc_store {
    uint8_t *arena;
    int64_t arena_bytes;
    const int64_t *table; /* [B, Ht, P], Ht = 1 (entries name groups of H pages) or H (a page per head) */
    const int64_t *rows;  /* [B, Ht, 2] stored tokens before this call, slot of token 0 */
    const int32_t *slots; /* [B, Ht, slot_capacity] or NULL */
    int64_t slot_capacity;
    int64_t batch, heads, table_heads, columns; /* B, H, Ht, P */
    int64_t key_dim, value_dim, page_size, sinks;
} kvc_store;

/* Those of a table, as they are: good until an array moves (`version`) or tokens come or go. */
kvc_store kvc_table_store(const kvc_table *table);

/* Seals, attends and appends in one call:
 * 1. every pair of `seals` is encoded: raw entry -> sealed entry (which the table names already). A raw page may be
 *    one that this call fills: it is sealed with the new tokens in it, and still read raw by this call's queries;
 * 2. q attends to the stored tokens, and exactly (dense) to the call's own k and v, by slot: causal, inside the
 *    window, never to pads or dead tokens; a query that sees nothing gives zeros and lse = -inf, one with NaN or Inf
 *    in it, or whose scores overflow, gives NaN in both;
 * 3. k and v of real tokens are written behind the stored ones, in the format of the entry they fall on.
 * Shapes, and entries against the arena, are checked before the first byte is written. What is wrong with k and v (NaN,
 * Inf: KVC_E_VALUE), and KVC_E_MEMORY, may come later: then sealed entries of `seals` and bytes behind the stored
 * tokens may have been written, nothing that `rows` reaches once the table names the raw entries again.
 * T = 0: only attends; Tq = 0: only appends. Query i has slot seen + T - Tq + i. */
typedef struct kvc_attend_args {
    kvc_store store;
    kvc_dense q, k, v;          /* [B, Hq, Tq, Dk], [B, H, T, Dk], [B, H, T, Dv] */
    bool latent;                /* MLA: a key is k's Dk dims, then v's; its value is k's. q has Dk + Dv dims, out Dk */
    int64_t query_heads, Tq, T; /* Hq */
    const uint8_t *real;        /* [B, T] or NULL */
    const int64_t *seals;       /* [n_seals, 2] */
    int64_t n_seals, seen;      /* slot of own token 0 */
    int64_t window; /* slots a query sees, itself included; 0: all; -n: those of its chunk, of n from a row's token 0 */
    float scale, softcap; /* softcap 0 = none */
    const float *s_aux;   /* [Hq] attention-sink logits, or NULL */
    kvc_dense out;        /* [B, Hq, Tq, Dv] in any dtype; */
    float *lse;           /* [B, Hq, Tq] natural log, without s_aux */
    /* NULL, or fp32 [B, H, mass_width], mass_width at least the tokens of the longest row after the call: for each token in
     * stored order, own ones behind the stored, the sum over Tq and the group of exp(score - lse); 0 behind the last.
     * Queries of pads, and those with NaN or Inf in them, add nothing. Source: H2O (Zhang et al. 2023), accumulated attention. */
    float *mass;
    int64_t mass_width;
    /* NULL, or [B, Hq, Tq]: the mass is against this lse, of all tokens there are, instead of that of these ones alone (the
     * rest is elsewhere: another rank). Then only queries whose lse is not finite add nothing, whatever `real` says. */
    const float *mass_lse;
    kvc_exec exec;
} kvc_attend_args;

kvc_status kvc_attend(const kvc_attend_args *args);
/* The same, with feedback where whole pages of rotated formats are written: NULL, or of K and of V [H][dim + 1][dim]. Row d of a head's matrix says what an error in each dim behind d weighs in d, 0 up to d; the row
 * behind the last one what an error in each dim costs. Codes are then chosen from the last dim to the first, each to make up
 * for the errors behind it, so that rows lose least in the metric that this is the factor of (L D L^T; L^T without its
 * diagonal of ones, D). Source: Babai's nearest plane, as in GPTQ (arXiv 2210.17323). */
kvc_status kvc_attend_feedback(const kvc_attend_args *args, const float *key_feedback, const float *value_feedback);

/* Does the moves of an eviction (kvc_table_moves). Of the store only the arena, H, table_heads, the dims and the page
 * geometry count. Moves are checked before the first byte is written, each alone and all together: no two to one token, a
 * page that is written anew in one run, nothing that two lines write or one writes and another reads; KVC_E_MEMORY may come later, and then only new
 * pages have been written. */
kvc_status kvc_compact(const kvc_store *store, const kvc_move *moves, int64_t n, const kvc_exec *exec);

/* Numbers of stored tokens, by index, without a dense copy of them: out [B, H, width], 0 where no token lives.
 * KVC_KEY_NORM, KVC_VALUE_NORM: length of the row; KVC_KEY_COSINE: cosine of K with the mean of the head's keys, each of
 * length 1 (0 for a key of zeros). */
enum kvc_token_score { KVC_KEY_NORM, KVC_VALUE_NORM, KVC_KEY_COSINE, KVC_TOKEN_SCORES };
kvc_status kvc_score_tokens(const kvc_store *store, int kind, int64_t width, float *out, const kvc_exec *exec);

/* Reads stored tokens back, dense, at their slots: k [B, H, width, Dk], v [B, H, width, Dv], slots 0..width-1; what
 * is not stored is zero. Finite values stay finite in any dtype. */
kvc_status kvc_read(const kvc_store *store, int64_t width, const kvc_dense *k, const kvc_dense *v,
                    const kvc_exec *exec);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
