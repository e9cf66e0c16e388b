/* varlen.c - runs an engine's batch through the attention driver: block tables become entries, lengths become rows.
 * Which pages are open and which are sealed follows from the lengths. */
#include "base/alloc.h"
#include "base/dtype.h"
#include "blocks.h"
#include "progress.h"

#include <string.h>

#define OP "attend_varlen"

typedef struct progress {
    kvc_progress is;
    int64_t passes; /* number of passes it takes part in; always the last ones */
} progress;

/* Tokens of a sequence that one pass appends; progress before and after. */
typedef struct part {
    int64_t b;
    kvc_progress from, to;
} part;

typedef struct plan {
    const kvc_varlen_args *v;
    kvc_attend_args a;
    bool in_place;
    int64_t page_bytes, residual_bytes, ring; /* ring: residual pages per sequence */
    int64_t columns, passes;
    progress *at; /* [batch] */
    int64_t *table, *rows, *seals;
    kvc_segment *segments;
    /* For cache and residual blocks in the same memory: its size in blocks of the cache's stride, the index of the
     * first block of each, and the size (`span`) and distance (`step`) of residual blocks. `kinds`: two bits per block,
     * for what it is used as. */
    int64_t common, cache_first, residual_first, step, span;
    uint8_t *kinds;
    uint8_t *written; /* a bit per page of the cache, then of the residual: written by a sequence of this pass */
    int64_t written_bytes;
    void *room;
} plan;

static int64_t new_tokens(const kvc_varlen_args *v, int64_t b)
{
    return (int64_t)v->query_start[b + 1] - v->query_start[b];
}
static int64_t down(int64_t n, int64_t page) { return n / page * page; }

/* Number of sealed tokens when all of sequence b is stored. */
static int64_t sealed_at_last(const plan *p, int64_t b, int64_t sealed)
{
    const kvc_varlen_args *v = p->v;
    return kvc_varlen_sealed(sealed, v->seq_lens[b], v->draft_lens ? v->draft_lens[b] : 0, v->page_size);
}

/* Advances to the next part of sequence b; false if it was the last. */
static bool advance(const plan *p, int64_t b, kvc_progress *at)
{
    kvc_leads to = {p->v->seq_lens[b], sealed_at_last(p, b, at->sealed), p->v->page_size, p->ring, p->in_place};
    return kvc_progress_on(&to, at);
}

static kvc_status check_sequence(plan *p, int64_t b)
{
    const kvc_varlen_args *v = p->v;
    int64_t n = new_tokens(v, b), end = v->seq_lens[b], P = v->page_size;
    kvc_progress *at = &p->at[b].is;
    p->at[b] = (progress){0};
    KVC_CHECK(n >= 0 && v->query_start[b] >= 0 && v->query_start[b + 1] <= v->tokens, KVC_E_VALUE,
              OP ": query_start_loc: expected ascending numbers from 0 to %lld tokens, got %d and %d at sequence %lld",
              (long long)v->tokens, v->query_start[b], v->query_start[b + 1], (long long)b);
    if (n == 0) return KVC_OK;
    KVC_CHECK(end >= n && kvc_ceil_div(end, P) <= v->cache.table_width * v->cache.pages, KVC_E_VALUE,
              OP
              ": seq_lens: expected from %lld (its new tokens) to %lld (the block table's), got %lld at sequence %lld",
              (long long)n, (long long)(v->cache.table_width * v->cache.pages * P), (long long)end, (long long)b);
    KVC_CHECK(v->max_query == 0 || n <= v->max_query, KVC_E_VALUE,
              OP ": max_query_len: expected at least %lld (or 0: not known), got %lld", (long long)n,
              (long long)v->max_query);
    at->stored = v->stored ? end : end - n;
    p->at[b].passes = 1;
    p->columns = kvc_max(p->columns, 1 + kvc_ceil_div(end, P));
    if (p->in_place) return KVC_OK;
    int64_t drafts = v->draft_lens ? v->draft_lens[b] : 0;
    KVC_CHECK(drafts >= 0 && drafts <= n, KVC_E_VALUE,
              OP ": draft_lens: expected 0 to %lld (new tokens), got %lld at sequence %lld", (long long)n,
              (long long)drafts, (long long)b);
    int64_t before = end - n;
    at->sealed = v->sealed_lens ? v->sealed_lens[b] : down(before, P);
    KVC_CHECK(at->sealed >= 0 && at->sealed % P == 0 && at->sealed <= before, KVC_E_VALUE,
              OP ": sealed_lens: expected whole pages of at most %lld tokens, got %lld at sequence %lld",
              (long long)before, (long long)at->sealed, (long long)b);
    int64_t last = sealed_at_last(p, b, at->sealed);
    KVC_CHECK(kvc_max(end - last, before - at->sealed) <= p->ring * P, KVC_E_VALUE,
              OP ": residual: expected room for the %lld tokens of sequence %lld that are not sealed, got %lld pages",
              (long long)kvc_max(end - last, before - at->sealed), (long long)b, (long long)p->ring);
    if (v->stored) {
        at->sealed = last;
        return KVC_OK;
    }
    kvc_progress copy = *at;
    while (advance(p, b, &copy)) p->at[b].passes++;
    p->passes = kvc_max(p->passes, p->at[b].passes);
    return KVC_OK;
}

/* Cache and residual blocks may be in the same memory (one block pool); no block may be used as both. A residual block
 * may span several cache blocks, if an engine allocates large blocks and refers to the pages in them. */
static kvc_status check_common(plan *p)
{
    const kvc_blocks *c = &p->v->cache, *r = &p->v->residual;
    if (!c->blocks || !r->blocks || r->data >= kvc_blocks_end(c) || c->data >= kvc_blocks_end(r)) return KVC_OK;
    int64_t ahead = r->data - c->data, in = (ahead % c->stride + c->stride) % c->stride,
            first = (ahead - in) / c->stride;
    bool even = r->blocks == 1 || r->stride % c->stride == 0;
    if (even && in >= c->bytes && in + r->bytes <= c->stride) return KVC_OK; /* interleaved without overlap */
    KVC_CHECK(even && in == 0, KVC_E_VALUE,
              OP ": residual: expected blocks of the cache's memory to begin where those do, or apart from them, got a "
                 "begin at byte %lld and a stride of %lld, no multiple of %lld",
              (long long)in, (long long)r->stride, (long long)c->stride);
    p->cache_first = kvc_max(0, -first);
    p->residual_first = kvc_max(0, first);
    p->step = r->blocks == 1 ? 1 : r->stride / c->stride;
    p->span = kvc_ceil_div(r->bytes, c->stride);
    p->common = kvc_max(p->cache_first + c->blocks, p->residual_first + (r->blocks - 1) * p->step + p->span);
    return KVC_OK;
}

static kvc_status check(plan *p)
{
    const kvc_varlen_args *v = p->v;
    const kvc_blocks *c = &v->cache, *r = &v->residual;
    int raw = KVC_RAW_F32 + (int)v->k.dtype;
    KVC_TRY(kvc_geometry_check(v->heads, v->key_dim, v->value_dim, v->page_size, OP));
    KVC_CHECK(v->query_heads > 0 && v->query_heads % v->heads == 0, KVC_E_VALUE,
              OP ": q: expected a multiple of %lld KV heads, got %lld query heads", (long long)v->heads,
              (long long)v->query_heads);
    KVC_TRY(kvc_scores_check(v->window, v->scale, v->softcap, OP));
    KVC_CHECK(v->batch >= 0 && v->tokens >= 0 && v->tokens <= INT32_MAX && v->batch <= INT32_MAX && v->max_query >= 0,
              KVC_E_VALUE,
              OP ": expected 0 to 2^31 sequences and tokens, and a max_query_len from 0, got %lld, %lld, %lld",
              (long long)v->batch, (long long)v->tokens, (long long)v->max_query);
    KVC_TRY(kvc_format_check(c->key, v->key_dim));
    KVC_TRY(kvc_format_check(c->value, v->value_dim));
    KVC_TRY(kvc_dtype_check(v->q.dtype, OP ": q"));
    KVC_TRY(kvc_dtype_check(v->out.dtype, OP ": out"));
    if (!v->stored) KVC_TRY(kvc_dtype_check(v->k.dtype, OP ": k"));
    KVC_CHECK(v->stored || v->k.dtype == v->v.dtype, KVC_E_TYPE, OP ": k, v: expected one dtype for both");
    p->in_place = kvc_in_place(c->key, c->value);
    p->page_bytes = kvc_all_heads_bytes(c->key, c->value, v->heads, v->key_dim, v->value_dim, v->page_size);
    KVC_TRY(kvc_blocks_check(c, p->page_bytes, OP, "cache"));
    KVC_CHECK(c->table_width >= 0 && c->table_width <= INT32_MAX && r->table_width >= 0 && r->table_width <= INT32_MAX,
              KVC_E_VALUE, OP ": expected block tables of 0 to 2^31 columns, got %lld and %lld",
              (long long)c->table_width, (long long)r->table_width);
    KVC_CHECK(p->in_place == !r->data, KVC_E_VALUE, OP ": residual: expected %s for %s, %s, got %s",
              p->in_place ? "none" : "blocks for raw pages", kvc_format_get(c->key)->name,
              kvc_format_get(c->value)->name, r->data ? "some" : "none");
    if (p->in_place) return KVC_OK;
    KVC_CHECK(r->key == r->value && r->key >= 0 && kvc_format_is_raw(r->key) && (v->stored || r->key == raw),
              KVC_E_TYPE, OP ": residual: expected raw pages of k's dtype, got formats %d, %d", r->key, r->value);
    p->residual_bytes = kvc_all_heads_bytes(r->key, r->value, v->heads, v->key_dim, v->value_dim, v->page_size);
    KVC_TRY(kvc_blocks_check(r, p->residual_bytes, OP, "residual"));
    p->ring = r->table_width * r->pages;
    return check_common(p);
}

/* Allocates the workspace of the largest pass. */
static kvc_status make_room(plan *p)
{
    const kvc_varlen_args *v = p->v;
    int64_t lines = v->batch, most = p->in_place ? 0 : kvc_min(p->ring, p->columns);
    p->written_bytes = (v->cache.blocks * v->cache.pages + v->residual.blocks * v->residual.pages + 7) / 8;
    if (v->stored) p->written_bytes = 0;
    int64_t words = lines * (p->columns + 2 + 2 * most);
    int64_t bytes = words * (int64_t)sizeof *p->table + lines * (int64_t)sizeof *p->segments + p->written_bytes;
    int64_t kinds = (2 * p->common + 7) / 8;
    KVC_TRY(kvc_scratch(bytes + kinds + 1, 1, &p->room));
    p->table = p->room;
    p->rows = p->table + lines * p->columns;
    p->seals = p->rows + 2 * lines;
    p->segments = (kvc_segment *)(p->seals + 2 * most * lines);
    p->written = (uint8_t *)(p->segments + lines);
    p->kinds = p->written + p->written_bytes;
    memset(p->kinds, 0, (size_t)kinds);
    return KVC_OK;
}

/* The entry of page c of sequence b, in its cache or residual blocks. */
static kvc_status entry_of(plan *p, bool residual, int64_t b, int64_t c, bool writes, int64_t *entry)
{
    const kvc_varlen_args *v = p->v;
    const kvc_blocks *at = residual ? &v->residual : &v->cache;
    int64_t i = residual ? c % p->ring : c, in = i % at->pages;
    /* read once: another thread may change it */
    int64_t block = __atomic_load_n(&at->table[b * at->table_stride + i / at->pages], __ATOMIC_RELAXED);
    KVC_CHECK(block >= 0 && block < at->blocks, KVC_E_VALUE,
              OP ": %s: expected a block from 0 to %lld, got %lld at sequence %lld, column %lld",
              residual ? "residual_table" : "block_table", (long long)at->blocks - 1, (long long)block, (long long)b,
              (long long)(i / at->pages));
    *entry = kvc_entry(at->data - p->a.store.arena + block * at->stride +
                           in * (residual ? p->residual_bytes : p->page_bytes),
                       at->key, at->value);
    int64_t first = residual ? p->residual_first + block * p->step : p->cache_first + block;
    for (int64_t u = first; p->common && u < first + (residual ? p->span : 1); u++) {
        int64_t own = 2 * u + residual, other = own ^ 1;
        KVC_CHECK(!(p->kinds[other / 8] >> other % 8 & 1), KVC_E_VALUE,
                  OP ": %s: expected a block that is not of the %s too, got block %lld for sequence %lld",
                  residual ? "residual_table" : "block_table", residual ? "cache" : "residual", (long long)block,
                  (long long)b);
        p->kinds[own / 8] |= (uint8_t)(1 << own % 8);
    }
    if (!writes) return KVC_OK;
    int64_t bit = block * at->pages + in + (residual ? v->cache.blocks * v->cache.pages : 0);
    KVC_CHECK(!(p->written[bit / 8] >> bit % 8 & 1), KVC_E_VALUE,
              OP ": %s: expected a page that one sequence writes, got block %lld for another one and sequence %lld",
              residual ? "residual_table" : "block_table", (long long)block, (long long)b);
    p->written[bit / 8] |= (uint8_t)(1 << bit % 8);
    return KVC_OK;
}

/* Number of leading columns that the part neither sees nor writes. */
static int64_t out_of_sight(const plan *p, const part *x, int64_t queries)
{
    const kvc_varlen_args *v = p->v;
    int64_t slot = x->to.stored - queries, window = v->window < 0 ? 1 + slot % -v->window : v->window;
    int64_t from = window ? kvc_max(0, slot - window + 1) : 0;
    from = kvc_min(from, p->in_place ? x->from.stored : x->from.sealed);
    return from / v->page_size;
}

/* Sets up line n of the pass for part x. */
static kvc_status add_line(plan *p, int64_t n, const part *x)
{
    const kvc_varlen_args *v = p->v;
    int64_t own = x->to.stored - x->from.stored, queries = v->stored ? new_tokens(v, x->b) : own, P = v->page_size;
    int64_t hidden = out_of_sight(p, x, queries), used = kvc_ceil_div(x->to.stored, P);
    int64_t *entries = p->table + n * p->columns + 1;
    for (int64_t c = 0; c < used; c++) {
        if (c < hidden) {
            entries[c] = kvc_entry(v->cache.data - p->a.store.arena, v->cache.key, v->cache.value);
            continue;
        }
        bool open = !p->in_place && c * P >= x->to.sealed, touched = own && (c + 1) * P > x->from.stored;
        bool seals = !p->in_place && !open && c * P >= x->from.sealed && c * P < x->from.stored;
        KVC_TRY(entry_of(p, open, x->b, c, !v->stored && (open || seals || touched), &entries[c]));
        if (!seals) continue;
        int64_t *pair = p->seals + 2 * p->a.n_seals++;
        KVC_TRY(entry_of(p, true, x->b, c, true, &pair[0]));
        pair[1] = entries[c];
    }
    p->rows[2 * n] = x->from.stored;
    p->rows[2 * n + 1] = 0;
    p->segments[n] = (kvc_segment){
        .sequence = x->b,
        .token = v->query_start[x->b + 1] - (v->seq_lens[x->b] - (v->stored ? x->to.stored - queries : x->from.stored)),
        .own = own,
        .queries = queries,
        .flag = v->flags ? v->flags + x->b : NULL,
    };
    p->a.T = kvc_max(p->a.T, own);
    p->a.Tq = kvc_max(p->a.Tq, queries);
    return KVC_OK;
}

/* Sets up a pass as a call of the driver and advances each sequence in it. */
static kvc_status lay_out(plan *p, int64_t pass)
{
    const kvc_varlen_args *v = p->v;
    int64_t n = 0;
    p->a.T = p->a.Tq = p->a.n_seals = 0;
    memset(p->written, 0, (size_t)p->written_bytes);
    for (int64_t b = 0; b < v->batch; b++) {
        if (pass < p->passes - p->at[b].passes) continue;
        part x = {b, p->at[b].is, p->at[b].is};
        if (!v->stored) advance(p, b, &x.to);
        KVC_TRY(add_line(p, n++, &x));
        p->at[b].is = x.to;
    }
    p->a.store.batch = n;
    return KVC_OK;
}

static kvc_status run_pass(plan *p, int64_t pass)
{
    kvc_call call;
    KVC_TRY(lay_out(p, pass));
    KVC_TRY(kvc_call_begin(&call, &p->a, p->segments));
    call.lse_stride[0] = 0, call.lse_stride[1] = p->v->tokens;
    return kvc_call_run(&call);
}

/* The second pass writes over residual pages that the first one has sealed. If it fails, they get back the stored tokens,
 * which a repeated call needs. */
static kvc_status run_second(plan *p)
{
    int64_t n = p->a.n_seals, size = p->residual_bytes;
    int64_t *from; /* offsets of the pages, then their contents */
    KVC_TRY(kvc_scratch(n, (int64_t)sizeof *from + size, &from));
    uint8_t *kept = (uint8_t *)(from + n), *arena = p->a.store.arena;
    for (int64_t i = 0; i < n; i++) {
        from[i] = kvc_entry_offset(p->seals[2 * i]);
        memcpy(kept + i * size, arena + from[i], (size_t)size);
    }
    kvc_status status = run_pass(p, 1);
    for (int64_t i = 0; status != KVC_OK && i < n; i++) memcpy(arena + from[i], kept + i * size, (size_t)size);
    kvc_scratch_free(from);
    return status;
}

static kvc_status check_finite(const kvc_varlen_args *v)
{
    for (int side = 0; side < 2; side++) {
        const kvc_dense *x = side ? &v->v : &v->k;
        for (int64_t t = v->query_start[0]; t < v->query_start[v->batch]; t++)
            for (int64_t h = 0; h < v->heads; h++) {
                int64_t at = h * x->stride[1] + t * x->stride[2];
                const void *row = (const char *)x->data + at * (x->dtype == KVC_F32 ? 4 : 2);
                KVC_CHECK(kvc_all_finite(row, x->dtype, side ? v->value_dim : v->key_dim), KVC_E_VALUE,
                          OP
                          ": %s: expected finite numbers, got NaN or Inf at head %lld, token %lld; nothing was stored",
                          side ? "v" : "k", (long long)h, (long long)t);
            }
    }
    return KVC_OK;
}

static kvc_status run(plan *p)
{
    const kvc_varlen_args *v = p->v;
    for (int64_t b = 0; b < v->batch; b++) KVC_TRY(check_sequence(p, b));
    if (p->columns == 0) return KVC_OK; /* no tokens */
    KVC_TRY(make_room(p));
    const kvc_blocks *c = &v->cache, *r = &v->residual;
    uint8_t *from = r->data && r->data < c->data ? r->data : c->data;
    const uint8_t *end = kvc_blocks_end(c);
    if (r->data && kvc_blocks_end(r) > end) end = kvc_blocks_end(r);
    p->a = (kvc_attend_args){.store = {.arena = from,
                                       .arena_bytes = end - from,
                                       .table = p->table,
                                       .rows = p->rows,
                                       .heads = v->heads,
                                       .table_heads = 1,
                                       .columns = p->columns,
                                       .key_dim = v->key_dim,
                                       .value_dim = v->value_dim,
                                       .page_size = v->page_size},
                             .q = v->q,
                             .k = v->k,
                             .v = v->v,
                             .query_heads = v->query_heads,
                             .seals = p->seals,
                             .window = v->window,
                             .scale = v->scale,
                             .softcap = v->softcap,
                             .s_aux = v->s_aux,
                             .out = v->out,
                             .lse = v->lse,
                             .exec = v->exec};
    p->a.q.stride[0] = p->a.k.stride[0] = p->a.v.stride[0] = p->a.out.stride[0] = 0;
    if (v->stored) p->a.k.dtype = p->a.v.dtype = v->q.dtype;
    if (p->passes > 1) { /* check all passes first: a completed pass cannot be undone */
        if (!v->flags) KVC_TRY(check_finite(v));
        for (int64_t pass = 0; pass < p->passes; pass++) KVC_TRY(lay_out(p, pass));
        for (int64_t b = 0; b < v->batch; b++) KVC_TRY(check_sequence(p, b)); /* reset the progress */
    }
    KVC_TRY(run_pass(p, 0));
    return p->passes > 1 ? run_second(p) : KVC_OK;
}

/* Copies the lengths, because another thread may change the caller's between check and use. */
static kvc_status copy_lengths(kvc_varlen_args *v, int32_t **copies)
{
    const int32_t **lengths[] = {&v->query_start, &v->seq_lens, &v->sealed_lens, &v->draft_lens};
    KVC_TRY(kvc_scratch(4 * v->batch + 1, sizeof **copies, copies));
    int32_t *copy = *copies;
    for (int i = 0; i < 4; i++) {
        int64_t n = v->batch + !i;
        if (!*lengths[i]) continue;
        memcpy(copy, *lengths[i], (size_t)n * sizeof *copy);
        *lengths[i] = copy;
        copy += n;
    }
    return KVC_OK;
}

kvc_status kvc_varlen_check(const kvc_varlen_args *args)
{
    plan p = {.v = args};
    return check(&p);
}

kvc_status kvc_attend_varlen(const kvc_varlen_args *args)
{
    kvc_varlen_args v = *args;
    plan p = {.v = &v, .passes = 1};
    int32_t *copies = NULL;
    KVC_TRY(check(&p));
    kvc_status status = copy_lengths(&v, &copies);
    if (status == KVC_OK) status = kvc_scratch(v.batch, sizeof *p.at, &p.at);
    if (status == KVC_OK) status = run(&p);
    kvc_scratch_free(p.room);
    kvc_scratch_free(p.at);
    kvc_scratch_free(copies);
    return status;
}
