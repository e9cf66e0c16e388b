/* attend.c - the attention driver: splits a call into work items and merges their partial results.
 *
 * An item is (sequence, KV head, block of queries, run of block table columns). A GQA group is never split, so each
 * page is read once for all its query heads. The split depends on shapes alone, and runs are merged in a fixed order,
 * so results do not depend on the number of threads or on scheduling. attend_view.c decides which pages an item sees;
 * attend_work.c computes attention over a page. */
#include "base/alloc.h"
#include "attend_work.h"
#include "base/floats.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define BLOCK_ROWS 64          /* approximate number of query rows (tokens x G) per item */
#define WIDE_ROWS 256          /* the same for wide kernels, if there are enough items */
#define RUNS 64                /* number of equal parts of a call's columns; longer items are split into runs */
#define RUN_COLUMNS 8          /* minimum number of columns per run */
#define JOIN_FLOATS 262144     /* minimum number of partial floats for which that pass is used */
#define TOGETHER_ROW_BYTES 512 /* minimum page size in bytes per query row of an item for interleaving heads */
#define WORTH_THREADS 65536    /* bytes that one core reads in the time it takes to wake another thread */

typedef struct driver {
    kvc_job job;
    float *partial;   /* [parts][part_floats] */
    atomic_int *done; /* [parts] finished runs, at the first of them; NULL if join_parts merges all */
    atomic_llong next;
    atomic_bool failed;
} driver;

void kvc_run(const kvc_exec *exec, int64_t n, int64_t bytes, void (*body)(int64_t, int64_t, void *), void *context)
{
    if (n <= 0) return;
    if (n > 1 && bytes >= WORTH_THREADS && exec && exec->run)
        exec->run(n, body, context);
    else
        body(0, n, context);
}

/* m = -inf means that no token was visible. Otherwise l > 0; if it is not, the scores contained NaN or +inf, and the
 * output is NaN. */
static void write_out(const kvc_work *w, int64_t row, const float *o, float m, float l)
{
    const kvc_call *call = w->at.job->call;
    const kvc_attend_args *a = call->a;
    int64_t Dv = kvc_out_dim(call), G = w->at.job->group, b = w->at.b, hq = w->at.h * G + row % G;
    int64_t t = w->at.row->token + w->at.t0 + row / G;
    bool sees = m > -INFINITY;
    if (!(l > 0)) l = NAN;
    if (a->lse) a->lse[b * call->lse_stride[0] + hq * call->lse_stride[1] + t] = sees ? m + logf(l) : -INFINITY;
    if (a->s_aux && sees) l += expf(a->s_aux[hq] - m);
    float inverse = sees ? 1 / l : 0;
    float most = call->own_raw == KVC_RAW_F16 ? 65504 : INFINITY; /* decoded fp16 values may exceed the fp16 range */
    int64_t at = b * a->out.stride[0] + hq * a->out.stride[1] + t * a->out.stride[2];
    uint16_t *half = (uint16_t *)a->out.data + at;
    if (a->out.dtype == KVC_F32)
        for (int64_t d = 0; d < Dv; d++) ((float *)a->out.data)[at + d] = o[d] * inverse;
    else if (a->out.dtype == KVC_F16)
        for (int64_t d = 0; d < Dv; d++) half[d] = kvc_f32_to_f16(kvc_saturate(o[d] * inverse, most));
    else
        for (int64_t d = 0; d < Dv; d++) half[d] = kvc_f32_to_bf16(o[d] * inverse);
}

/* Floats per partial result: o [rows][Dv] in one space, m [rows], l [rows], and the index of the space. */
static int64_t part_floats(const kvc_job *job)
{
    return job->block_tokens * job->group * (kvc_out_dim(job->call) + 2) + KVC_TILE;
}

/* Transforms the sums of the other spaces back and adds them to o[KVC_PLAIN]. */
static void to_plain(const kvc_call *call, float *const *o, const bool *summed, int64_t rows)
{
    int64_t Dv = kvc_out_dim(call);
    for (int space = KVC_ROTATED; space < KVC_SPACES; space++) {
        if (!summed[space]) continue;
        if (space == KVC_ROTATED) call->kernels->rotate(o[space], rows, Dv);
        for (int64_t r = 0; space == KVC_DIGITS && r < rows; r++) kvc_join(o[space] + r * Dv, Dv);
        for (int64_t i = 0; i < rows * Dv; i++) o[KVC_PLAIN][i] += o[space][i];
    }
}

/* Merges the runs of one row, scaled by `factor`. Runs may have accumulated in different spaces. */
static void join_runs(const kvc_job *job, const float *p, int64_t size, int64_t runs, const int *space,
                      const float *factor, float *const *o, bool *summed)
{
    int64_t Dv = kvc_out_dim(job->call);
    bool one = true;
    for (int64_t run = 1; run < runs; run++) one &= space[run] == space[0];
    if (one) { /* NOLINTNEXTLINE: there is at least one run */
        job->call->kernels->sum_rows(p, false, size, runs, Dv, factor, o[space[0]]);
        summed[space[0]] = true;
        if (space[0]) memset(o[KVC_PLAIN], 0, (size_t)Dv * sizeof(float));
        return;
    }
    for (int i = 0; i < KVC_SPACES; i++) memset(o[i], 0, (size_t)Dv * sizeof(float));
    for (int64_t run = 0; run < runs; run++, p += size) {
        float *to = o[space[run]];
        summed[space[run]] = true;
        for (int64_t e = 0; e < Dv; e++) to[e] += factor[run] * p[e];
    }
}

/* Merges the runs of a (sequence, head, block), in order, for rows [r0, r1). */
static void join_rows(driver *d, const kvc_work *w, int64_t r0, int64_t r1)
{
    const kvc_job *job = &d->job;
    int64_t rows = job->block_tokens * job->group, Dv = kvc_out_dim(job->call), size = part_floats(job);
    int64_t runs = w->at.runs;
    const float *p = d->partial + w->at.part * size;
    float o[KVC_SPACES][KVC_MAX_DIM], factor[RUNS];
    int space[RUNS];
    for (int64_t run = 0; run < runs; run++) space[run] = (int)p[run * size + rows * (Dv + 2)];
    for (int64_t r = r0; r < r1; r++) {
        float m = -INFINITY, l = 0;
        bool summed[KVC_SPACES] = {0};
        for (int64_t run = 0; run < runs; run++) m = fmaxf(m, p[run * size + rows * Dv + r]);
        for (int64_t run = 0; run < runs; run++) {
            factor[run] = m > -INFINITY ? expf(p[run * size + rows * Dv + r] - m) : 0;
            l += factor[run] * p[run * size + rows * (Dv + 1) + r];
        }
        float *of[KVC_SPACES];
        for (int i = 0; i < KVC_SPACES; i++) of[i] = o[i];
        join_runs(job, p + r * Dv, size, runs, space, factor, of, summed);
        to_plain(job->call, of, summed, 1);
        write_out(w, r, o[KVC_PLAIN], m, l);
    }
}

static void begin_item(kvc_work *w, int64_t item)
{
    kvc_work_begin(w, item);
    if (w->at.job->call->a->accumulated) kvc_kept_at(w, w->at.group);
    for (int space = KVC_PLAIN; space < KVC_SPACES; space++) w->summed[space] = false;
}

/* The worker that finishes the last run of a block merges its runs while they are still in cache. */
static void end_item(driver *d, kvc_work *w)
{
    const kvc_job *job = &d->job;
    int64_t Dv = kvc_out_dim(job->call), rows = job->block_tokens * job->group;
    int space = KVC_PLAIN, spaces = 0;
    for (int i = 0; i < KVC_SPACES; i++)
        if (w->summed[i]) space = i, spaces++;
    bool plain = spaces != 1 || w->at.runs == 1;
    if (plain && !w->summed[KVC_PLAIN]) memset(w->o[KVC_PLAIN], 0, (size_t)(w->rows * Dv) * sizeof(float));
    if (plain) to_plain(job->call, w->o, w->summed, w->rows), space = KVC_PLAIN;
    if (w->at.runs > 1) {
        float *p = d->partial + (w->at.part + w->at.run) * part_floats(job);
        memcpy(p, w->o[space], (size_t)(w->rows * Dv) * sizeof(float));
        memcpy(p + rows * Dv, w->m, (size_t)w->rows * sizeof(float));
        memcpy(p + rows * (Dv + 1), w->l, (size_t)w->rows * sizeof(float));
        p[rows * (Dv + 2)] = (float)space;
        if (d->done && atomic_fetch_add(&d->done[w->at.part], 1) + 1 < w->at.runs) return;
        if (d->done) join_rows(d, w, 0, w->rows);
    } else {
        for (int64_t r = 0; r < w->rows; r++) write_out(w, r, w->o[KVC_PLAIN] + r * Dv, w->m[r], w->l[r]);
    }
    if (w->kept.m) kvc_accumulate(w);
}

static kvc_status attend_some(driver *d, int64_t share)
{
    kvc_work works[KVC_TOGETHER];
    float *block;
    int64_t lanes = d->job.together;
    KVC_TRY(kvc_scratch(kvc_work_lay_out(works, lanes, &d->job, NULL), sizeof(float), &block));
    kvc_work_lay_out(works, lanes, &d->job, block);
    kvc_status status = kvc_kept_begin(works);
    const kvc_wide_kernels *wide = d->job.call->kernels->wide;
    if (wide) wide->begin();
    if (status == KVC_OK) {
        kvc_ahead ahead;
        ptrdiff_t distance;
        kvc_ahead_begin(&ahead, &d->job, share);
        for (const kvc_view *v; (v = kvc_ahead_next(&ahead, &distance));) {
            kvc_work *w = &works[v->lane];
            if (v->item != w->at.item) begin_item(w, v->item);
            if (v->n > 0) kvc_page_attend(w, v, distance);
            if (v->last) end_item(d, w);
        }
    }
    if (wide) wide->end();
    kvc_kept_end(works);
    kvc_scratch_free(block);
    return status;
}

/* Workers claim items from a shared counter; only the size of [begin, end) is used. */
static void attend_items(int64_t begin, int64_t end, void *context)
{
    driver *d = context;
    if (attend_some(d, end - begin) != KVC_OK) atomic_store(&d->failed, true);
}

/* Merges runs in parallel after all items are done: for each part, its share of the rows of its block. */
static void join_parts(int64_t begin, int64_t end, void *context)
{
    driver *d = context;
    kvc_job *job = &d->job;
    kvc_work w = {.at = {.job = job}};
    int64_t b = 0;
    for (int64_t i = begin; i < end; i++) {
        KVC_SEEK(job->call, b, i, attend_part);
        const kvc_row *first = kvc_call_row(job->call, b, 0);
        kvc_place_at(&w.at, first->attend_item + i - first->attend_part);
        int64_t rows = w.at.tokens * job->group;
        join_rows(d, &w, rows * w.at.run / w.at.runs, rows * (w.at.run + 1) / w.at.runs);
    }
}

/* Number of heads (a divisor of the total) whose items a worker interleaves. Interleaving improves memory bandwidth but
 * spreads queries and sums over more memory, so it is off (1) if the call is compute-bound. The decision is based on a
 * page in the middle of the first sequence. */
static int64_t heads_together(const kvc_job *job)
{
    const kvc_store *s = &job->call->a->store;
    int64_t rows = job->block_tokens * job->group, n = kvc_min(s->heads, KVC_TOGETHER);
    kvc_place p = {.job = job};
    kvc_view v = {.page_size = 0};
    kvc_place_at(&p, 0);
    if (job->blocks > 1 || !kvc_view_at(&p, p.columns / 2, &v)) return 1;
    /* With accumulated attention, weights are buffered per head; fp32 weights need too much memory for interleaving to
     * pay off. */
    if (job->call->a->accumulated && (!job->parts || kvc_format_is_raw(v.key))) return 1;
    if (v.layout.bytes < TOGETHER_ROW_BYTES * rows) return 1;
    while (s->heads % n) n--;
    return n;
}

/* Query tokens per item. Wide kernels take so little time per row that reading the pages again for every block of
 * BLOCK_ROWS would dominate. */
static int64_t block_tokens(const kvc_call *call, int64_t group)
{
    const kvc_store *s = &call->a->store;
    int64_t rows = call->kernels->wide ? WIDE_ROWS : BLOCK_ROWS, all = 0;
    for (int64_t b = 0; b < s->batch; b++) all += call->rows[b * s->table_heads].queries * s->heads * group;
    while (rows > BLOCK_ROWS && all < RUNS * rows) rows /= 2;
    return kvc_min(call->most_queries, kvc_max(1, rows / group));
}

/* Blocks of a sequence, over all heads; columns of its longest head. */
static int64_t blocks_of(const kvc_job *job, int64_t b)
{
    return job->call->a->store.heads * kvc_ceil_div(kvc_call_row(job->call, b, 0)->queries, job->block_tokens);
}
static int64_t columns_of(const kvc_job *job, int64_t b)
{
    int64_t columns = 0;
    for (int64_t ht = 0; ht < job->call->a->store.table_heads; ht++)
        columns = kvc_max(columns, kvc_item_columns(job->call, kvc_call_row(job->call, b, ht)));
    return columns;
}

/* Splits sequences into runs, so that no item has much more than 1/RUNS of the call's columns, and numbers the items.
 * With accumulated attention all have equally many runs, since the buffers of all blocks have the size of the longest.
 * Returns the columns of all blocks together. */
static int64_t split(kvc_job *job, kvc_row *rows)
{
    const kvc_attend_args *a = job->call->a;
    int64_t groups = 0, all = 0, B = a->store.batch;
    for (int64_t b = 0; b < B; b++) {
        groups += blocks_of(job, b);
        all += blocks_of(job, b) * columns_of(job, b);
        job->columns = kvc_max(job->columns, columns_of(job, b));
    }
    if (a->accumulated) all = groups * job->columns;
    groups = 0;
    for (int64_t b = 0; b < B; b++) {
        kvc_row *row = &rows[b * a->store.table_heads];
        int64_t columns = a->accumulated ? job->columns : columns_of(job, b), blocks = blocks_of(job, b);
        row->runs = kvc_max(1, kvc_min(columns * RUNS / kvc_max(1, all), columns / RUN_COLUMNS));
        row->attend_group = groups;
        row->attend_item = job->items;
        row->attend_part = job->parts;
        groups += blocks;
        job->items += blocks * row->runs;
        if (row->runs > 1) job->parts += blocks * row->runs;
    }
    return all;
}

static kvc_status attend(kvc_call *call)
{
    const kvc_attend_args *a = call->a;
    const kvc_store *s = &a->store;
    driver d = {.job = {.call = call, .group = a->query_heads / s->heads, .next = &d.next}};
    kvc_job *job = &d.job;
    job->block_tokens = block_tokens(call, job->group);
    job->blocks = kvc_ceil_div(call->most_queries, job->block_tokens);
    int64_t columns = split(job, call->rows), floats = job->parts * part_floats(job);
    kvc_status status = a->accumulated ? kvc_accumulated_begin(job) : KVC_OK;
    if (status == KVC_OK && job->parts) {
        bool together = !a->accumulated && floats >= JOIN_FLOATS;
        status = kvc_scratch(floats, sizeof(float), &d.partial);
        if (status == KVC_OK && !together) status = kvc_scratch(job->parts, sizeof *d.done, &d.done);
        for (int64_t i = 0; status == KVC_OK && d.done && i < job->parts; i++) atomic_init(&d.done[i], 0);
    }
    if (status == KVC_OK) {
        int64_t read = columns * s->page_size * (s->key_dim + s->value_dim); /* about one byte per element */
        atomic_init(&d.next, 0);
        job->together = heads_together(job);
        kvc_run(&a->exec, job->items, read * job->block_tokens, attend_items, &d);
        if (atomic_load(&d.failed)) status = kvc_no_workspace("attend");
        if (status == KVC_OK && d.partial && !d.done)
            kvc_run(&a->exec, job->parts, job->parts * WORTH_THREADS, join_parts, &d);
    }
    if (a->accumulated) kvc_accumulated_end(job);
    kvc_scratch_free(d.partial);
    kvc_scratch_free(d.done);
    return status;
}

kvc_status kvc_no_workspace(const char *op)
{
    return kvc_fail(KVC_E_MEMORY, "out of memory: %s has no memory for its workspace", op);
}

kvc_status kvc_call_run(kvc_call *call)
{
    kvc_status status = kvc_call_write(call);
    if (status == KVC_OK && call->most_queries > 0) status = attend(call);
    kvc_call_end(call);
    return status;
}

kvc_status kvc_attend(const kvc_attend_args *args) { return kvc_attend_feedback(args, NULL, NULL); }

kvc_status kvc_attend_feedback(const kvc_attend_args *args, const float *key_feedback, const float *value_feedback)
{
    kvc_call call;
    KVC_TRY(kvc_call_begin(&call, args, NULL));
    call.feedback[1] = key_feedback;
    call.feedback[0] = value_feedback;
    return kvc_call_run(&call);
}
