/* score.cu - statistics of stored rows for policies, as kvc_score_tokens: norms of K or V, cosines of K with the head's
 * mean. One block per head, a half-warp per row, page by page; the cosine reads the rows twice. Sums have a fixed
 * order. */
#include "rows.cuh"
#include "wide.h"

#define THREADS 256
#define HALVES (THREADS / 16)

typedef struct kvc_score_call {
    kvc_store s;
    int kind;
    int64_t width;
    float *out;
    uint32_t *flags;
} kvc_score_call;

typedef struct kvc_score_room {
    float sum[HALVES][KVC_ROW_DIM], mean[KVC_ROW_DIM], length;
} kvc_score_room;

KVC_DEVICE float kvc_score_dot(const float *x, const float *y, int parts)
{
    float sum = 0;
    EACH_PART(k, 0, parts) sum += x[k] * (y ? y[16 * k + kvc_half_lane()] : x[k]);
    return kvc_half_sum(sum);
}

/* One pass over the head's rows. mean: NULL, or the vector to compare with; sums: of the half-warp's rows, normalized
 * to length 1. */
KVC_DEVICE void kvc_score_pass(const kvc_score_call *call, int64_t b, int64_t h, const float *mean, float length,
                               float *sums)
{
    const kvc_store *s = &call->s;
    int64_t at = b * s->table_heads + (s->table_heads == 1 ? 0 : h);
    uint32_t *flags = kvc_thread() ? NULL : call->flags;
    int64_t stored = kvc_min(kvc_row_stored(s, at, flags), call->width);
    float *out = call->out + (b * s->heads + h) * call->width;
    KVC_ONCE for (int64_t c = 0; c < kvc_columns_used(s, stored); c++)
    {
        int64_t first = kvc_column_first(c, s->sinks, s->page_size);
        int n = (int)kvc_min(kvc_column_size(c, s->sinks, s->page_size), stored - first);
        kvc_page page = kvc_page_of(s, kvc_entry_at(s, at, c), h, kvc_column_layout(c, s->sinks, s->page_size), flags);
        if (n <= 0 || !page.data) continue;
        kvc_side side = kvc_page_side(&page, call->kind != KVC_VALUE_NORM, s->key_dim, s->value_dim);
        int parts = (int)(side.dim / 16);
        KVC_ONCE for (int t0 = 0; t0 < n; t0 += HALVES)
        {
            int t = t0 + kvc_half();
            int64_t i = first + t;
            float x[KVC_PARTS];
            side.dim = KVC_WIDE_AGAIN((int)side.dim);
            kvc_half_decode(&side, t < n ? t : 0, x);
            float norm = sqrtf(kvc_score_dot(x, NULL, parts));
            bool live = t < n && (!s->slots || s->slots[at * s->slot_capacity + i] >= 0);
            float inverse = live ? 1 / fmaxf(norm, 1e-12f) : 0, value = norm;
            if (mean) value = kvc_score_dot(x, mean, parts) * inverse / length;
            EACH_PART(k, 0, parts) sums[k] += x[k] * inverse;
            if (t < n && kvc_half_lane() == 0) out[i] = live ? value : 0;
        }
    }
}

KVC_KERNEL(kvc_score_kernel, kvc_score_call, THREADS, 2)
{
    kvc_score_room *room = (kvc_score_room *)kvc_shared;
    int64_t b = kvc_block_x() / a.s.heads, h = kvc_block_x() % a.s.heads;
    float *out = a.out + kvc_block_x() * a.width, sums[KVC_PARTS];
    for (int64_t i = kvc_thread(); i < a.width; i += kvc_threads()) out[i] = 0;
    EACH_PART(k, 0, KVC_PARTS) sums[k] = 0;
    kvc_barrier();
    kvc_score_pass(&a, b, h, NULL, 1, sums);
    if (a.kind != KVC_KEY_COSINE) return;
    EACH_PART(k, 0, KVC_PARTS) room->sum[kvc_half()][16 * k + kvc_half_lane()] = sums[k];
    kvc_barrier();
    for (int d = kvc_thread(); d < KVC_ROW_DIM; d += kvc_threads()) {
        float sum = 0;
        for (int i = 0; i < HALVES; i++) sum += room->sum[i][d];
        room->mean[d] = sum;
    }
    kvc_barrier();
    if (kvc_thread() == 0) {
        float square = 0;
        for (int d = 0; d < KVC_ROW_DIM; d++) square += room->mean[d] * room->mean[d];
        room->length = fmaxf(sqrtf(square), 1e-12f);
    }
    kvc_barrier();
    kvc_score_pass(&a, b, h, room->mean, room->length, sums);
}

extern "C" int kvc_cuda_score_tokens(const kvc_store *store, int kind, int64_t width, float *out, const kvc_cuda *on)
{
    if (kvc_widest(store) > KVC_ROW_DIM) return kvc_score_tokens_wide(store, kind, width, out, on);
    kvc_score_call call = {*store, kind, width, out, on->flags};
    if (kvc_store_aligned(store)) return KVC_CUDA_ALIGNMENT;
    return KVC_LAUNCH(kvc_score_kernel, &call, store->batch * store->heads, 1, 1, THREADS, sizeof(kvc_score_room),
                      on->stream);
}
