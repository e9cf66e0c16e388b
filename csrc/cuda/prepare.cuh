/* prepare.cuh - converts a block's query rows to all the forms that its pages need (query.cuh).
 *
 * 16-bit q, with 16-byte aligned rows as wide as the kernel, is converted eight rows at a time by the whole block. Lane
 * 4g + t loads dims 32m + 8t .. + 7 of row g, which directly are B fragments of two MMAs. So tensor cores can rotate
 * it, by exact products of signs and q: a warp has 16 dims of each 32 and one sign of the highest level; the levels in
 * between are sums of registers. Results for rows 2t, 2t + 1 become words of row g by two transposes, and an MMA sums
 * them for `base`. Rows are scaled by the power of two of their largest element before rotation, which can grow it by
 * at most sqrt(D), within fp16's range. The fp16 form of fp16 q needs no scaling. */
#ifndef KVC_PREPARE_CUH
#define KVC_PREPARE_CUH

#include "finish.cuh"

#define KVC_HALVES (KVC_CUDA_DIM / 64)

KVC_INLINE uint32_t kvc_forms_of(uint32_t kinds)
{
    uint32_t forms = 0;
    for (int kind = 0; kind < KVC_KINDS; kind++)
        if (kinds >> kind & 1) forms |= 1u << kvc_form_of(kind) | (kvc_kind_bits(kind) < 8 ? 1u << KVC_FORM_MEAN : 0);
    return forms;
}

/* Row r of the call's queries of (b, h). */
typedef struct kvc_query_row {
    const uint8_t *at; /* NULL: no row */
    int32_t slot;      /* without kvc_queries.seen; -1: no row */
} kvc_query_row;

KVC_DEVICE kvc_query_row kvc_query_row_of(const kvc_call *call, const kvc_queries *of, int h, int r)
{
    kvc_query_row row = {NULL, -1};
    int group = (int)call->group, queries = (int)of->count;
    int token = queries == 1 ? r >= group : (int)((uint32_t)r / (uint32_t)group);
    if (token >= queries) return row;
    row.at = kvc_dense_row(&call->a.q, of->batch, h * group + r - token * group, token);
    row.slot = (int32_t)of->slot + token;
    return row;
}

/* 16 bytes of q, or 0; `flip`: sign bits to toggle. */
KVC_DEVICE kvc_quad kvc_query_words(const uint8_t *at, uint32_t flip)
{
    kvc_quad w = {{0, 0, 0, 0}};
    if (at) w = kvc_load_stream(at);
    KVC_UNROLL for (int i = 0; i < 4; i++) if (flip) w.w[i] ^= flip;
    return w;
}

/* The bits of the row's largest magnitude; NaN and Inf compare above all others. */
KVC_DEVICE uint32_t kvc_query_most(const bool bf16, const int dims, const kvc_quad *w)
{
    uint32_t most = 0;
    KVC_UNROLL for (int x = 0; x < dims / 8; x++) most = kvc_top_pair(bf16, most, w[x >> 2].w[x & 3] & 0x7fff7fff);
    KVC_UNROLL for (int i = 1; i < 4; i *= 2) most = kvc_top_pair(bf16, most, kvc_shuffle_xor(most, i));
    uint32_t low = most & 0xffff, high = most >> 16;
    return low > high ? low : high;
}

/* Signs of rows 16 .. of the transform as A fragment, for words 2 * half, 2 * half + 1 of the lanes: row r is dim 2 (r
 * % 2) + 4 (r / 2 % 4) + r / 8 of the 16, or of the next 16 if `upper`. */
KVC_DEVICE void kvc_signs(const bool bf16, int upper, int half, uint32_t a[4])
{
    int g = kvc_lane() >> 2, t = kvc_lane() & 3, odd = (g >> 2 & t) ^ (upper & t >> 1) ^ (g >> 1 & half);
    const uint32_t one = bf16 ? 0x3f803f80 : 0x3c003c00, both = 0x80008000;
    a[0] = one ^ (odd & 1 ? both : 0);
    a[2] = a[0] ^ (g & 1 ? both : 0);
    a[1] = a[0] ^ 0x80000000, a[3] = a[2] ^ 0x80000000;
}

KVC_DEVICE void kvc_mma_of(const bool bf16, float d[4], const uint32_t a[4], const uint32_t b[2])
{
    if (bf16)
        kvc_mma_bf16(d, a, b);
    else
        kvc_mma_f16(d, a, b);
}

/* The warp's part of the rotated rows, not normalized: x[m] are 16 dims from 16 * kvc_rotated_tile(dims, m) on. */
KVC_DEVICE uint32_t kvc_rotated_tile(const int dims, int m)
{
    return (((uint32_t)kvc_warp() >> 1) * (dims / 64) + m) * 2 + ((uint32_t)kvc_warp() & 1); /* interleaved */
}
KVC_DEVICE void kvc_rotate_eight(const bool bf16, const int dims, const kvc_quad *w, float x[KVC_HALVES][4])
{
    const int many = dims / 64;
    uint32_t a[2][4], b[2][4], minus = kvc_warp() >> 1 ? 0x80008000 : 0;
    KVC_UNROLL for (int half = 0; half < 2; half++)
    {
        kvc_signs(bf16, kvc_warp() & 1, half, a[half]);
        KVC_UNROLL for (int i = 0; i < 4; i++) b[half][i] = a[half][i] ^ minus;
    }
    KVC_UNROLL for (int m = 0; m < many; m++)
    {
        KVC_UNROLL for (int i = 0; i < 4; i++) x[m][i] = 0;
        KVC_UNROLL for (int half = 0; half < 2; half++)
        {
            kvc_mma_of(bf16, x[m], a[half], w[m].w + 2 * half);
            kvc_mma_of(bf16, x[m], b[half], w[m + many].w + 2 * half);
        }
    }
    KVC_UNROLL for (int h = 1; h < many; h *= 2) KVC_UNROLL for (int m = 0; m < many; m++) if (!(m & h))
        KVC_UNROLL for (int i = 0; i < 4; i++)
    {
        float p = x[m][i], q = x[m + h][i];
        x[m][i] = p + q;
        x[m + h][i] = p - q;
    }
}

/* Stores rotated rows, times factor[i] for row 2t + i, as a form of `bits`. */
KVC_DEVICE void kvc_put_rotated(const int bits, const int dims, float x[KVC_HALVES][4], const float factor[2],
                                kvc_query *q, int at)
{
    const uint32_t planes = 8 / bits, each = (uint32_t)dims / 16 / planes; /* tiles per plane */
    float sum[4] = {0, 0, 0, 0};
    KVC_UNROLL for (int m = 0; m < dims / 64; m++)
    {
        uint32_t tile = kvc_rotated_tile(dims, m), p = tile / each, s = planes * (tile % each) + p;
        float by[2], weight = kvc_f32_of_bits((127 - (uint32_t)bits * p) << 23); /* weight of a code in the plane */
        uint32_t b[2], one = (15 + (uint32_t)bits * p) * 0x04000400, a[4] = {one, one, one, one};
        KVC_UNROLL for (int i = 0; i < 2; i++) by[i] = factor[i] * weight;
        KVC_UNROLL for (int i = 0; i < 2; i++) b[i] =
            kvc_transpose(kvc_pack_f16(x[m][2 * i] * by[0], x[m][2 * i + 1] * by[1]));
        kvc_mma_f16(sum, a, b);
        uint32_t *to = (uint32_t *)((uint8_t *)q + at) + (s / 2 * 32 + kvc_lane()) * 4 + s % 2 * 2;
        *(uint64_t *)to = (uint64_t)b[1] << 32 | b[0];
    }
    if (kvc_lane() < 4)
        KVC_UNROLL for (int i = 0; i < 2; i++) q->part[bits == 2][kvc_warp()][2 * kvc_lane() + i] = sum[i];
}

/* The i-th of `many` quads in registers. */
KVC_DEVICE kvc_quad kvc_quad_at(const int many, const kvc_quad *of, int i)
{
    kvc_quad w = of[0];
    KVC_UNROLL for (int m = 1; m < many; m++) KVC_UNROLL for (int k = 0; k < 4; k++) w.w[k] =
        i == m ? of[m].w[k] : w.w[k];
    return w;
}

/* Stores the 16-bit forms of q's words `of`; this is the warp's share. */
KVC_DEVICE void kvc_put_halves(const kvc_call *call, const bool bf16, uint32_t forms, const int dims,
                               const kvc_quad *of, float inverse, kvc_query *q)
{
    int lane = kvc_lane(), t = lane & 3;
    KVC_UNROLL for (int k = 0; k < (dims + 127) / 128; k++)
    {
        int m = kvc_warp() + KVC_WARPS * k, place = (2 * m + (t >> 1)) * 32 + (lane & ~3) + 2 * (t & 1);
        if (dims < 128 && m >= dims / 32) break;
        kvc_quad w = kvc_quad_at(dims < 128 ? dims / 32 : KVC_WARPS, of + KVC_WARPS * k, kvc_warp());
        if (bf16) {
            if (forms >> KVC_FORM_BF16 & 1) kvc_store_quad((uint8_t *)q + call->form_at[KVC_FORM_BF16] + 8 * place, w);
            KVC_UNROLL for (int i = 0; i < 4; i++) w.w[i] =
                kvc_pack_f16(kvc_f32_of_bits(w.w[i] << 16) * inverse, kvc_f32_of_bits(w.w[i] & 0xffff0000) * inverse);
        }
        if (forms >> KVC_FORM_F16 & 1) kvc_store_quad((uint8_t *)q + call->form_at[KVC_FORM_F16] + 8 * place, w);
        if (forms >> KVC_FORM_MEAN & 1) KVC_UNROLL for (int i = 0; i < 2; i++)
            {
                kvc_quad two = {{w.w[2 * i], 0, w.w[2 * i + 1], 0}}; /* with a second limb of 0 */
                kvc_store_quad((uint8_t *)q + call->form_at[KVC_FORM_MEAN] + 16 * (place + i), two);
            }
    }
}

/* Converts eight rows from row r on. */
KVC_DEVICE void kvc_query_eight(const kvc_call *call, const kvc_queries *of, const bool bf16, uint32_t forms,
                                const int dims, int h, int r, kvc_query *q)
{
    int lane = kvc_lane(), n = lane >> 2, t = lane & 3;
    uint32_t flip = call->a.scale < 0 ? 0x80008000 : 0; /* steps are positive */
    float scale = fmaxf(fabsf(call->a.scale), 1e-30f), x[KVC_HALVES][4], factor[2];
    kvc_query_row row = kvc_query_row_of(call, of, h, r + n);
    const uint8_t *at = row.at ? row.at + 16 * t : NULL;
    int32_t seen = kvc_warp() == 0 && of->seen ? (int32_t)*of->seen : 0; /* loaded together with q */
    kvc_quad w[KVC_CUDA_DIM / 32];
    KVC_UNROLL for (int m = 0; m < dims / 32; m++) w[m] = kvc_query_words(at ? at + 64 * m : NULL, flip);
    uint32_t most = kvc_query_most(bf16, dims, w), bad = most >= (bf16 ? 0x7f80 : 0x7c00), rows = 0;
    if (kvc_warp_any(bad)) {
        if (bad) most = 0;
        KVC_UNROLL for (int m = 0; m < dims / 32; m++) KVC_UNROLL for (int i = 0; i < 4; i++) if (bad) w[m].w[i] = 0;
        KVC_UNROLL for (int k = 0; k < 8; k++) rows |= kvc_shuffle(bad, 4 * k) << k;
    }
    uint32_t e = bf16 ? most >> 7 : kvc_f32_bits(kvc_widen(most, 0)) >> 23;
    uint32_t unit = (e < 20 ? 20 : e > 252 ? 252 : e) << 23, inverse = 0x7f000000 - unit;
    kvc_put_halves(call, bf16, forms, dims, w, kvc_f32_of_bits(inverse), q);
    if (forms & (1u << KVC_FORM_INT4 | 1u << KVC_FORM_INT2)) {
        const float norm = dims == 64 ? .125f : dims == 128 ? .088388347648318447f : .0625f;
        KVC_UNROLL for (int i = 0; i < 2; i++) factor[i] =
            kvc_f32_of_bits(kvc_shuffle(inverse, 4 * (2 * t + i))) * (1024 * norm);
        kvc_rotate_eight(bf16, dims, w, x);
        if (forms >> KVC_FORM_INT4 & 1) kvc_put_rotated(4, dims, x, factor, q, call->form_at[KVC_FORM_INT4]);
        if (forms >> KVC_FORM_INT2 & 1) kvc_put_rotated(2, dims, x, factor, q, call->form_at[KVC_FORM_INT2]);
    }
    if (kvc_warp() || t) return;
    float of_unit = kvc_f32_of_bits(unit) * scale;
    q->slot[n] = row.slot < 0 ? -1 : row.slot + seen;
    q->step[KVC_FORM_BF16][n] = scale;
    q->step[KVC_FORM_F16][n] = q->step[KVC_FORM_MEAN][n] = bf16 ? of_unit : scale;
    q->step[KVC_FORM_INT4][n] = q->step[KVC_FORM_INT2][n] = of_unit * (1 / (1024 * KVC_GRAIN));
    if (n == 0) q->nonfinite = rows;
}

/* The initial values of sums of codes, from the warps' partial sums. */
KVC_DEVICE void kvc_put_base(kvc_query *q, int n)
{
    KVC_UNROLL for (int two = 0; two < 2; two++)
    {
        float total = 0;
        KVC_UNROLL for (int w = 0; w < KVC_WARPS; w++) total += q->part[two][w][n];
        KVC_UNROLL for (int i = 0; i < 2; i++) q->base[two][n / 2][n % 2 + 2 * i] =
            -total * KVC_GRAIN * (two ? 1.5f : 7.5f);
    }
}

/* Converts row by row, a half-warp each, for q of any type and width. */
KVC_DEVICE void kvc_prepare_rows(const kvc_call *call, const kvc_queries *of, uint32_t forms, const int dims, int h,
                                 int row0, int groups)
{
    int dim = (int)call->a.store.key_dim;
    if (dim < dims)
        for (int group = 0; group < groups; group++)
            for (int i = (int)sizeof(kvc_query) / 4 + kvc_thread(); i < call->form_at[KVC_FORMS] / 4;
                 i += kvc_threads())
                ((uint32_t *)kvc_group_query(call, group))[i] = 0;
    kvc_barrier();
    int each = kvc_threads() / 16; /* separate loops, so that nothing of the second is computed for the first */
    if (dim == dims)
        KVC_ONCE for (int n = kvc_half(); n < 8 * groups; n += each)
            kvc_query_fill(call, of, kvc_group_query(call, n / 8), forms, dims, dims, h, row0 + n, n % 8);
    else
        KVC_ONCE for (int n = kvc_half(); n < 8 * groups; n += each)
            kvc_query_fill(call, of, kvc_group_query(call, n / 8), forms, dims, dim, h, row0 + n, n % 8);
}

/* Converts q to all forms that pages of the call need. To be followed by a barrier. */
KVC_DEVICE void kvc_prepare(const kvc_call *call, const kvc_queries *of, const uint32_t kinds, const int dims, int h,
                            int row0, int groups)
{
    const uint32_t forms = call->forms & kvc_forms_of(kinds);
    if (kvc_thread() < groups) {
        kvc_query *q = kvc_group_query(call, kvc_thread());
        q->rest = 0;
        if (!call->eights) q->nonfinite = 0;
        KVC_UNROLL for (int form = 0; form < KVC_FORMS; form++) q->at[form] = call->form_at[form];
    }
    if (call->eights) {
        KVC_ONCE for (int group = 0; group < groups; group++) if (call->a.q.dtype == KVC_BF16)
            kvc_query_eight(call, of, true, forms, dims, h, row0 + 8 * group, kvc_group_query(call, group));
        else kvc_query_eight(call, of, false, forms, dims, h, row0 + 8 * group, kvc_group_query(call, group));
        if (forms & (1u << KVC_FORM_INT4 | 1u << KVC_FORM_INT2)) {
            kvc_barrier();
            if (kvc_thread() < 8 * groups) kvc_put_base(kvc_group_query(call, kvc_thread() / 8), kvc_thread() % 8);
        }
    } else {
        kvc_prepare_rows(call, of, forms, dims, h, row0, groups);
    }
}

#endif
