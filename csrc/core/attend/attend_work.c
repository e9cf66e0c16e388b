/* attend_work.c - attention over one page at a time, with three kernels: scores (qk), online softmax, weighted sum of V
 * (pv). A page of K and V stays in L1/L2 while all rows of the block use it. */
#include "attend_work.h"
#include "base/floats.h"

#include <math.h>
#include <string.h>

/* When 8-bit q (see kvc_query) and p are precise enough: for rotated codes (p also for group formats, see kvc_pv_fn),
 * in sequences of at least COARSE_COLUMNS columns, for pages with at most COARSE_SHARE of the softmax weight so far.
 * The error is then 0.5% of the output, compared with 10% from 4-bit codes. (0.47% with a share of 1/4, 0.56% without
 * the limit; pages whose weight is concentrated on few tokens contribute most.) Shorter sequences use full
 * precision. */
#define COARSE_COLUMNS 64
#define COARSE_SHARE 0.5f

/* ---------------------------------------------------------------- queries */

/* False if the row times `factor` contains NaN or Inf: an all-ones exponent carries into the sign bit. */
static bool row_is_finite(const float *q, int64_t dim, float factor)
{
    uint32_t carry = 0;
    for (int64_t d = 0; d < dim; d++) carry |= (kvc_f32_bits(q[d] * factor) & 0x7fffffff) + 0x00800000;
    return !(carry >> 31);
}

static void scale_row(float *q, int64_t n, float factor)
{
    for (int64_t i = 0; i < n; i++) q[i] *= factor;
}

/* Loads dims [first, first + query->dim) of q. Returns whether all of them are finite. */
static bool load_query(kvc_work *w, kvc_query *query, int64_t first)
{
    const kvc_attend_args *a = w->at.job->call->a;
    const kvc_kernels *kernels = w->at.job->call->kernels;
    int64_t G = w->at.job->group, dim = query->dim, size = a->q.dtype == KVC_F32 ? 4 : 2;
    kvc_query_form *plain = &query->forms[KVC_PLAIN];
    bool finite = true;
    query->coarse = w->at.columns >= COARSE_COLUMNS;
    query->rows = w->rows;
    for (int64_t t = 0; t < w->at.tokens; t++)
        for (int64_t g = 0; g < G; g++) {
            const char *src = (const char *)a->q.data + (w->at.b * a->q.stride[0] + (w->at.h * G + g) * a->q.stride[1] +
                                                         (w->at.row->token + w->at.t0 + t) * a->q.stride[2] + first) *
                                                            size;
            float *q = plain->q + (t * G + g) * dim;
            kvc_load_rows(src, 0, a->q.dtype, 1, dim, q);
        }
    for (int64_t r = 0; r < w->rows; r++) {
        if (row_is_finite(plain->q + r * dim, dim, a->scale)) continue;
        finite = false;
        /* integer forms cannot hold NaN; l carries it to the output */
        memset(plain->q + r * dim, 0, (size_t)dim * sizeof *plain->q);
        w->l[r] = NAN;
    }
    plain->unit = a->scale;
    if (plain->half) plain->whole = kernels->halves(plain, w->rows, dim);
    scale_row(plain->q, w->rows * dim, a->scale);
    if (plain->hi) kernels->limbs(plain, w->rows, dim);
    for (int space = KVC_ROTATED; space < KVC_SPACES; space++) {
        kvc_query_form *f = &query->forms[space];
        if (!f->q) continue;
        memcpy(f->q, plain->q, (size_t)(w->rows * dim) * sizeof(float));
        if (space == KVC_ROTATED) kernels->rotate(f->q, w->rows, dim);
        for (int64_t r = 0; space == KVC_DIGITS && r < w->rows; r++) kvc_spread(f->q + r * dim, dim);
        if (f->hi) kernels->limbs(f, w->rows, dim);
    }
    return finite;
}

void kvc_work_begin(kvc_work *w, int64_t item)
{
    kvc_place_at(&w->at, item);
    w->rows = w->at.tokens * w->at.job->group;
    for (int64_t r = 0; r < w->rows; r++) {
        w->m[r] = -INFINITY, w->l[r] = 0;
    }
    if (w->loaded == w->at.group + 1) return; /* a further run of the same, finite, queries */
    bool finite = load_query(w, &w->query, 0);
    if (w->at.job->call->a->latent) finite &= load_query(w, &w->latent.query, w->query.dim);
    if (w->at.row->flag && *w->at.row->flag)
        for (int64_t r = 0; r < w->rows; r++) w->l[r] = NAN, finite = false;
    w->loaded = finite ? w->at.group + 1 : 0;
}

/* ---------------------------------------------------------------- a page */

static kvc_side side_of(const kvc_work *w, const kvc_view *v, int key)
{
    const kvc_store *s = &w->at.job->call->a->store;
    const uint8_t *at = v->data;
    return key ? (kvc_side){v->key, 1, s->key_dim, v->page_size, at + v->layout.k, at + v->layout.k_meta}
               : (kvc_side){v->value, 0, s->value_dim, v->page_size, at + v->layout.v, at + v->layout.v_meta};
}

/* Whether a wide kernel takes these rows of a page that holds `stored` tokens. */
static bool goes_wide(const kvc_wide_kernels *wide, const kvc_side *side, int64_t stored, int64_t rows)
{
    return wide->qk[side->format] && rows >= wide->rows[side->format] && side->dim % KVC_WIDE_STEP == 0 &&
           stored % KVC_WIDE_STEP == 0;
}

/* Scores of rows [r0, r0 + n) of a page with `stored` tokens. ready: K was already prepared for earlier rows. */
static void score(kvc_work *w, const kvc_side *key, kvc_query *query, int64_t stored, const kvc_wide_kernels *wide,
                  int64_t r0, int64_t n, ptrdiff_t ahead, bool ready, float *s, int64_t ld)
{
    const kvc_kernels *kernels = w->at.job->call->kernels;
    int64_t tiles = kvc_ceil_div(stored, KVC_TILE);
    kvc_qk_fn *own = kernels->qk[key->format];
    query->form = &query->forms[kvc_format_rotated(key->format)];
    kvc_qk_args args = {key->tiles, key->meta, query, r0, n, key->page_size, tiles, ahead, s, ld, NULL, ready, w->rows};
    args.wide = w->wide[query == &w->query ? 0 : 2];
    if (wide && goes_wide(wide, key, stored, n)) {
        wide->qk[key->format](&args);
        return;
    }
    if (!own && !ready) kernels->affine(key, stored, ahead, w->words[0], &w->affine[0]);
    for (int64_t i = 0; i < n; i += KVC_ROWS, args.ahead = 0) {
        args.row0 = r0 + i, args.rows = kvc_min(KVC_ROWS, n - i), args.s = s + i * ld;
        if (own)
            own(&args);
        else
            kernels->qk_affine(key, &w->affine[0], query, args.row0, args.rows, tiles, args.s, ld);
    }
}

/* Adds the scores of the rotary part to s. */
static void score_rotary(kvc_work *w, const kvc_view *v, const kvc_wide_kernels *wide, int64_t r0, int64_t n,
                         bool ready, float *s, int64_t ld)
{
    score(w, &w->latent.rotary, &w->latent.query, v->n, wide, r0, n, 0, ready, w->latent.s, KVC_MAX_PAGE);
    for (int64_t r = 0; r < n; r++)
        for (int64_t t = 0; t < v->n; t++) s[r * ld + t] += w->latent.s[r * KVC_MAX_PAGE + t];
}

/* Adds V of the page, weighted by p, to rows [r0, r0 + n). Wide kernels and affine formats prefetch the next page with
 * the first rows, when they prepare V; others with the last rows. */
static void add_values(kvc_work *w, const kvc_side *value, int64_t stored, const kvc_wide_kernels *wide, int64_t r0,
                       int64_t n, kvc_digits digits, ptrdiff_t ahead, bool ready, const float *p, int64_t ld)
{
    const kvc_kernels *kernels = w->at.job->call->kernels;
    int64_t Dv = value->dim;
    int f = value->format;
    float *o = w->o[kvc_format_rotated(f)] + r0 * Dv;
    kvc_pv_fn *own = kernels->pv[f];
    kvc_pv_args args = {value->tiles, value->meta, p, ld, n,    Dv,    value->page_size,
                        stored,       digits,      0, o,  NULL, ready, w->rows};
    args.wide = w->wide[1], args.ahead = ready ? 0 : ahead;
    if (wide && goes_wide(wide, value, stored, n)) {
        wide->pv[f](&args);
        return;
    }
    if (!own && !ready) kernels->affine(value, stored, ahead, w->words[1], &w->affine[1]);
    for (int64_t i = 0; i < n; i += KVC_ROWS) {
        args.p = p + i * ld, args.rows = kvc_min(KVC_ROWS, n - i), args.o = o + i * Dv;
        args.ahead = r0 + i + KVC_ROWS < w->rows ? 0 : ahead;
        if (own)
            own(&args);
        else
            kernels->pv_affine(&w->affine[1], args.p, ld, args.rows, stored, digits, args.o);
    }
}

/* Prefetches the buffer for the next page's weights. In long sequences it has left the cache since the last call, and a
 * store that misses takes longer than a page's arithmetic. Must be inlined: gcc treats a function that only prefetches
 * as free of side effects and removes its calls. */
static inline __attribute__((always_inline)) void fetch_room(const kvc_work *w, int64_t c, bool exact)
{
    kvc_kept next = kvc_kept_of(w, c, 0);
    int64_t bytes = w->rows * w->at.job->kept_width * (exact ? 4 : 2);
    const char *to = exact ? (const char *)next.exact : (const char *)next.half;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(to + i, 1, 3);
}

/* Prefetches part of the next page to L2, spread over the rows of the block. Packing would request all
 * of it at once. */
static inline __attribute__((always_inline)) void fetch_part(const kvc_work *w, const kvc_view *v, int64_t r0,
                                                             int64_t n, ptrdiff_t ahead)
{
    int64_t lines = v->layout.bytes / KVC_ALIGN;
    for (int64_t i = lines * r0 / w->rows; ahead && i < lines * (r0 + n) / w->rows; i++)
        __builtin_prefetch(v->data + ahead + i * KVC_ALIGN, 0, 2);
}

/* Scores of rows [r0, r0 + n), including the rotary part for latents. */
static void score_page(kvc_work *w, const kvc_view *v, const kvc_side *key, const kvc_wide_kernels *wide, int64_t r0,
                       int64_t n, ptrdiff_t ahead, bool ready, float *s, int64_t ld)
{
    const kvc_panel_kernels *panel = w->at.job->call->kernels->panel;
    bool latent = w->at.job->call->a->latent, packed = latent && w->latent.packed;
    int64_t tiles = kvc_ceil_div(v->n, KVC_TILE);
    if (packed) {
        w->query.form = &w->query.forms[kvc_format_rotated(v->key)];
        w->latent.query.form = &w->latent.query.forms[kvc_format_rotated(v->value)];
        panel->qk(&w->latent.keys, &w->query, r0, n, tiles, false, s, ld);
        fetch_part(w, v, r0, n, ahead);
    } else {
        score(w, key, &w->query, v->n, wide, r0, n, r0 ? 0 : ahead, ready, s, ld);
    }
    if (packed && w->latent.rotary_packed)
        panel->qk(&w->latent.rotary_keys, &w->latent.query, r0, n, tiles, true, s, ld);
    else if (latent)
        score_rotary(w, v, wide, r0, n, ready, s, ld);
}

/* Adds the latents of a packed page, weighted by p. 8-bit p adds 1% to the error variance of 4-bit codes, whatever the
 * page's share of the weight. For 8-bit codes (decision 127) the error is acceptable for bf16 and fp16 outputs. */
static void add_panel(kvc_work *w, int64_t stored, int64_t r0, int64_t n, const float *p, int64_t ld, const float *keep)
{
    const kvc_call *call = w->at.job->call;
    int space = kvc_format_rotated(w->latent.values.format);
    bool coarse = w->query.coarse && (space || call->a->out.dtype != KVC_F32);
    call->kernels->panel->pv(&w->latent.sums, p, ld, n, stored, coarse, keep, w->o[space] + r0 * kvc_out_dim(call));
}

static void clear_sums(kvc_work *w, int space)
{
    if (!w->summed[space]) memset(w->o[space], 0, (size_t)(w->rows * kvc_out_dim(w->at.job->call)) * sizeof(float));
}

/* Called before a page's first rows: prepares latents and clears sums that have no contribution yet. Returns true if
 * the kernel will overwrite the sums instead of adding to them. */
static bool begin_page(kvc_work *w, const kvc_side *key, kvc_side *value, int64_t n, bool all)
{
    bool latent = w->at.job->call->a->latent;
    if (latent) {
        kvc_latent_begin(w, key, value, n);
        *value = w->latent.values;
    }
    int space = kvc_format_rotated(value->format);
    bool sets = latent && w->latent.packed && all && !w->summed[space];
    if (!sets) clear_sums(w, space);
    if (latent && w->latent.mean && space) clear_sums(w, KVC_PLAIN);
    return sets;
}

/* Required precision of the softmax weights. */
static kvc_digits digits_for(const kvc_work *w, bool coarse)
{
    return coarse ? KVC_P_BYTE : w->at.job->call->a->out.dtype == KVC_BF16 ? KVC_P_BF16 : KVC_P_EXACT;
}

/* Fast path for a full page that every row sees, which is the common case at decode: no masks, no accumulated
 * attention, no latents. */
static void attend_whole(kvc_work *w, const kvc_view *v, const kvc_wide_kernels *wide, ptrdiff_t ahead)
{
    static const uint64_t bits[][4] = {{~0ull, ~0ull, ~0ull, ~0ull},
                                       {~0ull, ~0ull, ~0ull, ~0ull},
                                       {~0ull, ~0ull, ~0ull, ~0ull},
                                       {~0ull, ~0ull, ~0ull, ~0ull}};
    _Static_assert(sizeof bits == KVC_ROWS * KVC_WORDS * sizeof **bits && KVC_WORDS == 4, "all that a row may see");
    const kvc_call *call = w->at.job->call;
    int64_t Dv = kvc_out_dim(call), step = wide ? KVC_WIDE : KVC_ROWS, ld = v->n;
    kvc_side key = side_of(w, v, 1), value = side_of(w, v, 0);
    clear_sums(w, kvc_format_rotated(v->value));
    /* All scores first: K stays in L1 for all rows, then V does. */
    for (int64_t r0 = 0; r0 < w->rows; r0 += step)
        score(w, &key, &w->query, v->n, wide, r0, kvc_min(step, w->rows - r0), r0 ? 0 : ahead, r0 > 0, w->s + r0 * ld,
              ld);
    for (int64_t r0 = 0; r0 < w->rows; r0 += step) {
        int64_t n = kvc_min(step, w->rows - r0);
        float keep[KVC_WIDE], before[KVC_WIDE], *l = w->l + r0, *s = w->s + r0 * ld;
        bool coarse = w->query.coarse, moved = false;
        for (int64_t r = 0; r < n; r += KVC_ROWS) {
            memcpy(before + r, l + r, KVC_ROWS * sizeof *l);
            call->kernels->softmax(s + r * ld, ld, kvc_min(KVC_ROWS, n - r), v->n, bits, call->a->softcap,
                                   w->m + r0 + r, l + r, keep + r);
        }
        for (int64_t r = 0; r < n; r++) {
            coarse &= l[r] - before[r] * keep[r] <= l[r] * COARSE_SHARE;
            moved |= keep[r] != 1;
        }
        for (int64_t r = 0; moved && r < n; r++) {
            if (isnan(keep[r])) memset(s + r * ld, 0, (size_t)v->n * sizeof *s);
            for (int space = 0; keep[r] != 1 && space < KVC_SPACES; space++)
                if (w->summed[space]) scale_row(w->o[space] + (r0 + r) * Dv, Dv, keep[r]);
        }
        add_values(w, &value, v->n, wide, r0, n, digits_for(w, coarse), ahead, r0 > 0, s, ld);
    }
    w->summed[kvc_format_rotated(v->value)] = true;
}

void kvc_page_attend(kvc_work *w, const kvc_view *v, ptrdiff_t ahead)
{
    const kvc_job *job = w->at.job;
    const kvc_kernels *kernels = job->call->kernels;
    const kvc_wide_kernels *wide = kernels->wide;
    int64_t Dv = kvc_out_dim(job->call), n16 = kvc_ceil_div(v->n, KVC_TILE) * KVC_TILE, c = v->column;
    /* store weights for accumulated attention; fp32 if exact */
    bool keeps = w->kept.m, exact = keeps && kvc_format_is_raw(v->key);
    bool many = wide || kvc_panel_kernels_of(w);
    int64_t ld = exact ? job->kept_width : KVC_MAX_PAGE, step = many ? KVC_WIDE : KVC_ROWS;
    int64_t sees[KVC_WIDE];
    uint64_t bits[KVC_WIDE][KVC_WORDS];
    bool ready = false, sets = false, all = kvc_all_seen(&w->at, v), latent = job->call->a->latent;
    if (all && !keeps && !latent && v->n % 64 == 0) {
        attend_whole(w, v, wide, ahead);
        return;
    }
    kvc_side key = side_of(w, v, 1), value = side_of(w, v, 0);
    if (keeps && w->rows <= KVC_ROWS && c + 1 < w->at.columns) fetch_room(w, c + 1, exact);
    for (int64_t i = 0; all && i < KVC_WORDS; i++) { /* in one loop: one memset per row is slower */
        int64_t left = v->n - 64 * i;
        uint64_t word = left >= 64 ? ~0ull : left > 0 ? ~0ull >> (64 - left) : 0;
        for (int64_t r = 0; r < step; r++) bits[r][i] = word;
    }
    for (int64_t r = 0; all && r < step; r++) sees[r] = v->n;
    /* The next page is prefetched once: its K with the scores of the first rows, its V with the sums
     * of the last rows. */
    for (int64_t r0 = 0; r0 < w->rows; r0 += step) {
        int64_t n = kvc_min(step, w->rows - r0);
        kvc_kept kept = {0};
        if (keeps) kept = kvc_kept_of(w, c, r0);
        float *s = exact ? kept.exact : w->s;
        if (!all && !kvc_look(&w->at, v, r0, n, bits, sees)) continue;
        if (!ready) sets = begin_page(w, &key, &value, v->n, all);
        score_page(w, v, &key, wide, r0, n, ahead, ready, s, ld);
        bool coarse = w->query.coarse;
        /* add_panel scales these sums */
        int panel = latent && w->latent.packed ? kvc_format_rotated(value.format) : -1;
        float keep[KVC_WIDE], m[KVC_WIDE], before[KVC_WIDE], *l = w->l + r0;
        if (many) /* constant sizes, because "rep movs" is slower for such small copies */
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
            for (int space = 0; keep[r] != 1 && space < KVC_SPACES; space++)
                if (w->summed[space] && space != panel) scale_row(w->o[space] + (r0 + r) * Dv, Dv, keep[r]);
            if (keeps && sees[r] && m[r] < INFINITY) kept.m[r] = m[r]; /* m = +inf: there are no valid weights */
        }
        if (keeps && !exact) kernels->keep(s, ld, n, n16, kept.half, job->kept_width);
        if (latent && w->latent.packed)
            add_panel(w, v->n, r0, n, s, ld, sets ? NULL : keep);
        else
            add_values(w, &value, v->n, wide, r0, n, digits_for(w, coarse), latent ? 0 : ahead, ready, s, ld);
        if (latent && w->latent.mean) kvc_latent_add_mean(w, s, ld, n, v->n, w->o[KVC_PLAIN] + r0 * Dv);
        ready = true;
    }
    if (ready) w->summed[kvc_format_rotated(value.format)] = true;
    if (latent && w->latent.mean) w->summed[KVC_PLAIN] = true;
}
