/* attend_work.c - one page at a time through three kernels: scores (qk), online softmax, weighted sum of V (pv); a page of
 * K and V stays in L1/L2 while all rows of the block use it. */
#include "attend_work.h"
#include "base/floats.h"

#include <math.h>
#include <string.h>

/* 8 bits of q (see kvc_query) and p will do for rotated codes, of p also for groups (see kvc_pv_fn), in sequences of this
 * many columns, for a page of this share of its run's weight so far: the error is then 0.5% of the output, where codes of 4
 * bits make 10%; without either one loud channel of V would make it more. Short ones stay exact. */
#define COARSE_COLUMNS 64
#define COARSE_SHARE 0.25f

/* ---------------------------------------------------------------- what an item sees */

/* Tokens that stored columns hold for attention. */
static int64_t paged_tokens(const kvc_call *call, const kvc_row *row)
{
    return row->stored + (call->own_in_pages ? row->own : 0);
}

static int64_t stored_columns(const kvc_call *call, const kvc_row *row)
{
    return kvc_columns_used(&call->a->store, paged_tokens(call, row));
}

int64_t kvc_item_columns(const kvc_call *call, const kvc_row *row)
{
    int64_t own = call->own_in_pages ? 0 : kvc_ceil_div(row->own, call->a->store.page_size);
    return stored_columns(call, row) + own;
}

bool kvc_view_place(const kvc_work *w, int64_t c, kvc_view *v)
{
    const kvc_call *call = w->job->call;
    const kvc_store *s = &call->a->store;
    int64_t own = c - w->stored_columns;
    if (own < 0) {
        v->first = kvc_column_first(c, s->sinks, s->page_size);
        v->n = kvc_min(kvc_column_size(c, s->sinks, s->page_size), paged_tokens(call, w->row) - v->first);
        v->entry = kvc_call_entry_at(call, w->b, w->h, c);
        v->key = kvc_entry_key(v->entry), v->value = kvc_entry_value(v->entry);
    } else {
        v->first = w->row->stored + own * s->page_size;
        v->n = kvc_min(s->page_size, w->row->stored + w->row->own - v->first);
        v->key = v->value = call->own_raw;
    }
    return v->n > 0;
}

kvc_view kvc_view_at(const kvc_work *w, int64_t c)
{
    const kvc_call *call = w->job->call;
    const kvc_store *s = &call->a->store;
    int64_t own = c - w->stored_columns;
    kvc_view v;
    if (!kvc_view_place(w, c, &v)) return v;
    v.page_size = own < 0 ? kvc_column_layout(c, s->sinks, s->page_size) : s->page_size;
    v.layout = kvc_page_layout(v.key, v.value, s->key_dim, s->value_dim, v.page_size);
    if (own < 0)
        v.data = s->arena + kvc_entry_offset(v.entry) + (s->table_heads == 1 ? w->h * v.layout.bytes : 0);
    else
        v.data = call->own_pages + ((w->b * s->heads + w->h) * call->own_columns + own) * v.layout.bytes;
    return v;
}

static void set_bits(uint64_t *bits, int64_t from, int64_t to)
{
    for (int64_t i = from, n; i < to; i += n) {
        n = kvc_min(to - i, 64 - i % 64);
        bits[i / 64] |= ~0ull >> (64 - n) << (i % 64);
    }
}

/* A bit for each of the n slots (64 at most) from `oldest` to oldest + span. A dead token's -1 wraps to the largest
 * number. In bytes first, which compilers do many at a time; then the low bit of 8 bytes at once. */
static uint64_t slots_in(const int32_t *slots, int64_t n, int32_t oldest, uint32_t span)
{
    uint8_t sees[64] = {0};
    uint64_t bits = 0, eight;
    for (int64_t i = 0; i < n; i++) sees[i] = (uint32_t)(slots[i] - oldest) <= span;
    for (int i = 0; i < 8; i++) {
        memcpy(&eight, sees + 8 * i, sizeof eight);
        bits |= eight * 0x0102040810204080u >> 56 << 8 * i;
    }
    return bits;
}

/* First slot that a query at `slot` may see; past `slot` for one before its row's first token. */
static int64_t oldest_slot(const kvc_work *w, int64_t slot)
{
    int64_t window = w->job->call->a->window;
    if (window < 0) window = 1 + (slot - w->row->first) % -window;
    return window ? kvc_max(0, slot - window + 1) : 0;
}

bool kvc_page_in_sight(const kvc_work *w, const kvc_view *v)
{
    const kvc_attend_args *a = w->job->call->a;
    int64_t slot = a->seen + a->T - a->Tq + w->t0, from = w->row->first + v->first;
    return !w->row->contiguous || (from <= slot + w->tokens - 1 && from + v->n > oldest_slot(w, slot));
}

/* Which tokens of the page query slot `slot` sees; returns how many. */
static int64_t visible(const kvc_work *w, const kvc_view *v, int64_t slot, uint64_t *bits)
{
    const kvc_call *call = w->job->call;
    const kvc_row *row = w->row;
    int64_t oldest = oldest_slot(w, slot), count = 0;
    memset(bits, 0, KVC_WORDS * sizeof *bits);
    if (oldest > slot) return 0;
    if (row->contiguous) {
        int64_t base = row->first + v->first;
        int64_t from = kvc_max(0, oldest - base), to = kvc_min(v->n, slot + 1 - base);
        if (to <= from) return 0;
        set_bits(bits, from, to);
        return to - from;
    }
    int64_t listed = row->slots ? kvc_min(v->n, kvc_max(0, row->stored - v->first)) : 0;
    for (int64_t i = 0; i < listed; i += 64) {
        bits[i / 64] =
            slots_in(row->slots + v->first + i, kvc_min(64, listed - i), (int32_t)oldest, (uint32_t)(slot - oldest));
        count += __builtin_popcountll(bits[i / 64]);
    }
    for (int64_t i = listed; i < v->n; i++) {
        int64_t k = kvc_slot_of(call, row, v->first + i);
        bool sees = k >= oldest && k <= slot;
        bits[i / 64] |= (uint64_t)sees << (i % 64);
        count += sees;
    }
    return count;
}

/* ---------------------------------------------------------------- queries */

/* False if there is NaN or Inf in the row: its exponent of all ones carries into the sign bit. */
static bool row_is_finite(const float *q, int64_t dim)
{
    uint32_t carry = 0;
    for (int64_t d = 0; d < dim; d++) carry |= (kvc_f32_bits(q[d]) & 0x7fffffff) + 0x00800000;
    return !(carry >> 31);
}

static void scale_row(float *q, int64_t n, float factor)
{
    for (int64_t i = 0; i < n; i++) q[i] *= factor;
}

static void load_query(kvc_work *w)
{
    const kvc_attend_args *a = w->job->call->a;
    const kvc_kernels *kernels = w->job->call->kernels;
    int64_t G = w->job->group, dim = w->query.dim, size = a->q.dtype == KVC_F32 ? 4 : 2;
    kvc_query_form *plain = &w->query.plain;
    for (int64_t t = 0; t < w->tokens; t++)
        for (int64_t g = 0; g < G; g++) {
            const char *src =
                (const char *)a->q.data +
                (w->b * a->q.stride[0] + (w->h * G + g) * a->q.stride[1] + (w->t0 + t) * a->q.stride[2]) * size;
            float *q = plain->q + (t * G + g) * dim;
            kvc_load_rows(src, 0, a->q.dtype, 1, dim, q);
        }
    plain->unit = a->scale;
    if (plain->half) plain->whole = kernels->halves(plain, w->rows, dim);
    scale_row(plain->q, w->rows * dim, a->scale);
    for (int64_t r = 0; r < w->rows; r++) {
        if (row_is_finite(plain->q + r * dim, dim)) continue;
        memset(plain->q + r * dim, 0, (size_t)dim * sizeof *plain->q); /* integers hold no NaN: l does, to the end */
        if (plain->half) memset(plain->half + r * dim, 0, (size_t)dim * sizeof *plain->half);
        if (plain->half) memset(plain->rest + r * dim, 0, (size_t)dim * sizeof *plain->rest);
        w->l[r] = NAN;
    }
    if (w->query.rotated.q) {
        memcpy(w->query.rotated.q, w->query.plain.q, (size_t)(w->rows * dim) * sizeof(float));
        kernels->rotate(w->query.rotated.q, w->rows, dim);
    }
    if (w->query.plain.hi) kernels->limbs(&w->query.plain, w->rows, dim);
    if (w->query.rotated.hi) kernels->limbs(&w->query.rotated, w->rows, dim);
}

void kvc_work_begin(kvc_work *w, int64_t b, int64_t h, int64_t block)
{
    const kvc_job *job = w->job;
    w->b = b;
    w->h = h;
    w->row = kvc_call_row(w->job->call, b, h);
    w->columns = kvc_item_columns(w->job->call, w->row);
    w->stored_columns = stored_columns(w->job->call, w->row);
    w->query.coarse = w->columns >= COARSE_COLUMNS;
    w->t0 = block * job->block_tokens;
    w->tokens = kvc_min(job->block_tokens, job->call->a->Tq - w->t0);
    w->rows = w->query.rows = w->tokens * job->group;
    for (int64_t r = 0; r < w->rows; r++) {
        w->m[r] = -INFINITY;
        w->l[r] = 0;
    }
    load_query(w);
}

/* ---------------------------------------------------------------- a page */

static kvc_side side_of(const kvc_work *w, const kvc_view *v, int key)
{
    const kvc_store *s = &w->job->call->a->store;
    const uint8_t *at = v->data;
    return key ? (kvc_side){v->key, 1, s->key_dim, v->page_size, at + v->layout.k, at + v->layout.k_meta}
               : (kvc_side){v->value, 0, s->value_dim, v->page_size, at + v->layout.v, at + v->layout.v_meta};
}

/* Whether all rows of a wide kernel's can go through it at once. */
static bool goes_wide(const kvc_side *side, int64_t n)
{
    return side->dim % KVC_WIDE_STEP == 0 && n % KVC_WIDE_STEP == 0;
}

/* Are all of these from `least` to `most`? Without a branch a slot: this is asked of every page of a table that has evicted. */
static bool all_within(const int32_t *slots, int64_t n, int64_t least, int64_t most)
{
    int32_t low = (int32_t)kvc_max(least, 0), high = (int32_t)kvc_min(most, INT32_MAX), out = 0;
    for (int64_t i = 0; i < n; i++) out |= (slots[i] < low) | (slots[i] > high);
    return !out;
}

/* True if every row of the block sees every token of the page. */
static bool all_seen(const kvc_work *w, const kvc_view *v)
{
    const kvc_attend_args *a = w->job->call->a;
    const kvc_row *row = w->row;
    int64_t first_slot = a->seen + a->T - a->Tq + w->t0, oldest = oldest_slot(w, first_slot + w->tokens - 1);
    if (!row->contiguous)
        return row->slots && v->first + v->n <= row->stored &&
               all_within(row->slots + v->first, v->n, oldest, first_slot);
    return row->first + v->first + v->n <= first_slot + 1 && row->first + v->first >= oldest;
}

/* Which tokens of a page rows [r0, r0 + n) see, and how many; false: none does. */
static bool look(const kvc_work *w, const kvc_view *v, int64_t r0, int64_t n, uint64_t bits[][KVC_WORDS], int64_t *sees)
{
    const kvc_attend_args *a = w->job->call->a;
    int64_t G = w->job->group, first_slot = a->seen + a->T - a->Tq + w->t0, seen = 0;
    for (int64_t r = 0; r < n; r++) {
        if (r > 0 && (r0 + r) % G) { /* same token */
            memcpy(bits[r], bits[r - 1], sizeof bits[r]);
            sees[r] = sees[r - 1];
        } else
            sees[r] = visible(w, v, first_slot + (r0 + r) / G, bits[r]);
        seen += sees[r];
    }
    return seen > 0;
}

/* Scores of rows [r0, r0 + n) of a page. ready: an affine K was prepared for an earlier row. */
static void score(kvc_work *w, const kvc_view *v, const kvc_wide_kernels *wide, int64_t r0, int64_t n, ptrdiff_t ahead,
                  bool ready, float *s, int64_t ld)
{
    const kvc_kernels *kernels = w->job->call->kernels;
    kvc_side key = side_of(w, v, 1);
    int64_t tiles = kvc_ceil_div(v->n, KVC_TILE);
    kvc_qk_fn *own = kernels->qk[v->key];
    if (wide && wide->qk[v->key] && goes_wide(&key, v->n)) {
        wide->qk[v->key](key.tiles, key.meta, &w->query, r0, n, v->page_size, tiles, ahead, s, ld);
        return;
    }
    if (!own && !ready) kernels->affine(&key, v->n, ahead, w->words[0], &w->affine[0]);
    for (int64_t i = 0; i < n; i += KVC_ROWS, ahead = 0) {
        int64_t rows = kvc_min(KVC_ROWS, n - i);
        if (own)
            own(key.tiles, key.meta, &w->query, r0 + i, rows, v->page_size, tiles, ahead, s + i * ld, ld);
        else
            kernels->qk_affine(&key, &w->affine[0], &w->query, r0 + i, rows, tiles, s + i * ld, ld);
    }
}

/* Adds the page's V by the weights p of rows [r0, r0 + n). An affine V is fetched ahead when it is prepared, with the
 * first rows; others with the last. */
static void add_values(kvc_work *w, const kvc_view *v, const kvc_wide_kernels *wide, int64_t r0, int64_t n,
                       kvc_digits digits, ptrdiff_t ahead, bool ready, const float *p, int64_t ld)
{
    const kvc_kernels *kernels = w->job->call->kernels;
    kvc_side value = side_of(w, v, 0);
    int64_t Dv = value.dim;
    float *o = (kvc_format_rotated(v->value) ? w->o_rotated : w->o) + r0 * Dv;
    kvc_pv_fn *own = kernels->pv[v->value];
    if (wide && wide->pv[v->value] && goes_wide(&value, v->n)) {
        wide->pv[v->value](value.tiles, value.meta, p, ld, n, Dv, v->page_size, v->n, digits,
                           r0 + n < w->rows ? 0 : ahead, o);
        return;
    }
    if (!own && !ready) kernels->affine(&value, v->n, ahead, w->words[1], &w->affine[1]);
    for (int64_t i = 0; i < n; i += KVC_ROWS) {
        int64_t rows = kvc_min(KVC_ROWS, n - i);
        if (own)
            own(value.tiles, value.meta, p + i * ld, ld, rows, Dv, v->page_size, v->n, digits,
                r0 + i + KVC_ROWS < w->rows ? 0 : ahead, o + i * Dv);
        else
            kernels->pv_affine(&w->affine[1], p + i * ld, ld, rows, v->n, digits, o + i * Dv);
    }
}

/* Has the room of the next page's weights in the cache when they are written: a page takes less time than a store to a
 * line that left the cache, which longer sequences' lines do between two calls. Inlined, because gcc takes a function of
 * prefetches for one without effects, and drops its calls. */
static inline __attribute__((always_inline)) void fetch_room(const kvc_work *w, int64_t c, bool exact)
{
    kvc_kept next = kvc_kept_of(w, c, 0);
    int64_t bytes = w->rows * w->job->kept_width * (exact ? 4 : 2);
    const char *to = exact ? (const char *)next.exact : (const char *)next.half;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(to + i, 1, 3);
}

void kvc_page_attend(kvc_work *w, const kvc_view *v, int64_t c, ptrdiff_t ahead)
{
    const kvc_job *job = w->job;
    const kvc_kernels *kernels = job->call->kernels;
    const kvc_wide_kernels *wide = w->rows > KVC_ROWS ? kernels->wide : NULL;
    int64_t Dv = job->call->a->store.value_dim, n16 = kvc_ceil_div(v->n, KVC_TILE) * KVC_TILE;
    bool keeps = w->kept.m, exact = keeps && kvc_format_is_raw(v->key); /* weights, for the mass; as they are */
    int64_t ld = exact ? job->kept_width : KVC_MAX_PAGE, step = wide ? KVC_WIDE : KVC_ROWS;
    int64_t sees[KVC_WIDE];
    uint64_t bits[KVC_WIDE][KVC_WORDS];
    bool ready = false, all = all_seen(w, v);
    if (keeps && w->rows <= KVC_ROWS && c + 1 < w->columns) fetch_room(w, c + 1, exact);
    for (int64_t r = 0; all && r < step; r++) {
        memset(bits[r], 0, sizeof bits[r]);
        set_bits(bits[r], 0, sees[r] = v->n);
    }
    /* The next page is fetched once: its K by the first rows' scores, its V by the last rows' sums. */
    for (int64_t r0 = 0; r0 < w->rows; r0 += step) {
        int64_t n = kvc_min(step, w->rows - r0);
        kvc_kept kept = {0};
        if (keeps) kept = kvc_kept_of(w, c, r0);
        float *s = exact ? kept.exact : w->s;
        if (!all && !look(w, v, r0, n, bits, sees)) continue;
        score(w, v, wide, r0, n, r0 ? 0 : ahead, ready, s, ld);
        bool coarse = w->query.coarse;
        float keep[KVC_WIDE], m[KVC_WIDE], before[KVC_WIDE], *l = w->l + r0;
        memcpy(m, w->m + r0, (size_t)n * sizeof *m);
        memcpy(before, l, (size_t)n * sizeof *l);
        for (int64_t r = 0; r < n; r += KVC_ROWS)
            kernels->softmax(s + r * ld, ld, kvc_min(KVC_ROWS, n - r), n16, bits + r, job->call->a->softcap, m + r,
                             l + r, keep + r);
        for (int64_t r = 0; r < n; r++) {
            if (sees[r]) w->m[r0 + r] = m[r];
            coarse &= l[r] - before[r] * keep[r] <= l[r] * COARSE_SHARE;
            if (isnan(keep[r])) memset(s + r * ld, 0, (size_t)n16 * sizeof *s);
            if (keep[r] != 1) {
                scale_row(w->o + (r0 + r) * Dv, Dv, keep[r]);
                if (w->o_rotated) scale_row(w->o_rotated + (r0 + r) * Dv, Dv, keep[r]);
            }
            if (keeps && sees[r] && m[r] < INFINITY) kept.m[r] = m[r]; /* of +inf: no softmax, no weights */
        }
        if (keeps && !exact) kernels->keep(s, ld, n, n16, kept.half, job->kept_width);
        kvc_digits digits = coarse ? KVC_P_BYTE : job->call->a->out.dtype == KVC_BF16 ? KVC_P_BF16 : KVC_P_EXACT;
        add_values(w, v, wide, r0, n, digits, ahead, ready, s, ld);
        ready = true;
    }
}

/* ---------------------------------------------------------------- workspace */

/* Cuts `floats` floats (a multiple of 16) off the workspace; only counts while there is none. */
static float *cut(float *block, int64_t *used, int64_t floats)
{
    float *at = block ? block + *used : NULL;
    *used += (floats + 15) / 16 * 16;
    return at;
}

int64_t kvc_work_lay_out(kvc_work *w, const kvc_job *job, float *block)
{
    const kvc_call *call = job->call;
    const kvc_store *s = &call->a->store;
    int64_t step = call->kernels->wide ? KVC_WIDE : KVC_ROWS;
    int64_t rows = kvc_ceil_div(job->block_tokens * job->group, step) * step, Dk = s->key_dim, Dv = s->value_dim,
            used = 0;
    *w = (kvc_work){.job = job, .query = {.dim = Dk}};
    w->s = cut(block, &used, step * KVC_MAX_PAGE);
    w->o = cut(block, &used, rows * Dv);
    if (call->rotated_value) w->o_rotated = cut(block, &used, rows * Dv);
    for (int side = 0; call->affine && side < 2; side++) {
        int64_t page = kvc_max(s->page_size, kvc_sink_tokens(s->sinks)), dim = side ? Dv : Dk;
        w->words[side] = (uint8_t *)cut(block, &used, page * dim / 4);
        w->affine[side].scale = cut(block, &used, page * dim / KVC_TILE); /* 16 dims to a group, at least */
        w->affine[side].middle = cut(block, &used, page * dim / KVC_TILE);
    }
    w->m = cut(block, &used, rows);
    w->l = cut(block, &used, rows);
    for (int form = 0; form <= (call->rotated_key ? 1 : 0); form++) {
        kvc_query_form *f = form ? &w->query.rotated : &w->query.plain;
        f->q = cut(block, &used, rows * Dk);
        if (call->halves && call->kernels->halves && !form) {
            f->half = (uint16_t *)cut(block, &used, rows * Dk / 2);
            f->rest = (uint16_t *)cut(block, &used, rows * Dk / 2);
        }
        if (!call->limbs || !call->kernels->limbs) continue;
        f->hi = (int8_t *)cut(block, &used, rows * Dk / 4);
        f->lo = (int8_t *)cut(block, &used, rows * Dk / 4);
        f->step = cut(block, &used, rows);
        f->sum = (int32_t *)cut(block, &used, rows);
        f->one = (int8_t *)cut(block, &used, rows * Dk / 4);
        f->one_sum = (int32_t *)cut(block, &used, rows);
    }
    return used;
}
