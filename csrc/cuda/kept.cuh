/* kept.cuh - H2O's mass of few rows, as on the CPU: attention leaves its weights, and when lse is known one factor a block and
 * row makes them what the token was paid. Weights are fp16, relative to the row's maximum of that time, which is left beside
 * them; -inf says that a block has none, and then nothing of it is read: so all begin.
 *
 * A column has `kept_blocks` blocks of 32 tokens, a block `kept_pairs` pairs of query rows:
 *     weights [B * H, columns, blocks, pairs, 32] of words, a row in each half; tops [B * H, columns, blocks, 2 * pairs].
 * Cost: 16 bytes stored a lane and block, 2 bytes a token and query row written and read: at 4 rows a KV head and 128 dims
 * 6% of int8's pages. */
#ifndef KVC_KEPT_CUH
#define KVC_KEPT_CUH

#include "values.cuh"

#define KVC_WARPS 4

typedef struct kvc_kept {
    uint32_t *weights; /* of a column */
    float *tops;
} kvc_kept;

/* Elements of both for all columns. */
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

/* Columns [begin, end) of (b, h) have none: all threads of the block, before a barrier. */
KVC_DEVICE void kvc_keep_none(const kvc_call *call, int64_t b, int64_t h, int64_t begin, int64_t end)
{
    float *tops = kvc_kept_at(call, b, h, begin).tops;
    int64_t n = 2 * (end - begin) * call->kept_blocks * call->kept_pairs;
    for (int64_t i = kvc_thread(); i < n; i += kvc_threads()) tops[i] = -INFINITY;
}

/* A block's weights p of the warp's rows, as the lanes have them (keys.cuh), relative to top. The warp's group of rows is found
 * again: no register for it. */
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

/* What the block's token of this lane was paid by all rows; lse: of row `lane`, NaN: does not count. The whole warp. */
KVC_DEVICE float kvc_kept_mass(const kvc_call *call, const kvc_kept *kept, int block, float lse)
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
