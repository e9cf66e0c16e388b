/* attend_mass.c - H2O's mass: for every token the sum of exp(s - lse) over the call's queries and the group, exact and
 * without a matrix of weights. A single query keeps what softmax made of its scores, relative to the maximum of that time,
 * and rescales it when lse is known; more queries make a second, lighter pass: scores, softmax against lse, sum.
 *
 * Cost of the first: a store and a load of 4 bytes a token and query head, one multiply-add; of the second: the scores and
 * exponentials again, nothing of V. */
#include "alloc.h"
#include "attend_work.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define COLUMNS 8 /* of an item */

typedef struct massing {
    const kvc_job *job;
    int64_t parts; /* items a (sequence, head) */
    atomic_bool failed;
} massing;

kvc_status kvc_mass_begin(kvc_job *job)
{
    const kvc_attend_args *a = job->call->a;
    const kvc_store *s = &a->store;
    int64_t rows = s->batch * s->heads * job->columns * job->group;
    if (a->Tq != 1) return KVC_OK;
    job->kept_width = kvc_max(s->page_size, kvc_sink_tokens(s->sinks));
    KVC_TRY(kvc_alloc(rows, sizeof *job->kept_m, &job->kept_m));
    KVC_TRY(kvc_alloc(rows * job->kept_width, sizeof *job->kept, &job->kept));
    for (int64_t i = 0; i < rows; i++) job->kept_m[i] = -INFINITY;
    return KVC_OK;
}

void kvc_mass_end(kvc_job *job)
{
    kvc_free(job->kept);
    kvc_free(job->kept_m);
}

static float *mass_of(const kvc_attend_args *a, int64_t b, int64_t h)
{
    return a->mass + (b * a->store.heads + h) * a->mass_width;
}

/* lse of query t; one whose numbers are not those of a softmax, or of a pad, adds nothing to any token. */
static float lse_of(const kvc_attend_args *a, int64_t b, int64_t hq, int64_t t)
{
    if (a->real && a->Tq == a->T && !a->real[b * a->T + t]) return INFINITY;
    float lse = a->lse[(b * a->query_heads + hq) * a->Tq + t];
    return isfinite(lse) ? lse : INFINITY;
}

void kvc_mass_of_kept(kvc_work *w)
{
    const kvc_job *job = w->job;
    const kvc_attend_args *a = job->call->a;
    int64_t G = job->group, end = 0;
    float *mass = mass_of(a, w->b, w->h), sum[KVC_MAX_PAGE];
    for (int64_t c = 0; c < w->columns; c++) {
        kvc_view v = kvc_view_at(w, c);
        int64_t page = ((w->b * a->store.heads + w->h) * job->columns + c) * G;
        float *factor = job->kept_m + page; /* in the place of the maxima */
        bool met = false;                   /* all heads of the token see a page, or none */
        if (v.n <= 0) continue;
        for (int64_t g = 0; g < G; g++) {
            float m = factor[g], lse = lse_of(a, w->b, w->h * G + g, 0);
            factor[g] = m > -INFINITY && lse < INFINITY ? expf(m - lse) : 0;
            met |= m > -INFINITY;
        }
        if (met) job->call->kernels->mass(job->kept + page * job->kept_width, job->kept_width, G, v.n, factor, sum);
        if (met)
            memcpy(mass + v.first, sum, (size_t)v.n * sizeof *sum);
        else
            memset(mass + v.first, 0, (size_t)v.n * sizeof *sum);
        end = v.first + v.n;
    }
    memset(mass + end, 0, (size_t)(a->mass_width - end) * sizeof *mass);
}

static void from_scores(kvc_work *w, const kvc_view *v)
{
    const kvc_attend_args *a = w->job->call->a;
    const kvc_kernels *kernels = w->job->call->kernels;
    int64_t G = w->job->group, n16 = kvc_ceil_div(v->n, KVC_TILE) * KVC_TILE;
    w->affine[0].from = NULL;
    for (int64_t r0 = 0; r0 < w->rows; r0 += KVC_ROWS) {
        int64_t n = kvc_min(KVC_ROWS, w->rows - r0), sees[KVC_ROWS];
        uint64_t bits[KVC_ROWS][KVC_WORDS];
        if (!kvc_page_scores(w, v, r0, n, 0, w->s, KVC_MAX_PAGE, bits, sees)) continue;
        float m[KVC_ROWS], l[KVC_ROWS] = {0}, keep[KVC_ROWS], sum[KVC_MAX_PAGE], one[KVC_ROWS];
        for (int64_t r = 0; r < n; r++) {
            m[r] = lse_of(a, w->b, w->h * G + (r0 + r) % G, w->t0 + (r0 + r) / G);
            one[r] = m[r] < INFINITY;
        }
        kernels->softmax(w->s, KVC_MAX_PAGE, n, n16, bits, a->softcap, m, l, keep);
        for (int64_t r = 0; r < n; r++)
            if (one[r] == 0) memset(w->s + r * KVC_MAX_PAGE, 0, (size_t)n16 * sizeof *w->s); /* may be NaN */
        kernels->mass(w->s, KVC_MAX_PAGE, n, v->n, one, sum);
        float *to = mass_of(a, w->b, w->h) + v->first;
        for (int64_t t = 0; t < v->n; t++) to[t] += sum[t];
    }
}

static void mass_items(int64_t begin, int64_t end, void *context)
{
    massing *x = context;
    const kvc_job *job = x->job;
    kvc_work w;
    float *block;
    if (kvc_alloc(kvc_work_lay_out(&w, job, NULL), sizeof(float), &block) != KVC_OK) {
        atomic_store(&x->failed, true);
        return;
    }
    kvc_work_lay_out(&w, job, block);
    for (int64_t i = begin; i < end; i++) {
        int64_t heads = job->call->a->store.heads, bh = i / x->parts, first = i % x->parts * COLUMNS;
        for (int64_t q = 0; q < job->blocks; q++) {
            kvc_work_begin(&w, bh / heads, bh % heads, q);
            for (int64_t c = first; c < kvc_min(first + COLUMNS, w.columns); c++) {
                kvc_view v = kvc_view_at(&w, c);
                if (v.n > 0) from_scores(&w, &v);
            }
        }
    }
    kvc_free(block);
}

kvc_status kvc_mass_of_scores(const kvc_job *job)
{
    const kvc_attend_args *a = job->call->a;
    massing x = {.job = job, .parts = kvc_ceil_div(job->columns, COLUMNS)};
    int64_t heads = a->store.batch * a->store.heads;
    memset(a->mass, 0, (size_t)(heads * a->mass_width) * sizeof *a->mass);
    kvc_run(&a->exec, heads * x.parts, heads * job->columns * a->store.page_size * job->group * a->Tq, mass_items, &x);
    return atomic_load(&x.failed) ? kvc_no_workspace("attend") : KVC_OK;
}
