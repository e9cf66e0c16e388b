/* attend_accumulated.c - accumulated attention (H2O): for each token, the sum of exp(s - lse) over the call's queries
 * and the group. The result is exact, and no full weight matrix is stored. A block of queries keeps its softmax weights
 * relative to the running maximum m (fp32 if K is raw, otherwise fp16) and rescales them once lse is known. Blocks of
 * one head are summed in fixed point, so the order does not matter.
 *
 * Cost per token and query row: a store and a load of 2 bytes (4 if K is raw) and a multiply-add. Memory: a block's
 * rows for every token, per worker. */
#include "base/alloc.h"
#include "attend_work.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define UNIT 0x1p-36 /* fixed-point unit; sums over 2^27 queries do not overflow */

static kvc_status take_room(const kvc_job *job, int64_t blocks, kvc_kept *room)
{
    int64_t rows = blocks * job->columns * kvc_block_rows(job);
    KVC_TRY(kvc_scratch(rows, sizeof *room->m, &room->m));
    KVC_TRY(kvc_scratch(rows * job->kept_width, sizeof *room->exact, &room->exact)); /* one of the two is used */
    KVC_TRY(kvc_scratch(rows * job->kept_width, sizeof *room->half, &room->half));
    for (int64_t i = 0; i < rows; i++) room->m[i] = -INFINITY;
    return KVC_OK;
}

static void give_room(kvc_kept *room)
{
    kvc_scratch_free(room->half);
    kvc_scratch_free(room->exact);
    kvc_scratch_free(room->m);
}

kvc_status kvc_accumulated_begin(kvc_job *job)
{
    const kvc_attend_args *a = job->call->a;
    const kvc_store *s = &a->store;
    int64_t heads = s->batch * s->heads;
    job->kept_width = kvc_max(s->page_size, kvc_sink_tokens(s->sinks));
    if (job->parts) KVC_TRY(take_room(job, heads * job->blocks, &job->kept));
    if (job->blocks == 1) return KVC_OK;
    KVC_TRY(kvc_scratch(heads * a->accumulated_width, sizeof *job->total, &job->total));
    for (int64_t i = 0; i < heads * a->accumulated_width; i++) atomic_init(&job->total[i], 0);
    return KVC_OK;
}

void kvc_accumulated_end(kvc_job *job)
{
    const kvc_attend_args *a = job->call->a;
    for (int64_t i = 0; job->total && i < a->store.batch * a->store.heads * a->accumulated_width; i++)
        a->accumulated[i] = (float)((double)atomic_load_explicit(&job->total[i], memory_order_relaxed) * UNIT);
    kvc_scratch_free(job->total);
    give_room(&job->kept);
}

kvc_status kvc_kept_begin(kvc_work *w)
{
    const kvc_job *job = w->at.job;
    return job->call->a->accumulated && !job->parts ? take_room(job, 1, &w->kept) : KVC_OK;
}

void kvc_kept_end(kvc_work *w)
{
    if (!w->at.job->parts) give_room(&w->kept);
}

void kvc_kept_at(kvc_work *w, int64_t group)
{
    const kvc_job *job = w->at.job;
    int64_t rows = job->columns * kvc_block_rows(job);
    if (job->parts)
        w->kept = kvc_kept_from(&job->kept, group * rows, job->kept_width);
    else
        for (int64_t i = 0; i < w->at.columns * kvc_block_rows(job); i++) w->kept.m[i] = -INFINITY;
}

/* lse of row r of the block. Returns +inf, which makes the weights 0, for queries of padding and for rows with a
 * non-finite lse. */
static float lse_of(const kvc_work *w, int64_t r)
{
    const kvc_attend_args *a = w->at.job->call->a;
    int64_t G = w->at.job->group, hq = w->at.h * G + r % G;
    const float *given = a->given_lse;
    if (!given && a->real && a->Tq == a->T && !a->real[w->at.b * a->T + w->at.t0 + r / G]) return INFINITY;
    float lse = (given ? given : a->lse)[(w->at.b * a->query_heads + hq) * a->Tq + w->at.t0 + r / G];
    return isfinite(lse) ? lse : INFINITY;
}

/* Adds `sum` to tokens [first, first + n) of a head. sum = NULL: they received nothing from this block. */
static void put(const kvc_work *w, int64_t first, int64_t n, const float *sum)
{
    const kvc_attend_args *a = w->at.job->call->a;
    int64_t at = (w->at.b * a->store.heads + w->at.h) * a->accumulated_width + first;
    if (w->at.job->total)
        for (int64_t t = 0; sum && t < n; t++)
            atomic_fetch_add_explicit(&w->at.job->total[at + t], llrint((double)sum[t] / UNIT), memory_order_relaxed);
    else if (sum)
        memcpy(a->accumulated + at, sum, (size_t)n * sizeof *sum);
    else
        memset(a->accumulated + at, 0, (size_t)n * sizeof *sum);
}

/* Replaces each m by the factor that rescales weights relative to it. */
static void find_factors(kvc_work *w)
{
    int64_t rows = kvc_block_rows(w->at.job), n = w->at.columns * rows, period = rows;
    float *lse = w->l; /* its contents are already in the output; padded to full registers of 16 */
    for (int64_t r = 0; r < rows; r++) lse[r] = r < w->rows ? lse_of(w, r) : INFINITY;
    for (; 16 % rows == 0 && period < 16; period += rows) memcpy(lse + period, lse, (size_t)rows * sizeof *lse);
    for (int64_t i = 0; i < n; i += period)
        w->at.job->call->kernels->factors(w->kept.m + i, lse, kvc_min(period, n - i));
}

/* Clears a row that was never written (such as padding between visible rows): its memory may hold NaN, and 0 * NaN is
 * NaN. */
static void forget_row(const kvc_kept *kept, bool half, int64_t at, int64_t n)
{
    if (half)
        memset(kept->half + at, 0, (size_t)n * sizeof *kept->half);
    else
        memset(kept->exact + at, 0, (size_t)n * sizeof *kept->exact);
}

void kvc_accumulate(kvc_work *w)
{
    const kvc_job *job = w->at.job;
    int64_t end = 0, width = job->kept_width;
    float sum[KVC_MAX_PAGE];
    find_factors(w);
    for (int64_t c = 0; c < w->at.columns; c++) {
        kvc_view v;
        if (!kvc_view_place(&w->at, c, &v)) continue;
        kvc_kept kept = kvc_kept_of(w, c, 0);
        const float *factor = kept.m;
        int64_t n16 = kvc_ceil_div(v.n, KVC_TILE) * KVC_TILE, from = 0, to = w->rows;
        bool half = !kvc_format_is_raw(v.key);
        while (from < to && factor[from] == 0) from++; /* skip rows that do not see the page */
        while (from < to && factor[to - 1] == 0) to--;
        for (int64_t r = from; r < to; r++)
            if (factor[r] == 0) forget_row(&kept, half, r * width, n16);
        const void *p = half ? (const void *)(kept.half + from * width) : (const void *)(kept.exact + from * width);
        if (from < to) job->call->kernels->sum_rows(p, half, width, to - from, n16, factor + from, sum);
        put(w, v.first, v.n, from < to ? sum : NULL);
        end = v.first + v.n;
    }
    put(w, end, job->call->a->accumulated_width - end, NULL);
}
