/* attend_wide.cu - attention for heads of more than KVC_CUDA_DIM dims, and for latents (MLA), where a token's key is
 * both sides of its page and its value is K's. In fp32, without tensor cores. A block processes (sequence and KV head,
 * eight query rows, run of columns). Eight tokens at a time are decoded to shared memory, both sides at once, a
 * half-warp per row, so each page is read once for scores and sums. Then each half-warp computes four scores of a row,
 * and each thread sums up to three dims of all rows.
 *
 * Cost per token and query row: for its score Dk multiply-adds (latents: Dk + Dv) and as many loads from shared memory;
 * for its sum one multiply-add per output dim, with a load per eight. */
#define KVC_ROW_DIM KVC_MAX_DIM
#include "accumulated.cuh"
#include "wide.h"

#define THREADS 256
#define ROWS KVC_WIDE_ROWS
#define TOKENS (THREADS / 32)                        /* decoded at once: a half-warp per side of each */
#define SUMS ((KVC_MAX_DIM + THREADS - 1) / THREADS) /* output dims per thread */

typedef struct kvc_wide_room {
    kvc_row row;
    uint32_t words[4];
    int32_t slot[ROWS]; /* slot of the row's token; -1: no row */
    uint32_t nonfinite[ROWS];
    float s[ROWS][TOKENS], m[ROWS], l[ROWS], keep[ROWS];
} kvc_wide_room;

/* Shared memory: the room, then rows of floats: queries, keys, values. */
typedef struct kvc_wide {
    kvc_wide_room *room;
    float *q, *keys, *values;
    int key_dim, value_dim, query_dim;
} kvc_wide;

#define ROOM_BYTES ((sizeof(kvc_wide_room) + 127) / 128 * 128)
static int64_t wide_bytes(const kvc_attend_args *a)
{
    int64_t both = a->store.key_dim + a->store.value_dim, query = a->latent ? both : a->store.key_dim;
    return (int64_t)ROOM_BYTES + 4 * (ROWS * query + TOKENS * both);
}

KVC_DEVICE kvc_wide kvc_wide_at(const kvc_call *call)
{
    int Dk = (int)call->a.store.key_dim, Dv = (int)call->a.store.value_dim, query = call->a.latent ? Dk + Dv : Dk;
    float *at = (float *)(kvc_shared + ROOM_BYTES);
    kvc_wide w = {(kvc_wide_room *)kvc_shared, at, at + ROWS * query, at + ROWS * query + TOKENS * Dk, Dk, Dv, query};
    return w;
}

/* Loads eight query rows from row0 on; ends with a barrier. */
KVC_DEVICE void kvc_wide_queries(const kvc_call *call, const kvc_wide *w, int h, int64_t row0)
{
    const kvc_attend_args *a = &call->a;
    int n = kvc_thread() / 32, lane = kvc_lane(), group = (int)call->group;
    const kvc_row *of = &w->room->row;
    int64_t r = row0 + n, token = r / group;
    bool there = token < of->queries;
    const uint8_t *row = kvc_dense_row(&a->q, of->batch, h * group + (there ? r % group : 0), there ? token : 0);
    bool nonfinite = false;
    for (int d = lane; d < w->query_dim; d += 32) {
        float x = there ? kvc_element(row, a->q.dtype, d) : 0;
        if ((kvc_f32_bits(x) & 0x7f800000) == 0x7f800000) nonfinite = true;
        w->q[n * w->query_dim + d] = x;
    }
    nonfinite = kvc_warp_any(nonfinite);
    for (int d = lane; nonfinite && d < w->query_dim; d += 32) w->q[n * w->query_dim + d] = 0;
    if (lane == 0) {
        w->room->slot[n] = there ? (int32_t)(of->query_slot + token) : -1;
        w->room->nonfinite[n] = nonfinite;
        w->room->m[n] = -INFINITY;
        w->room->l[n] = 0;
    }
    kvc_barrier();
}

KVC_DEVICE float kvc_wide_dot(const float *x, const float *y, int dim)
{
    float sum = 0;
    for (int d = kvc_half_lane(); d < dim; d += 16) sum = fmaf(x[d], y[d], sum);
    return sum;
}

/* Decodes tokens [t0, t0 + TOKENS) of a page and computes room->s; -inf for tokens that a row does not see. Ends with a
 * barrier. */
KVC_DEVICE void kvc_wide_scores(const kvc_call *call, const kvc_wide *w, const kvc_view *v, int t0)
{
    kvc_wide_room *room = w->room;
    const kvc_attend_args *a = &call->a;
    int half = kvc_half(), lane = kvc_half_lane(), n = half % TOKENS, key = half < TOKENS, t = t0 + n;
    kvc_side side = kvc_page_side(&v->page, key, w->key_dim, w->value_dim);
    float x[KVC_PARTS], *to = (key ? w->keys : w->values) + n * (int)side.dim;
    kvc_half_decode(&side, t < v->n ? t : 0, x);
    EACH_PART(k, 0, (int)side.dim / 16) to[16 * k + lane] = x[k];
    kvc_barrier();
    const float *q = w->q + n * w->query_dim; /* row n, tokens of this half-warp's part */
    for (int i = half / TOKENS * (TOKENS / 2), end = i + TOKENS / 2; i < end; i++) {
        float s = kvc_wide_dot(q, w->keys + i * w->key_dim, w->key_dim);
        if (a->latent) s += kvc_wide_dot(q + w->key_dim, w->values + i * w->value_dim, w->value_dim);
        s = kvc_half_sum(s) * a->scale;
        if (a->softcap > 0) s = a->softcap * tanhf(s / a->softcap);
        if (lane) continue;
        int64_t slot = t0 + i < v->n ? kvc_slot_of(&room->row, v->first + t0 + i) : INT64_MAX, at = room->slot[n];
        bool sees = slot <= at && slot >= kvc_oldest_slot(call, &room->row, at);
        room->s[n][i] = sees ? s : -INFINITY;
    }
    kvc_barrier();
}

/* Replaces scores by weights, and computes the factors for earlier sums. Ends with a barrier. */
KVC_DEVICE void kvc_wide_soften(kvc_wide_room *room)
{
    int r = kvc_thread();
    if (r < ROWS) {
        float m = room->m[r], total = 0;
        for (int t = 0; t < TOKENS; t++) m = fmaxf(m, room->s[r][t]);
        room->keep[r] = kvc_weight_of(room->m[r], m);
        for (int t = 0; t < TOKENS; t++) {
            float p = room->s[r][t] > -INFINITY ? expf(room->s[r][t] - m) : 0;
            room->s[r][t] = p;
            total += p;
        }
        room->m[r] = m;
        room->l[r] = room->l[r] * room->keep[r] + total;
    }
    kvc_barrier();
}

/* Adds the tokens' values to the thread's dims. Ends with a barrier. */
KVC_DEVICE void kvc_wide_sums(const kvc_wide *w, const float *values, int dim, float o[ROWS][SUMS])
{
    KVC_UNROLL for (int r = 0; r < ROWS; r++) KVC_UNROLL for (int k = 0; k < SUMS; k++) o[r][k] *= w->room->keep[r];
    KVC_UNROLL for (int k = 0; k < SUMS; k++)
    {
        int d = kvc_thread() + THREADS * k;
        if (d >= dim) continue;
        for (int t = 0; t < TOKENS; t++) {
            float x = values[t * dim + d];
            KVC_UNROLL for (int r = 0; r < ROWS; r++) o[r][k] = fmaf(w->room->s[r][t], x, o[r][k]);
        }
    }
    kvc_barrier();
}

/* Merges the partial results of all runs of the block's rows, in order, and writes the results. */
KVC_DEVICE void kvc_wide_combine(const kvc_call *call, const kvc_row *row, int dim, int b, int h, int64_t row0,
                                 const float *from)
{
    int each = ROWS * (dim + 2);
    KVC_ONCE for (int n = 0; n < ROWS && row0 + n < row->queries * call->group; n++)
    {
        float m = -INFINITY, l = 0, o[SUMS] = {0};
        for (int run = 0; run < (int)call->runs; run++) m = fmaxf(m, from[run * each + ROWS * dim + n]);
        for (int run = 0; run < (int)call->runs; run++) {
            const float *x = from + run * each;
            float weight = kvc_weight_of(x[ROWS * dim + n], m);
            l += weight * x[ROWS * (dim + 1) + n];
            KVC_UNROLL for (int k = 0; k < SUMS; k++)
            {
                int d = kvc_thread() + THREADS * k;
                if (d < dim) o[k] += weight * x[n * dim + d];
            }
        }
        kvc_put_out(call, row, b, h, (int)row0 + n, o, m, l, dim, kvc_thread(), 1, THREADS, SUMS);
    }
}

/* x: as in device.cuh. */
KVC_KERNEL(kvc_attend_wide, kvc_call, THREADS, 1)
{
    kvc_wide w = kvc_wide_at(&a);
    const kvc_place place = kvc_place_of(&a);
    const kvc_row *row = &w.room->row;
    int64_t run = place.run, row0 = place.row0;
    int b = place.b, h = place.h, dim = (int)kvc_sum_dim(&a.a);
    if (b < 0) return;
    kvc_row_shared(&a, b, h, &w.room->row);
    kvc_wide_queries(&a, &w, h, row0);
    int64_t columns = kvc_row_columns(&a, row), end = columns * (run + 1) / a.runs;
    float o[ROWS][SUMS] = {{0}};
    KVC_ONCE for (int64_t c = columns * run / a.runs; c < end; c++)
    {
        kvc_view v = kvc_view_at(&a, &w.room->row, h, c);
        KVC_ONCE for (int t0 = 0; t0 < v.n; t0 += TOKENS)
        {
            kvc_wide_scores(&a, &w, &v, t0);
            kvc_wide_soften(w.room);
            kvc_wide_sums(&w, a.a.latent ? w.keys : w.values, dim, o);
        }
    }
    int64_t of = place.line;
    float *from = a.partial + of * a.runs * ROWS * (dim + 2), *to = from + run * ROWS * (dim + 2);
    KVC_UNROLL for (int n = 0; n < ROWS; n++)
    {
        float m = w.room->m[n], l = w.room->nonfinite[n] ? NAN : w.room->l[n];
        if (row0 + n >= row->queries * a.group) continue;
        if (a.runs == 1) {
            kvc_put_out(&a, row, b, h, (int)row0 + n, o[n], m, l, dim, kvc_thread(), 1, THREADS, SUMS);
            continue;
        }
        KVC_UNROLL for (int k = 0; k < SUMS; k++)
        {
            int d = kvc_thread() + THREADS * k;
            if (d < dim) to[n * dim + d] = o[n][k];
        }
        if (kvc_thread() == 0) to[ROWS * dim + n] = m, to[ROWS * (dim + 1) + n] = l;
    }
    if (a.runs > 1 && kvc_comes_last(a.done + of, (uint32_t)a.runs, w.room->words))
        kvc_wide_combine(&a, row, dim, b, h, row0, from);
}

/* Accumulated attention (H2O) by a second pass, as in accumulated.cuh: a block has its own columns and all rows, eight
 * at a time. */
KVC_KERNEL(kvc_accumulate_wide, kvc_call, THREADS, 1)
{
    const kvc_store *st = &a.a.store;
    kvc_wide w = kvc_wide_at(&a);
    int64_t parts = kvc_accumulated_parts(&a), bh = kvc_block_x() / parts, part = kvc_block_x() % parts;
    int b = (int)(bh / st->heads), h = (int)(bh % st->heads), n = kvc_thread();
    float *accumulated = a.a.accumulated + bh * a.a.accumulated_width;
    kvc_row_shared(&a, b, h, &w.room->row);
    int64_t columns = kvc_row_columns(&a, &w.room->row);
    KVC_ONCE for (int64_t row0 = 0; row0 < a.a.Tq * a.group; row0 += ROWS)
    {
        kvc_wide_queries(&a, &w, h, row0);
        if (n < ROWS) w.room->l[n] = kvc_row_lse(&a, b, h, row0 + n);
        KVC_ONCE for (int64_t c = part; c < columns; c += parts)
        {
            kvc_view v = kvc_view_at(&a, &w.room->row, h, c);
            KVC_ONCE for (int t0 = 0; t0 < v.n; t0 += TOKENS)
            {
                kvc_wide_scores(&a, &w, &v, t0);
                int64_t i = v.first + t0 + n;
                float sum = 0;
                for (int r = 0; n < TOKENS && r < ROWS; r++)
                    if (isfinite(w.room->l[r])) sum += expf(w.room->s[r][n] - w.room->l[r]);
                if (n < TOKENS && t0 + n < v.n && i < a.a.accumulated_width) accumulated[i] += sum;
                kvc_barrier();
            }
        }
        kvc_barrier();
    }
}

/* attends: attention; otherwise accumulated attention. */
extern "C" int kvc_attend_wide_launch(const kvc_call *call, bool attends, void *stream)
{
    int64_t heads = call->a.store.batch * call->a.store.heads, shared = wide_bytes(&call->a);
    if (attends) return KVC_LAUNCH(kvc_attend_wide, call, call->lines * call->runs, 1, 1, THREADS, shared, stream);
    return KVC_LAUNCH(kvc_accumulate_wide, call, heads * kvc_accumulated_parts(call), 1, 1, THREADS, shared, stream);
}
