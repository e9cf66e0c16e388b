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
            const char *src = (const char *)a->q.data + (w->b * a->q.stride[0] + (w->h * G + g) * a->q.stride[1] +
                                                         (w->row->token + w->t0 + t) * a->q.stride[2]) *
                                                            size;
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

void kvc_work_begin(kvc_work *w, int64_t item)
{
    kvc_work_place(w, item);
    w->query.coarse = w->columns >= COARSE_COLUMNS;
    w->rows = w->query.rows = w->tokens * w->job->group;
    for (int64_t r = 0; r < w->rows; r++) {
        w->m[r] = -INFINITY, w->l[r] = 0;
    }
    load_query(w);
    if (w->row->flag && *w->row->flag)
        for (int64_t r = 0; r < w->rows; r++) w->l[r] = NAN;
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
    bool ready = false, all = kvc_all_seen(w, v);
    if (keeps && w->rows <= KVC_ROWS && c + 1 < w->columns) fetch_room(w, c + 1, exact);
    for (int64_t i = 0; all && i < KVC_WORDS; i++) { /* at once: a call of memset a row takes longer than the rest */
        int64_t left = v->n - 64 * i;
        uint64_t word = left >= 64 ? ~0ull : left > 0 ? ~0ull >> (64 - left) : 0;
        for (int64_t r = 0; r < step; r++) bits[r][i] = word;
    }
    for (int64_t r = 0; all && r < step; r++) sees[r] = v->n;
    /* The next page is fetched once: its K by the first rows' scores, its V by the last rows' sums. */
    for (int64_t r0 = 0; r0 < w->rows; r0 += step) {
        int64_t n = kvc_min(step, w->rows - r0);
        kvc_kept kept = {0};
        if (keeps) kept = kvc_kept_of(w, c, r0);
        float *s = exact ? kept.exact : w->s;
        if (!all && !kvc_look(w, v, r0, n, bits, sees)) continue;
        score(w, v, wide, r0, n, r0 ? 0 : ahead, ready, s, ld);
        bool coarse = w->query.coarse;
        float keep[KVC_WIDE], m[KVC_WIDE], before[KVC_WIDE], *l = w->l + r0;
        if (wide) /* of constant size: "rep movs" takes longer than all of these */
            memcpy(m, w->m + r0, sizeof m), memcpy(before, l, sizeof before);
        else
            memcpy(m, w->m + r0, KVC_ROWS * sizeof *m), memcpy(before, l, KVC_ROWS * sizeof *l);
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
