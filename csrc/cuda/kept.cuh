/* kept.cuh - accumulated attention (H2O) for calls with few query rows, as on the CPU: attention stores its weights,
 * and once lse is known, one factor per block and row turns them into the tokens' shares. Weights are fp16, relative to
 * the row's running maximum, which is stored with them. A maximum of -inf, the initial value, marks a block without
 * weights, which is not read.
 *
 * A column has `kept_blocks` blocks of 32 tokens; a block has `kept_pairs` pairs of query rows: weights [B * H,
 * columns, blocks, pairs, 32] of words with a row in each half; tops [B * H, columns, blocks, 2 * pairs]. Cost: a store
 * of 16 bytes per lane and block; 2 bytes written and read per token and query row. At 4 rows per KV head and 128 dims
 * this is 6% of int8's pages. */
#ifndef KVC_KEPT_CUH
#define KVC_KEPT_CUH

#include "values.cuh"

#define KVC_WARPS 4

typedef struct kvc_kept {
    uint32_t *weights; /* of a column */
    float *tops;
} kvc_kept;

/* Number of elements of both arrays, for all columns. */
KVC_INLINE int64_t kvc_kept_words(const kvc_call *call)
{
    const kvc_store *s = &call->a.store;
    return s->batch * s->heads * (s->columns + call->own_columns) * call->kept_blocks * call->kept_pairs * KVC_BLOCK;
}
KVC_INLINE int64_t kvc_kept_tops(const kvc_call *call) { return kvc_kept_words(call) / KVC_BLOCK * 2; }

KVC_DEVICE kvc_kept kvc_kept_at(const kvc_call *call, int64_t b, int64_t h, int64_t c)
{
    const kvc_store *s = &call->a.store;
    int64_t column = (b * s->heads + h) * (s->columns + call->own_columns) + c;
    int64_t at = column * call->kept_blocks * call->kept_pairs;
    kvc_kept kept = {call->weights + at * KVC_BLOCK, call->tops + 2 * at};
    return kept;
}

/* Marks columns [begin, end) of (b, h) as empty. All threads of the block; a barrier must follow. */
KVC_DEVICE void kvc_keep_none(const kvc_call *call, int64_t b, int64_t h, int64_t begin, int64_t end)
{
    float *tops = kvc_kept_at(call, b, h, begin).tops;
    int64_t n = 2 * (end - begin) * call->kept_blocks * call->kept_pairs;
    for (int64_t i = kvc_thread(); i < n; i += kvc_threads()) tops[i] = -INFINITY;
}

/* Stores a block's weights p of the warp's rows, as distributed over lanes in keys.cuh, relative to top. The warp's
 * group of rows is recomputed to save a register. */
KVC_DEVICE void kvc_keep(const kvc_call *call, const kvc_kept *kept, int block, const float top[2], const float p[8])
{
    int lane = kvc_lane(), group = kvc_warp() * (int)call->rows / (8 * KVC_WARPS), pair = 4 * group + (lane & 3);
    if (pair >= call->kept_pairs) return;
    int at = block * call->kept_pairs + pair;
    kvc_quad w;
    KVC_UNROLL for (int i = 0; i < 2; i++) if (lane < 4) kept->tops[2 * at + i] = top[i];
    KVC_UNROLL for (int e = 0; e < 4; e++) w.w[e] = kvc_pack_f16(p[2 * e], p[2 * e + 1]);
    kvc_store_quad(kept->weights + at * KVC_BLOCK + 16 * (lane >> 4) + 4 * (lane >> 2 & 3), w);
}

/* The attention that the lane's token of the block receives from all rows. lse: of row `lane`; NaN excludes a row.
 * Called by the whole warp. */
KVC_DEVICE float kvc_kept_sum(const kvc_call *call, const kvc_kept *kept, int block, float lse)
{
    int lane = kvc_lane(), at = block * call->kept_pairs;
    float sum = 0, factor = 0;
    if (lane < 2 * call->kept_pairs && isfinite(lse)) {
        float top = kept->tops[2 * at + lane];
        factor = top > -INFINITY ? kvc_exp2((top - lse) * KVC_LOG2E) : 0;
    }
    KVC_ONCE for (int pair = 0; pair < call->kept_pairs; pair++)
    {
        float first = kvc_shuffle_f(factor, 2 * pair), second = kvc_shuffle_f(factor, 2 * pair + 1);
        if (first == 0 && second == 0) continue;
        uint32_t w = kept->weights[(at + pair) * KVC_BLOCK + lane];
        sum += first * kvc_f16_to_f32((uint16_t)w) + second * kvc_f16_to_f32((uint16_t)(w >> 16));
    }
    return sum;
}

#endif
