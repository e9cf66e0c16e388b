/* finish.cuh - from a block's sums to results: reads the rows' sums from shared memory and reverts V's rotation. If the
 * columns are split into runs, each run writes its partial results to global memory, and the last block to finish
 * merges them. */
#ifndef KVC_FINISH_CUH
#define KVC_FINISH_CUH

#include "pages.cuh"

#define KVC_EIGHT 8
/* Lookups of a warp for its next pages of few bits (packed.cuh), double-buffered: addresses of eight pages and of the
 * next eight; products of the rows with their mean keys. */
typedef struct kvc_eight_room {
    alignas(16) float dot[KVC_EIGHT][8];
    uint32_t at[2 * KVC_EIGHT];
    int64_t early[KVC_EIGHT]; /* entries of the warp's first columns, loaded before q is prepared; -1: not loaded */
    int32_t first;            /* first of these columns */
} kvc_eight_room;

typedef struct kvc_attend_room {
    kvc_row row;
    kvc_place place;                        /* kept for the end of the kernel, since registers hold sums until then */
    int32_t from[KVC_WARPS], to[KVC_WARPS]; /* columns of each warp */
    kvc_page_room page[KVC_WARPS];
    kvc_eight_room eight[KVC_WARPS];
    uint32_t words[4];
    alignas(16) float m[8][KVC_WARPS], l[8][KVC_WARPS]; /* of each warp; l is relative to the largest m */
    alignas(16) int rotated[KVC_WARPS];                 /* the space of each warp's sums */
} kvc_attend_room;

/* Shared memory of a block: the room, a query group each, a stage or a pipe for each warp. In the end, sums replace all
 * but the room: eight rows of each warp, four elements apart so that the stores of a warp access all banks. */
KVC_DEVICE kvc_query *kvc_group_query(const kvc_call *call, int group)
{
    return (kvc_query *)(kvc_shared + (sizeof(kvc_attend_room) + 127) / 128 * 128 + group * call->form_at[KVC_FORMS]);
}

/* Dim of a lane's k-th element of a row: every `step`-th group of `wide` dims. */
KVC_DEVICE int kvc_part_dim(const int wide, int lane, const int step, int k)
{
    return wide * (lane + step * (k / wide)) + k % wide;
}

/* Writes a row's result like the CPU's driver. o: the lane's `parts` of `dim` elements. */
KVC_DEVICE void kvc_put_out(const kvc_call *call, const kvc_row *row, int b, int h, int r, float *o, float m, float l,
                            int dim, int lane, const int wide, const int step, const int parts)
{
    const kvc_attend_args *a = &call->a;
    int G = (int)call->group, t = row->queries == 1 ? 0 : (int)((uint32_t)r / (uint32_t)G), hq = h * G + r - t * G;
    bool sees = m > -INFINITY, narrow = a->out.dtype == KVC_F16;
    if (!(l > 0) || (call->lists.nonfinite && call->lists.nonfinite[b])) l = NAN;
    int64_t lse = kvc_times(call->lists.segments ? 1 : a->query_heads * a->Tq, row->batch) + kvc_times(a->Tq, hq) + t;
    if (lane == 0 && a->lse) a->lse[lse] = sees ? m + logf(l) : -INFINITY;
    if (a->s_aux && sees) l += expf(a->s_aux[hq] - m);
    float inverse = 1 / l, most = call->own_raw == KVC_RAW_F16 ? 65504 : INFINITY;
    int64_t at =
        kvc_times(a->out.stride[0], row->batch) + kvc_times(a->out.stride[1], hq) + kvc_times(a->out.stride[2], t);
    uint16_t *to = (uint16_t *)a->out.data + at;
    KVC_UNROLL for (int k = 0; k < parts; k++) o[k] = sees ? o[k] * inverse : 0;
    if (a->out.dtype == KVC_F32) {
        KVC_UNROLL for (int k = 0; k < parts; k++) if (kvc_part_dim(wide, lane, step, k) < dim)(
            (float *)a->out.data)[at + kvc_part_dim(wide, lane, step, k)] = o[k];
        return;
    }
    if (narrow) KVC_UNROLL for (int k = 0; k < parts; k++) o[k] = kvc_saturate(o[k], most);
    KVC_UNROLL for (int k = 0; k < parts; k += 2)
    {
        int d = kvc_part_dim(wide, lane, step, k), next = kvc_part_dim(wide, lane, step, k + 1);
        float second = k + 1 < parts ? o[k + 1] : 0;
        uint32_t both = narrow ? kvc_pack_f16(o[k], second) : kvc_pack_bf16(o[k], second);
        if (wide > 1 && (uintptr_t)to % 4 == 0) {
            if (d < dim) *(uint32_t *)(to + d) = both;
            continue;
        }
        if (d < dim) to[d] = (uint16_t)both;
        if (k + 1 < parts && next < dim) to[next] = (uint16_t)(both >> 16);
    }
}

KVC_DEVICE float kvc_weight_of(float m, float top)
{
    return m == top ? 1 : m > -INFINITY ? kvc_exp2((m - top) * KVC_LOG2E) : 0;
}

KVC_INLINE int kvc_sums_row(int dims) { return dims + 4; }
KVC_DEVICE float *kvc_warp_sums(const kvc_call *call, int dims, int warp)
{
    return (float *)kvc_group_query(call, 0) + warp * 8 * kvc_sums_row(dims);
}

/* Adds the half-warp's parts of a row of sums to o. */
KVC_DEVICE void kvc_add_part(const bool fours, int lane, const int parts, const float *sum, float *o)
{
    KVC_UNROLL for (int k = 0; k < parts; k += 4)
    {
        kvc_quad four = {{0, 0, 0, 0}};
        if (fours) four = kvc_load_quad(sum + kvc_part_dim(4, lane, 16, k));
        KVC_UNROLL for (int i = 0; i < 4; i++) o[k + i] +=
            fours ? kvc_f32_of_bits(four.w[i]) : sum[kvc_part_dim(1, lane, 16, k + i)];
    }
}

/* Row n of the block, by a half-warp: adds its sums, rotated back if needed, and writes the result, or writes this
 * run's partial result `to`. fours: rows are as wide as the kernel; the transform works for any assignment of dims to
 * lanes. */
KVC_DEVICE void kvc_finish_row(const kvc_call *call, const int dims, const bool fours, int b, int h, int row0, int n,
                               int share, float *to)
{
    const kvc_attend_room *room = (const kvc_attend_room *)kvc_shared;
    int lane = kvc_half_lane(), first = n / 8 * share, rows = (int)call->rows;
    int Dv = fours ? dims : (int)call->a.store.value_dim;
    float m = -INFINITY, l = 0, o[KVC_PARTS] = {0};
    uint32_t warps[2] = {0, 0}; /* by the space of their sums */
    kvc_quad tops = kvc_load_quad(room->m[n % 8]), parts = kvc_load_quad(room->l[n % 8]);
    kvc_quad rotated = kvc_load_quad(room->rotated);
    KVC_UNROLL for (int w = 0; w < KVC_WARPS; w++)
    {
        if (w < first || w >= first + share) continue;
        m = fmaxf(m, kvc_f32_of_bits(tops.w[w])), l += kvc_f32_of_bits(parts.w[w]);
        warps[0] |= (rotated.w[w] ^ 1) << w, warps[1] |= rotated.w[w] << w;
    }
    KVC_ONCE for (int space = 1; space >= 0; space--)
    {
        const float *sum = kvc_warp_sums(call, dims, 0) + n % 8 * kvc_sums_row(dims);
        KVC_ONCE for (uint32_t left = space ? warps[1] : warps[0]; left;
                      left >>= 1, sum += 8 * kvc_sums_row(dims)) if (left & 1)
            kvc_add_part(fours, lane, dims / 16, sum, o);
        if (space && warps[1]) kvc_rotate_parts(dims / 16, o, Dv);
    }
    if (row0 + n >= (int)(room->row.queries * call->group)) return;
    if (!to) {
        kvc_put_out(call, &room->row, b, h, row0 + n, o, m, l, Dv, lane, fours ? 4 : 1, 16, dims / 16);
        return;
    }
    KVC_UNROLL for (int k = 0; k < dims / 16; k += 4)
    {
        kvc_quad four;
        KVC_UNROLL for (int i = 0; i < 4; i++) four.w[i] = kvc_f32_bits(o[k + i]);
        if (fours) kvc_store_quad(to + n * Dv + kvc_part_dim(4, lane, 16, k), four);
        KVC_UNROLL for (int i = 0; i < 4; i++) if (!fours && kvc_part_dim(1, lane, 16, k + i) < Dv)
            to[n * Dv + kvc_part_dim(1, lane, 16, k + i)] = o[k + i];
    }
    if (lane == 0) {
        to[rows * Dv + n] = m;
        to[rows * (Dv + 1) + n] = l;
    }
}

/* For the whole block, after it has written its part: whether it is the last of `blocks`, which then reads all parts.
 * The counter is 0 before and after. */
KVC_DEVICE bool kvc_comes_last(uint32_t *done, uint32_t blocks, uint32_t *shared)
{
    kvc_fence();
    kvc_barrier();
    if (kvc_thread() == 0) *shared = kvc_atomic_turn(done, blocks - 1) + 1 == blocks;
    kvc_barrier();
    kvc_fence();
    return *shared;
}

/* Dims that a lane takes together when runs are merged. */
KVC_INLINE int kvc_combined_wide(int dims) { return dims < 128 ? 2 : 4; }

/* Adds `batch` runs of a row, `each` elements apart, weighted by the values in lanes 0 and up; only the first `many` if
 * `some`. All loads are issued together, because a block that runs alone at the end would wait for each. */
KVC_DEVICE void kvc_add_runs(const int dims, const bool some, const int batch, int Dv, int many, int each, float w,
                             const float *x, float *o)
{
    const int wide = kvc_combined_wide(dims), words = wide / 2;
    uint64_t two[16][KVC_CUDA_DIM / 64];
    KVC_UNROLL for (int i = 0; i < batch; i++) KVC_UNROLL for (int k = 0; k < dims / 64; k += words)
    {
        const float *at = x + i * each + 64 * k;
        if (!some && words == 2) {
            kvc_quad four = kvc_load_quad(at);
            KVC_UNROLL for (int h = 0; h < 2; h++) two[i][k + h] = (uint64_t)four.w[2 * h + 1] << 32 | four.w[2 * h];
            continue;
        }
        KVC_UNROLL for (int h = 0; h < words; h++)
        {
            two[i][k + h] = 0;
            if (i < many && kvc_part_dim(wide, kvc_lane(), 32, 2 * (k + h)) < Dv)
                two[i][k + h] = *(const uint64_t *)(at + 2 * h);
        }
    }
    KVC_UNROLL for (int i = 0; i < batch; i++)
    {
        float weight = kvc_shuffle_f(w, i);
        KVC_UNROLL for (int k = 0; k < dims / 64; k++)
        {
            o[2 * k] = fmaf(weight, kvc_f32_of_bits((uint32_t)two[i][k]), o[2 * k]);
            o[2 * k + 1] = fmaf(weight, kvc_f32_of_bits((uint32_t)(two[i][k] >> 32)), o[2 * k + 1]);
        }
    }
}

/* Adds the next `batch` runs, in order, if there are that many. w: weights of runs lane and lane + 32. For eight rows
 * as wide as the kernel, distances are compile-time constants. */
KVC_DEVICE int kvc_add_batches(const int dims, const int batch, int run, int runs, const float w[2], const float *x,
                               float *o)
{
    const int each = 8 * (dims + 2);
    KVC_ONCE for (; run + batch <= runs; run += batch)
    {
        float by = kvc_shuffle_f(run < 32 ? w[0] : w[1], (kvc_lane() + run) & 31);
        kvc_add_runs(dims, false, batch, dims, batch, each, by, x + run * each, o);
    }
    return run;
}

/* Merges all runs (at most 64) of a block of rows; one warp per row, two runs' weights per lane. The order of runs is
 * fixed, so results do not depend on timing. */
KVC_DEVICE void kvc_combine(const kvc_call *call, const kvc_row *row, const int dims, int b, int h, int row0,
                            const float *from)
{
    int rows = (int)call->rows, Dv = (int)call->a.store.value_dim, each = rows * (Dv + 2), lane = kvc_lane();
    int runs = (int)call->runs, most = (int)(row->queries * call->group) - row0;
    if (most > rows) most = rows;
    KVC_ONCE for (int n = kvc_warp(); n < most; n += KVC_WARPS)
    {
        const float *of = from + rows * Dv + n + lane * each, *x = from + n * Dv + kvc_combined_wide(dims) * lane;
        float w[2], sums[2], l = 0, top = -INFINITY, o[KVC_CUDA_DIM / 32];
        KVC_UNROLL for (int i = 0; i < 2; i++)
        {
            w[i] = -INFINITY, sums[i] = 0;
            if (lane + 32 * i < runs) w[i] = of[32 * i * each], sums[i] = of[32 * i * each + rows];
            top = fmaxf(top, w[i]);
        }
        KVC_UNROLL for (int i = 16; i > 0; i /= 2) top = fmaxf(top, kvc_shuffle_xor_f(top, i));
        KVC_UNROLL for (int i = 0; i < 2; i++)
        {
            w[i] = kvc_weight_of(w[i], top);
            l += w[i] * sums[i];
        }
        KVC_UNROLL for (int i = 16; i > 0; i /= 2) l += kvc_shuffle_xor_f(l, i);
        KVC_UNROLL for (int k = 0; k < dims / 32; k++) o[k] = 0;
        int run = 0;
        if (rows == 8 && Dv == dims) {
            run = kvc_add_batches(dims, dims > 128 ? 8 : 16, run, runs, w, x, o);
            run = kvc_add_batches(dims, 4, run, runs, w, x, o);
        }
        KVC_ONCE for (; run < runs; run += 4)
        {
            float by = kvc_shuffle_f(run < 32 ? w[0] : w[1], (lane + run) & 31);
            kvc_add_runs(dims, true, 4, Dv, runs - run, each, by, x + run * each, o);
        }
        kvc_put_out(call, row, b, h, row0 + n, o, top, l, Dv, lane, kvc_combined_wide(dims), 32, dims / 32);
    }
}

#endif
