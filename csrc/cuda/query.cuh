/* query.cuh - query rows as B fragments in shared memory, prepared once per block for all its pages. Eight rows of one
 * KV head are the 8 columns of an MMA; row = token * G + head of the group.
 *
 * q is scaled by a power of two (fp16) or unscaled (bf16), and split into two parts. The second part, the remainder of
 * the first, is used for 16-bit and staged pages, and skipped if it is 0. Rotated formats use only the first part of
 * the rotated q, in the order in which their words hold dims, divided by the weight of each dim's plane, so that codes
 * of all planes have the same unit without being shifted. `base` subtracts the middle of the codes from a sum. */
#ifndef KVC_QUERY_CUH
#define KVC_QUERY_CUH

#include "rows.cuh"

/* How a side's words are converted to MMA operands. */
enum kvc_kind {
    KVC_KIND_BF16,
    KVC_KIND_F16,
    KVC_KIND_E4M3,
    KVC_KIND_E5M2,
    KVC_KIND_INT8,
    KVC_KIND_INT4,
    KVC_KIND_INT2,
    KVC_KIND_STAGED,
    KVC_KINDS
};

#define KVC_RAW_KINDS (1u << KVC_KIND_BF16 | 1u << KVC_KIND_F16)

KVC_INLINE int kvc_kind_of(int format)
{
    switch (format) {
    case KVC_RAW_BF16: return KVC_KIND_BF16;
    case KVC_RAW_F16: return KVC_KIND_F16;
    case KVC_FP8_E4M3: return KVC_KIND_E4M3;
    case KVC_FP8_E5M2: return KVC_KIND_E5M2;
    case KVC_INT8: return KVC_KIND_INT8;
    case KVC_INT4: return KVC_KIND_INT4;
    case KVC_INT2: return KVC_KIND_INT2;
    default: return KVC_KIND_STAGED;
    }
}

/* The kind used for a format in a call with shared memory for these kinds: bf16 is staged if all forms of q together do
 * not fit. */
KVC_INLINE int kvc_kind_in(uint32_t kinds, int format)
{
    int kind = kvc_kind_of(format);
    return kind == KVC_KIND_BF16 && !(kinds >> kind & 1) ? KVC_KIND_STAGED : kind;
}

/* Forms of q, and the kinds that use them. MEAN, as A fragments, is for centroids, which occur with
 * kinds below 8 bits. */
enum kvc_form { KVC_FORM_F16, KVC_FORM_BF16, KVC_FORM_MEAN, KVC_FORM_INT4, KVC_FORM_INT2, KVC_FORMS };
KVC_INLINE int kvc_form_of(int kind)
{
    return kind == KVC_KIND_BF16   ? KVC_FORM_BF16
           : kind == KVC_KIND_INT4 ? KVC_FORM_INT4
           : kind == KVC_KIND_INT2 ? KVC_FORM_INT2
                                   : KVC_FORM_F16;
}
KVC_INLINE int kvc_form_bytes(int form, int dims) { return (form < KVC_FORM_INT4 ? 2 : 1) * 16 * dims; }

/* Eight rows; D: head dim of the kernel. Followed by the forms that pages need. */
typedef struct kvc_query {
    alignas(16) float step[KVC_FORMS][8]; /* value of a unit of the fragments, times the softmax scale */
    float base[2][4][4]; /* for codes: initial values of sums, with the middle subtracted; rows 2t, 2t + 1 twice */
    alignas(16) int32_t slot[8]; /* slot of the row's token; -1: no row */
    uint32_t nonfinite;          /* mask of rows with NaN or Inf */
    uint32_t rest;               /* mask of forms whose second part is not 0 */
    int32_t at[KVC_FORMS];       /* byte offset of each form */
    float part[2][4][8];         /* for codes: each warp's partial sum of a row, for base */
} kvc_query;

/* Bytes of eight rows; forms are in a fixed order. */
KVC_INLINE int kvc_form_at(uint32_t forms, int form, int dims)
{
    int at = (int)sizeof(kvc_query);
    for (int i = 0; i < form; i++) at += forms >> i & 1 ? kvc_form_bytes(i, dims) : 0;
    return at;
}
KVC_INLINE int kvc_query_bytes(uint32_t forms, int dims) { return kvc_form_at(forms, KVC_FORMS, dims); }

/* B fragment of k step s of a form, limb 0 or 1. */
KVC_DEVICE void kvc_fragment(const uint64_t *of_form, int dims, int limb, int s, uint32_t b[2])
{
    uint64_t both = of_form[limb * 2 * dims + s * 32 + kvc_lane()];
    b[0] = (uint32_t)both;
    b[1] = (uint32_t)(both >> 32);
}

/* Codes below 8 bits, masked in place, are subnormal fp16 numbers: this is their unit. A code of plane p, at bit bits *
 * p, is 2^(bits * p) times that. */
#define KVC_GRAIN 0x1p-24f

/* Plane of dim d, and its index in the plane; `period`: dims per plane. */
KVC_DEVICE int kvc_plane_of(int d, int period) { return (d >= period) + (d >= 2 * period) + (d >= 3 * period); }

/* Byte of dim d of row n within a limb of a form. */
KVC_DEVICE int kvc_fragment_place(int form, int dim, int n, int d)
{
    int s = d >> 4, t = d >> 2 & 3, reg = d >> 1 & 1, byte = 2 * (d & 1); /* words 2t, 2t + 1 of eight, two dims each */
    if (form == KVC_FORM_MEAN) return ((s * 32 + n * 4 + t) * 4 + 2 * reg) * 4 + byte;
    if (form >= KVC_FORM_INT4) { /* bytes 0, 2 and 1, 3 of a plane of word t of four */
        int planes = form == KVC_FORM_INT4 ? 2 : 4, p = kvc_plane_of(d, dim / planes), i = d - p * (dim / planes);
        s = planes * (i >> 4) + p, t = i >> 2 & 3, reg = i & 1, byte = i & 2;
        return ((s / 2 * 32 + n * 4 + t) * 4 + s % 2 * 2 + reg) * 4 + byte; /* steps 2s, 2s + 1 are adjacent */
    }
    return ((s * 32 + n * 4 + t) * 2 + reg) * 4 + byte;
}

KVC_DEVICE float kvc_absmax(const float *x, int parts)
{
    float most = 0;
    EACH_PART(k, 0, parts) most = fmaxf(most, fabsf(x[k]));
    KVC_UNROLL for (int h = 8; h > 0; h /= 2) most = fmaxf(most, kvc_shuffle_xor_f(most, h));
    return most;
}

/* Stores a form of row n, given as x (zeros past dim) by a half-warp; `most`: its largest magnitude. All forms except
 * those for codes have a second limb. */
KVC_DEVICE void kvc_put_form(const kvc_call *call, kvc_query *q, int form, int dims, int dim, int n, float scale,
                             float most, const float *x)
{
    uint8_t *at = (uint8_t *)q + call->form_at[form];
    const bool codes = form >= KVC_FORM_INT4, wide = form == KVC_FORM_BF16;
    const int bits = form == KVC_FORM_INT4 ? 4 : 2, limb = form == KVC_FORM_MEAN ? 4 : 16 * dims;
    float unit = 1, total = 0;
    if (!wide) { /* the power of two of the largest */
        uint32_t e = kvc_f32_bits(most) >> 23;
        unit = kvc_f32_of_bits((e < 20 ? 20 : e > 252 ? 252 : e) << 23);
    }
    float inverse = kvc_f32_of_bits(0x7f000000 - kvc_f32_bits(unit));
    bool rest = false, given = wide && call->a.q.dtype == KVC_BF16; /* then there is no remainder */
    if (given) KVC_UNROLL for (int k = 0; k < dims / 16; k++) if (16 * k < dim)
        {
            int place = kvc_fragment_place(form, dim, n, 16 * k + kvc_half_lane());
            *(uint16_t *)(at + place) = (uint16_t)(kvc_f32_bits(x[k]) >> 16);
        }
    if (!given) KVC_UNROLL for (int k = 0; k < dims / 16; k++) if (16 * k < dim)
        {
            int d = 16 * k + kvc_half_lane(), place = kvc_fragment_place(form, dim, n, d);
            float y = x[k] * inverse;
            if (codes) { /* up to 2^11, so that the share of the highest plane is not subnormal */
                int up = bits * kvc_plane_of(d, dim * bits / 8) << 23;
                uint16_t of_plane = (uint16_t)kvc_pack_f16(y * kvc_f32_of_bits((137u << 23) - up), 0);
                *(uint16_t *)(at + place) = of_plane;
                total += kvc_widen(of_plane, 0) * kvc_f32_of_bits((127u << 23) + up);
                continue;
            }
            uint16_t first = (uint16_t)(wide ? kvc_pack_bf16(y, 0) : kvc_pack_f16(y, 0));
            float left = y - (wide ? kvc_bf16_to_f32(first) : kvc_widen(first, 0));
            uint16_t second = (uint16_t)(wide ? kvc_pack_bf16(left, 0) : kvc_pack_f16(left, 0));
            *(uint16_t *)(at + place) = first;
            *(uint16_t *)(at + limb + place) = second;
            rest |= (second & 0x7fff) != 0;
        }
    if (rest) kvc_atomic_or(&q->rest, 1u << form);
    if (codes) total = kvc_half_sum(total);
    if (kvc_half_lane()) return;
    q->step[form][n] = unit * scale * (codes ? 1 / (1024 * KVC_GRAIN) : 1);
    KVC_UNROLL for (int i = 0; i < 2; i++) if (codes) q->base[form - KVC_FORM_INT4][n / 2][n % 2 + 2 * i] =
        -total * KVC_GRAIN * (bits == 4 ? 7.5f : 1.5f);
}

/* The call's queries of a sequence: its index in q, their number, slot of the first. seen: added to the slot if not
 * NULL; loaded where it is needed. */
typedef struct kvc_queries {
    int64_t batch, count, slot;
    const int64_t *seen;
} kvc_queries;
KVC_DEVICE kvc_queries kvc_row_queries(const kvc_row *row)
{
    kvc_queries of = {row->batch, row->queries, row->query_slot, NULL};
    return of;
}

/* Converts row r of the queries of (b, h) to its forms, as the n-th of the eight, by a half-warp. Elements past
 * dim must be 0 already. */
KVC_DEVICE void kvc_query_fill(const kvc_call *call, const kvc_queries *of, kvc_query *q, uint32_t forms, int dims,
                               int dim, int h, int r, int n)
{
    const kvc_attend_args *a = &call->a;
    int group = (int)call->group, token = (int)((uint32_t)r / (uint32_t)group);
    bool there = token < (int)of->count;
    float x[KVC_PARTS] = {0};
    bool nonfinite = false;
    const uint8_t *row =
        kvc_dense_row(&a->q, of->batch, h * group + (there ? r - token * group : 0), there ? token : 0);
    KVC_UNROLL for (int k = 0; k < dims / 16; k++) if (16 * k < dim)
    {
        x[k] = there ? kvc_element(row, a->q.dtype, 16 * k + kvc_half_lane()) : 0;
        if ((kvc_f32_bits(x[k]) & 0x7f800000) == 0x7f800000) nonfinite = true;
    }
    uint32_t any = nonfinite;
    KVC_UNROLL for (int i = 8; i > 0; i /= 2) any |= kvc_shuffle_xor(any, i);
    KVC_UNROLL for (int k = 0; k < dims / 16; k++)
    {
        if (any) x[k] = 0;
        if (a->scale < 0) x[k] = -x[k]; /* steps are positive */
    }
    if (kvc_half_lane() == 0) {
        q->slot[n] = there ? (int32_t)(of->slot + token + (of->seen ? *of->seen : 0)) : -1;
        if (any) kvc_atomic_or(&q->nonfinite, 1u << n);
    }
    float most = kvc_absmax(x, dims / 16);
    KVC_UNROLL for (int form = 0; form < KVC_FORMS; form++)
    {
        if (form == KVC_FORM_INT4 && forms >> KVC_FORM_INT4) {
            kvc_rotate_parts(dims / 16, x, dim);
            most = kvc_absmax(x, dims / 16);
        }
        if (forms >> form & 1) kvc_put_form(call, q, form, dims, dim, n, fmaxf(fabsf(a->scale), 1e-30f), most, x);
    }
}

#endif
