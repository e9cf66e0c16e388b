/* attend.c - the attention driver: who attends to what, in which order, and how partial results are joined.
 *
 * Work is cut into items of (sequence, KV head, block of queries, run of columns); a GQA group is never split, so a
 * page is read once for all its query heads. The cut depends on shapes alone, and runs are joined in a fixed order:
 * results do not depend on the number of threads. Within an item one page at a time goes through three kernels:
 * scores (qk), online softmax, weighted sum of V (pv); a page of K and V stays in L1/L2 while all rows use it. */
#include "alloc.h"
#include "attend.h"
#include "floats.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define BLOCK_ROWS 64 /* query rows (tokens x G) of an item, about */
#define RUNS 64       /* items wanted before a sequence is not split into runs any more */
#define RUN_COLUMNS 8 /* columns of a run, at least */
#define WORDS (KVC_MAX_PAGE / 64)
#define WORTH_THREADS 65536 /* bytes: one core reads them in the time that waking another takes */

typedef struct driver {
    const kvc_call *call;
    int64_t group, block_tokens, blocks, runs; /* G; tokens a block; blocks and runs a (sequence, head) */
    float *partial;                            /* [items] x (rows x (Dv + 2)): o, m, l; NULL when runs == 1 */
    atomic_bool failed;
} driver;

/* One item's workspace. */
typedef struct work {
    const driver *d;
    const kvc_row *row;
    int64_t b, h, t0, tokens, rows; /* first query token, tokens and rows of the block; row = t * G + g */
    kvc_query query;
    float *s, *o, *o_rotated, *m, *l; /* [rows][KVC_MAX_PAGE], [rows][Dv] twice, [rows] twice */
    float *unpacked[2];               /* K and V of a page as raw_f32 words, for formats without kernels */
    float *block;                     /* what all of it is cut from */
} work;

/* A page as an item meets it. */
typedef struct view {
    kvc_page page;
    int64_t first, n; /* index of its first token, tokens stored */
} view;

void kvc_run(const kvc_exec *exec, int64_t n, int64_t bytes, void (*body)(int64_t, int64_t, void *), void *context)
{
    if (n <= 0) return;
    if (n > 1 && bytes >= WORTH_THREADS && exec && exec->run)
        exec->run(n, body, context);
    else
        body(0, n, context);
}

/* ---------------------------------------------------------------- what an item sees */

/* Tokens that stored columns hold for attention, and how many columns, own pages included. */
static int64_t paged_tokens(const kvc_call *call, const kvc_row *row)
{
    return row->stored + (call->own_in_pages ? row->own : 0);
}

static int64_t item_columns(const kvc_call *call, const kvc_row *row)
{
    int64_t own = call->own_in_pages ? 0 : kvc_ceil_div(row->own, call->a->store.page_size);
    return kvc_columns_used(&call->a->store, paged_tokens(call, row)) + own;
}

static view view_at(const work *w, int64_t c)
{
    const kvc_call *call = w->d->call;
    const kvc_store *s = &call->a->store;
    int64_t paged = paged_tokens(call, w->row), used = kvc_columns_used(s, paged);
    view v;
    if (c < used) {
        v.first = kvc_column_first(c, s->sinks, s->page_size);
        v.n = kvc_min(kvc_column_size(c, s->sinks, s->page_size), paged - v.first);
        if (v.n > 0) v.page = kvc_call_page_at(call, w->b, w->h, c);
    } else {
        int64_t bytes = kvc_page_layout(call->own_raw, call->own_raw, s->key_dim, s->value_dim, s->page_size).bytes;
        int64_t at = (w->b * s->heads + w->h) * call->own_columns + (c - used);
        v.first = w->row->stored + (c - used) * s->page_size;
        v.n = kvc_min(s->page_size, w->row->stored + w->row->own - v.first);
        v.page = (kvc_page){call->own_pages + at * bytes, call->own_raw, call->own_raw, s->page_size};
    }
    return v;
}

static void set_bits(uint64_t *bits, int64_t from, int64_t to)
{
    for (int64_t i = from, n; i < to; i += n) {
        n = kvc_min(to - i, 64 - i % 64);
        bits[i / 64] |= ~0ull >> (64 - n) << (i % 64);
    }
}

/* Which tokens of the page query slot `slot` sees; returns how many. */
static int64_t visible(const work *w, const view *v, int64_t slot, uint64_t *bits)
{
    const kvc_call *call = w->d->call;
    int64_t oldest = call->a->window > 0 ? slot - call->a->window + 1 : 0, count = 0;
    memset(bits, 0, WORDS * sizeof *bits);
    if (w->row->contiguous) {
        int64_t base = w->row->first + v->first;
        int64_t from = kvc_max(0, oldest - base), to = kvc_min(v->n, slot + 1 - base);
        if (to <= from) return 0;
        set_bits(bits, from, to);
        return to - from;
    }
    for (int64_t i = 0; i < v->n; i++) {
        int64_t k = kvc_slot_of(call, w->row, v->first + i);
        bool sees = k >= 0 && k >= oldest && k <= slot;
        bits[i / 64] |= (uint64_t)sees << (i % 64);
        count += sees;
    }
    return count;
}

/* ---------------------------------------------------------------- an item */

/* False if there is NaN or Inf in the row afterwards: its exponent of all ones carries into the sign bit. */
static bool scale_row(float *q, int64_t dim, float scale)
{
    uint32_t carry = 0;
    for (int64_t d = 0; d < dim; d++) {
        q[d] *= scale;
        carry |= (kvc_f32_bits(q[d]) & 0x7fffffff) + 0x00800000;
    }
    return !(carry >> 31);
}

static void load_query(work *w)
{
    const kvc_attend_args *a = w->d->call->a;
    const kvc_kernels *kernels = w->d->call->kernels;
    int64_t G = w->d->group, dim = w->query.dim, size = a->q.dtype == KVC_F32 ? 4 : 2;
    for (int64_t t = 0; t < w->tokens; t++)
        for (int64_t g = 0; g < G; g++) {
            const char *src =
                (const char *)a->q.data +
                (w->b * a->q.stride[0] + (w->h * G + g) * a->q.stride[1] + (w->t0 + t) * a->q.stride[2]) * size;
            float *q = w->query.plain.q + (t * G + g) * dim;
            kvc_load_rows(src, 0, a->q.dtype, 1, dim, q);
            if (scale_row(q, dim, a->scale)) continue;
            memset(q, 0, (size_t)dim * sizeof *q); /* integers hold no NaN: l does, from here to the end */
            w->l[t * G + g] = NAN;
        }
    if (w->query.rotated.q) {
        memcpy(w->query.rotated.q, w->query.plain.q, (size_t)(w->rows * dim) * sizeof(float));
        kernels->rotate(w->query.rotated.q, w->rows, dim);
    }
    if (w->query.plain.hi) kernels->limbs(&w->query.plain, w->rows, dim);
    if (w->query.rotated.hi) kernels->limbs(&w->query.rotated, w->rows, dim);
}

/* A side as a kernel takes it: as it lies, or unpacked to raw_f32 words where the level has no kernel for its format. */
static kvc_side ready(const work *w, const kvc_side *side, bool has_kernel, int64_t tiles, float *words)
{
    if (has_kernel) return *side;
    w->d->call->kernels->unpack(side, tiles, words);
    return (kvc_side){KVC_RAW_F32, side->key, side->dim, side->page_size, (uint8_t *)words, NULL, false};
}

static void attend_page(work *w, const view *v, ptrdiff_t ahead)
{
    const kvc_call *call = w->d->call;
    const kvc_kernels *kernels = call->kernels;
    const kvc_attend_args *a = call->a;
    const kvc_store *st = &a->store;
    kvc_side key = kvc_page_key(st, &v->page), value = kvc_page_value(st, &v->page), k = {0}, x = {0};
    int64_t G = w->d->group, Dv = st->value_dim, tiles = kvc_ceil_div(v->n, KVC_TILE), n16 = tiles * KVC_TILE;
    int64_t first_slot = a->seen + a->T - a->Tq + w->t0;
    float *o = kvc_format_rotated(v->page.value) ? w->o_rotated : w->o;
    kvc_query query = w->query;
    if (!kernels->qk[key.format] && kvc_format_rotated(key.format)) query.plain = query.rotated;
    for (int64_t r0 = 0; r0 < w->rows; r0 += KVC_ROWS) {
        int64_t n = kvc_min(KVC_ROWS, w->rows - r0), seen = 0, sees[KVC_ROWS];
        uint64_t bits[KVC_ROWS][WORDS];
        for (int64_t r = 0; r < n; r++) {
            if (r > 0 && (r0 + r) % G) { /* same token */
                memcpy(bits[r], bits[r - 1], sizeof bits[r]);
                sees[r] = sees[r - 1];
            } else
                sees[r] = visible(w, v, first_slot + (r0 + r) / G, bits[r]);
            seen += sees[r];
        }
        if (!seen) continue;
        if (!k.tiles) {
            k = ready(w, &key, kernels->qk[key.format], tiles, w->unpacked[0]);
            x = ready(w, &value, kernels->pv[value.format], tiles, w->unpacked[1]);
        }
        float *s = w->s + r0 * KVC_MAX_PAGE;
        kernels->qk[k.format](k.tiles, k.meta, &query, r0, n, k.page_size, tiles, k.meta == key.meta ? ahead : 0, s,
                              KVC_MAX_PAGE);
        for (int64_t r = 0; r < n; r++) {
            float *row = s + r * KVC_MAX_PAGE, keep = 1;
            if (sees[r]) keep = kernels->softmax(row, n16, bits[r], a->softcap, &w->m[r0 + r], &w->l[r0 + r]);
            if (!sees[r] || isnan(keep)) memset(row, 0, (size_t)n16 * sizeof *row);
            if (keep != 1) {
                for (int64_t d = 0; d < Dv; d++) w->o[(r0 + r) * Dv + d] *= keep;
                if (w->o_rotated)
                    for (int64_t d = 0; d < Dv; d++) w->o_rotated[(r0 + r) * Dv + d] *= keep;
            }
        }
        kernels->pv[x.format](x.tiles, x.meta, s, KVC_MAX_PAGE, n, Dv, x.page_size, v->n,
                              x.meta == value.meta ? ahead : 0, o + r0 * Dv);
        ahead = 0; /* once is enough */
    }
}

/* Bytes to the page that comes after `c`, for prefetch: 0 unless it is laid out the same. */
static ptrdiff_t page_ahead(const work *w, const view *v, int64_t c, int64_t end)
{
    if (c + 1 >= end) return 0;
    view next = view_at(w, c + 1);
    if (next.n <= 0 || next.page.key != v->page.key || next.page.value != v->page.value ||
        next.page.page_size != v->page.page_size)
        return 0;
    return next.page.data - v->page.data;
}

/* m = -Inf: nothing seen. Else l > 0, or the row's numbers were not those of a softmax: NaN, not "nothing seen". */
static void write_out(const kvc_call *call, int64_t b, int64_t hq, int64_t t, float *o, float m, float l)
{
    const kvc_attend_args *a = call->a;
    int64_t Dv = a->store.value_dim;
    bool sees = m > -INFINITY;
    if (!(l > 0)) l = NAN;
    a->lse[(b * a->query_heads + hq) * a->Tq + t] = sees ? m + logf(l) : -INFINITY;
    if (a->s_aux && sees) l += expf(a->s_aux[hq] - m);
    float inverse = sees ? 1 / l : 0;
    float most = call->own_raw == KVC_RAW_F16 ? 65504 : INFINITY; /* decoded V of fp16 may lie beyond it */
    int64_t at = b * a->out.stride[0] + hq * a->out.stride[1] + t * a->out.stride[2];
    uint16_t *half = (uint16_t *)a->out.data + at;
    if (a->out.dtype == KVC_F32)
        for (int64_t d = 0; d < Dv; d++) ((float *)a->out.data)[at + d] = o[d] * inverse;
    else if (a->out.dtype == KVC_F16)
        for (int64_t d = 0; d < Dv; d++) half[d] = kvc_f32_to_f16(kvc_saturate(o[d] * inverse, most));
    else
        for (int64_t d = 0; d < Dv; d++) half[d] = kvc_f32_to_bf16(o[d] * inverse);
}

static void attend_item(work *w, int64_t item)
{
    const driver *d = w->d;
    const kvc_call *call = d->call;
    const kvc_store *s = &call->a->store;
    int64_t run = item % d->runs, block = item / d->runs % d->blocks, bh = item / d->runs / d->blocks;
    int64_t Dv = s->value_dim;
    w->b = bh / s->heads;
    w->h = bh % s->heads;
    w->row = kvc_call_row(call, w->b, w->h);
    w->t0 = block * d->block_tokens;
    w->tokens = kvc_min(d->block_tokens, call->a->Tq - w->t0);
    w->rows = w->query.rows = w->tokens * d->group;
    for (int64_t r = 0; r < w->rows; r++) {
        w->m[r] = -INFINITY;
        w->l[r] = 0;
    }
    memset(w->o, 0, (size_t)(w->rows * Dv) * sizeof(float));
    if (w->o_rotated) memset(w->o_rotated, 0, (size_t)(w->rows * Dv) * sizeof(float));

    int64_t columns = item_columns(call, w->row), begin = columns * run / d->runs, end = columns * (run + 1) / d->runs;
    if (begin < end) load_query(w);
    for (int64_t c = begin; c < end; c++) {
        view v = view_at(w, c);
        if (v.n > 0) attend_page(w, &v, page_ahead(w, &v, c, end));
    }
    if (w->o_rotated) {
        call->kernels->rotate(w->o_rotated, w->rows, Dv);
        for (int64_t i = 0; i < w->rows * Dv; i++) w->o[i] += w->o_rotated[i];
    }
    if (d->partial) {
        int64_t rows = d->block_tokens * d->group;
        float *p = d->partial + item * rows * (Dv + 2);
        memcpy(p, w->o, (size_t)(w->rows * Dv) * sizeof(float));
        memcpy(p + rows * Dv, w->m, (size_t)w->rows * sizeof(float));
        memcpy(p + rows * (Dv + 1), w->l, (size_t)w->rows * sizeof(float));
        return;
    }
    for (int64_t r = 0; r < w->rows; r++)
        write_out(call, w->b, w->h * d->group + r % d->group, w->t0 + r / d->group, w->o + r * Dv, w->m[r], w->l[r]);
}

/* ---------------------------------------------------------------- workers */

/* Cuts `floats` floats (a multiple of 16) off the workspace; only counts while there is none. */
static float *cut(float *block, int64_t *used, int64_t floats)
{
    float *at = block ? block + *used : NULL;
    *used += (floats + 15) / 16 * 16;
    return at;
}

static int64_t lay_out(work *w, const driver *d, float *block)
{
    const kvc_call *call = d->call;
    int64_t rows = d->block_tokens * d->group, Dk = call->a->store.key_dim, Dv = call->a->store.value_dim, used = 0;
    *w = (work){.d = d, .block = block, .query = {.dim = Dk}};
    w->s = cut(block, &used, rows * KVC_MAX_PAGE);
    w->o = cut(block, &used, rows * Dv);
    if (call->rotated_value) w->o_rotated = cut(block, &used, rows * Dv);
    if (call->unpacked) {
        w->unpacked[0] = cut(block, &used, call->a->store.page_size * Dk);
        w->unpacked[1] = cut(block, &used, call->a->store.page_size * Dv);
    }
    w->m = cut(block, &used, rows);
    w->l = cut(block, &used, rows);
    for (int form = 0; form <= (call->rotated_key ? 1 : 0); form++) {
        kvc_query_form *f = form ? &w->query.rotated : &w->query.plain;
        f->q = cut(block, &used, rows * Dk);
        if (!call->limbs || !call->kernels->limbs) continue;
        f->hi = (int8_t *)cut(block, &used, rows * Dk / 4);
        f->lo = (int8_t *)cut(block, &used, rows * Dk / 4);
        f->step = cut(block, &used, rows);
        f->sum = (int32_t *)cut(block, &used, rows);
    }
    return used;
}

static void attend_items(int64_t begin, int64_t end, void *context)
{
    driver *d = context;
    work w;
    float *block;
    if (kvc_alloc(lay_out(&w, d, NULL), sizeof(float), &block) != KVC_OK) {
        atomic_store(&d->failed, true);
        return;
    }
    lay_out(&w, d, block);
    for (int64_t item = begin; item < end; item++) attend_item(&w, item);
    kvc_free(block);
}

/* Joins the runs of (sequence, head, block) in order. */
static void join_runs(int64_t begin, int64_t end, void *context)
{
    driver *d = context;
    const kvc_store *s = &d->call->a->store;
    int64_t rows = d->block_tokens * d->group, Dv = s->value_dim, size = rows * (Dv + 2);
    for (int64_t i = begin; i < end; i++) {
        int64_t block = i % d->blocks, b = i / d->blocks / s->heads, h = i / d->blocks % s->heads;
        int64_t n = kvc_min(d->block_tokens, d->call->a->Tq - block * d->block_tokens) * d->group;
        for (int64_t r = 0; r < n; r++) {
            float o[KVC_MAX_DIM] = {0}, m = -INFINITY, l = 0;
            const float *p = d->partial + i * d->runs * size;
            for (int64_t run = 0; run < d->runs; run++) m = fmaxf(m, p[run * size + rows * Dv + r]);
            for (int64_t run = 0; run < d->runs && m > -INFINITY; run++) {
                const float *x = p + run * size;
                float weight = expf(x[rows * Dv + r] - m);
                l += weight * x[rows * (Dv + 1) + r];
                for (int64_t e = 0; e < Dv; e++) o[e] += weight * x[r * Dv + e];
            }
            write_out(d->call, b, h * d->group + r % d->group, block * d->block_tokens + r / d->group, o, m, l);
        }
    }
}

static kvc_status attend(const kvc_call *call)
{
    const kvc_attend_args *a = call->a;
    const kvc_store *s = &a->store;
    driver d = {.call = call, .group = a->query_heads / s->heads};
    int64_t columns = 0;
    for (int64_t r = 0; r < s->batch * s->table_heads; r++)
        columns = kvc_max(columns, item_columns(call, &call->rows[r]));
    d.block_tokens = kvc_min(a->Tq, kvc_max(1, BLOCK_ROWS / d.group));
    d.blocks = kvc_ceil_div(a->Tq, d.block_tokens);
    int64_t blocks = s->batch * s->heads * d.blocks;
    d.runs = kvc_max(1, kvc_min(RUNS / blocks, columns / RUN_COLUMNS));
    if (d.runs > 1)
        KVC_TRY(kvc_alloc(blocks * d.runs * d.block_tokens * d.group * (s->value_dim + 2), sizeof(float), &d.partial));
    int64_t read = columns * s->page_size * (s->key_dim + s->value_dim) * blocks; /* a byte an element, about */
    kvc_run(&a->exec, blocks * d.runs, read * d.block_tokens, attend_items, &d);
    bool failed = atomic_load(&d.failed);
    if (d.partial && !failed)
        kvc_run(&a->exec, blocks, blocks * d.runs * d.block_tokens * d.group * s->value_dim, join_runs, &d);
    kvc_free(d.partial);
    KVC_CHECK(!failed, KVC_E_MEMORY, "out of memory: attend found none for its workspace");
    return KVC_OK;
}

kvc_status kvc_attend(const kvc_attend_args *args)
{
    kvc_call call;
    KVC_TRY(kvc_call_begin(&call, args));
    kvc_status status = kvc_call_write(&call);
    if (status == KVC_OK && args->Tq > 0 && args->store.batch > 0) status = attend(&call);
    kvc_call_end(&call);
    return status;
}
