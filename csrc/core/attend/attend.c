/* attend.c - the attention driver: how a call is cut into items, and how partial results are joined.
 *
 * Work is cut into items of (sequence, KV head, block of queries, run of columns); a GQA group is never split, so a
 * page is read once for all its query heads. The cut depends on shapes alone, and runs are joined in a fixed order:
 * results do not depend on the number of threads, nor on who takes which item. Which pages an item sees is attend_view.c's, what it does with
 * them attend_work.c's. */
#include "base/alloc.h"
#include "attend_work.h"
#include "base/floats.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define BLOCK_ROWS 64       /* query rows (tokens x G) of an item, about */
#define RUNS 64             /* items wanted before a sequence is not split into runs any more */
#define RUN_COLUMNS 8       /* columns of a run, at least */
#define WORTH_THREADS 65536 /* bytes: one core reads them in the time that waking another takes */

typedef struct driver {
    kvc_job job;
    float *partial;   /* [items] x (rows x (Dv + 2)): o, m, l; NULL when runs == 1 */
    atomic_int *left; /* runs of each (sequence, head, block) that are not done */
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

/* m = -Inf: nothing seen. Else l > 0, or the row's numbers were not those of a softmax: NaN, not "nothing seen". */
static void write_out(const kvc_work *w, int64_t row, const float *o, float m, float l)
{
    const kvc_call *call = w->job->call;
    const kvc_attend_args *a = call->a;
    int64_t Dv = kvc_out_dim(call), G = w->job->group, b = w->b, hq = w->h * G + row % G;
    int64_t t = w->row->token + w->t0 + row / G;
    bool sees = m > -INFINITY;
    if (!(l > 0)) l = NAN;
    if (a->lse) a->lse[b * call->lse_stride[0] + hq * call->lse_stride[1] + t] = sees ? m + logf(l) : -INFINITY;
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

/* Joins the runs of a (sequence, head, block) in order: whoever finishes its last run, while that is still in the caches. */
static void join_runs(driver *d, const kvc_work *w)
{
    const kvc_job *job = &d->job;
    int64_t rows = job->block_tokens * job->group, Dv = kvc_out_dim(job->call), size = rows * (Dv + 2);
    for (int64_t r = 0; r < w->rows; r++) {
        float o[KVC_MAX_DIM] = {0}, m = -INFINITY, l = 0;
        const float *p = d->partial + w->group * job->runs * size;
        for (int64_t run = 0; run < job->runs; run++) m = fmaxf(m, p[run * size + rows * Dv + r]);
        for (int64_t run = 0; run < job->runs && m > -INFINITY; run++) {
            const float *x = p + run * size;
            float weight = expf(x[rows * Dv + r] - m);
            l += weight * x[rows * (Dv + 1) + r];
            for (int64_t e = 0; e < Dv; e++) o[e] += weight * x[r * Dv + e];
        }
        write_out(w, r, o, m, l);
    }
}

static void begin_item(kvc_work *w, int64_t item)
{
    kvc_work_begin(w, item);
    int64_t bytes = w->rows * kvc_out_dim(w->job->call) * (int64_t)sizeof(float);
    if (w->job->call->a->mass) kvc_kept_at(w, w->group);
    for (int space = KVC_PLAIN; space < KVC_SPACES; space++) {
        w->summed[space] = false;
        if (w->o[space]) memset(w->o[space], 0, (size_t)bytes);
    }
}

static void end_item(driver *d, kvc_work *w, int64_t item)
{
    const kvc_job *job = &d->job;
    const kvc_call *call = job->call;
    int64_t Dv = kvc_out_dim(call), rows = job->block_tokens * job->group;
    float *o = w->o[KVC_PLAIN];
    for (int space = KVC_ROTATED; space < KVC_SPACES; space++) {
        float *turned = w->o[space];
        if (!turned) continue;
        if (space == KVC_ROTATED) call->kernels->rotate(turned, w->rows, Dv);
        for (int64_t r = 0; space == KVC_DIGITS && r < w->rows; r++) kvc_join(turned + r * Dv, Dv);
        for (int64_t i = 0; i < w->rows * Dv; i++) o[i] += turned[i];
    }
    if (d->partial) {
        float *p = d->partial + item * rows * (Dv + 2);
        memcpy(p, o, (size_t)(w->rows * Dv) * sizeof(float));
        memcpy(p + rows * Dv, w->m, (size_t)w->rows * sizeof(float));
        memcpy(p + rows * (Dv + 1), w->l, (size_t)w->rows * sizeof(float));
        if (atomic_fetch_sub(&d->left[w->group], 1) > 1) return;
        join_runs(d, w);
    } else {
        for (int64_t r = 0; r < w->rows; r++) write_out(w, r, o + r * Dv, w->m[r], w->l[r]);
    }
    if (w->kept.m) kvc_mass_of(w);
}

static kvc_status attend_some(driver *d, int64_t share)
{
    kvc_work w;
    float *block;
    KVC_TRY(kvc_scratch(kvc_work_lay_out(&w, &d->job, NULL), sizeof(float), &block));
    kvc_work_lay_out(&w, &d->job, block);
    kvc_status status = kvc_kept_begin(&w);
    const kvc_wide_kernels *wide = d->job.call->kernels->wide;
    if (wide) wide->begin();
    if (status == KVC_OK) {
        kvc_ahead ahead;
        ptrdiff_t distance;
        int64_t item = -1;
        kvc_ahead_begin(&ahead, &w, share);
        for (const kvc_view *v; (v = kvc_ahead_next(&ahead, &distance));) {
            if (v->item != item) begin_item(&w, item = v->item);
            if (v->n > 0) kvc_page_attend(&w, v, distance);
            if (v->last) end_item(d, &w, item);
        }
    }
    if (wide) wide->end();
    kvc_kept_end(&w);
    kvc_scratch_free(block);
    return status;
}

/* Whoever is free takes the next items; of [begin, end) only its size means anything. */
static void attend_items(int64_t begin, int64_t end, void *context)
{
    driver *d = context;
    if (attend_some(d, end - begin) != KVC_OK) atomic_store(&d->failed, true);
}

static kvc_status attend(kvc_call *call)
{
    const kvc_attend_args *a = call->a;
    const kvc_store *s = &a->store;
    driver d = {.job = {.call = call, .group = a->query_heads / s->heads}};
    kvc_job *job = &d.job;
    for (int64_t r = 0; r < s->batch * s->table_heads; r++)
        job->columns = kvc_max(job->columns, kvc_item_columns(call, &call->rows[r]));
    job->block_tokens = kvc_min(call->most_queries, kvc_max(1, BLOCK_ROWS / job->group));
    job->blocks = kvc_ceil_div(call->most_queries, job->block_tokens);
    int64_t blocks = 0, rows = job->block_tokens * job->group;
    for (int64_t b = 0; b < s->batch; b++) {
        kvc_row *row = &call->rows[b * s->table_heads];
        row->attend_item = blocks;
        blocks += s->heads * kvc_ceil_div(row->queries, job->block_tokens);
    }
    job->runs = kvc_max(1, kvc_min(RUNS / blocks, job->columns / RUN_COLUMNS));
    kvc_status status = a->mass ? kvc_mass_begin(job) : KVC_OK;
    if (status == KVC_OK && job->runs > 1) {
        status = kvc_scratch(blocks * job->runs * rows * (kvc_out_dim(call) + 2), sizeof(float), &d.partial);
        if (status == KVC_OK) status = kvc_scratch(blocks, sizeof *d.left, &d.left);
        for (int64_t i = 0; status == KVC_OK && i < blocks; i++) atomic_init(&d.left[i], (int)job->runs);
    }
    if (status == KVC_OK) {
        int64_t read =
            job->columns * s->page_size * (s->key_dim + s->value_dim) * blocks; /* a byte an element, about */
        atomic_init(&d.next, 0);
        job->items = blocks * job->runs;
        job->next = &d.next;
        kvc_run(&a->exec, job->items, read * job->block_tokens, attend_items, &d);
        if (atomic_load(&d.failed)) status = kvc_no_workspace("attend");
    }
    if (a->mass) kvc_mass_end(job);
    kvc_scratch_free(d.partial);
    kvc_scratch_free(d.left);
    return status;
}

kvc_status kvc_no_workspace(const char *op)
{
    return kvc_fail(KVC_E_MEMORY, "out of memory: %s found none for its workspace", op);
}

kvc_status kvc_call_run(kvc_call *call)
{
    kvc_status status = kvc_call_write(call);
    if (status == KVC_OK && call->most_queries > 0) status = attend(call);
    kvc_call_end(call);
    return status;
}

kvc_status kvc_attend(const kvc_attend_args *args)
{
    kvc_call call;
    KVC_TRY(kvc_call_begin(&call, args, NULL));
    return kvc_call_run(&call);
}
