/* i8mm_floats.c - bf16 and e4m3 pages with BFMMLA: sums [2][2] += [2][4] . columns [2][4] of bf16, fp32 sums. The
 * columns are two rows of q (or of weights), one bf16 each, or two if one is not exact (the second is the remainder of
 * the first). e4m3 codes are converted to bf16, exactly, including subnormals.
 *
 *   per 16 bytes and row    products                                                          shared by the rows
 *   raw_bf16   half a BFMMLA, twice as many if q or the output (V) is not bf16                a zip
 *   fp8_e4m3   one BFMMLA, or two                                                             9: shifts, 3 lookups,
 * 2 zips */
#include "levels.h"
#ifdef KVC_HAS_DOTPROD
#include "target.h"
KVC_TARGET("arch=armv8.2-a+dotprod+i8mm+bf16")
#include "neon.h"

/* Columns of two rows are adjacent: [KVC_ROWS][4] for each four dims of q, or four tokens of a page. */
#define COLUMNS (4 * KVC_ROWS)

typedef struct e4m3 {
    uint8x16_t upper, tiny,
        tiny_lower; /* upper bytes by the upper nibble of a code; for codes with exponent 0, by 2m + sign */
} e4m3;

INLINE e4m3 tables(void)
{
    static const uint8_t upper[16] = {60, 61, 62, 63, 64, 65, 66, 67, 188, 189, 190, 191, 192, 193, 194, 195};
    static const uint8_t tiny[16] = {0, 128, 59, 187, 59, 187, 59, 187, 60, 188, 60, 188, 60, 188, 60, 188};
    static const uint8_t lower[16] = {0, 0, 0, 0, 128, 128, 192, 192, 0, 0, 32, 32, 64, 64, 96, 96};
    return (e4m3){vld1q_u8(upper), vld1q_u8(tiny), vld1q_u8(lower)};
}

/* Four lanes as two registers of two lanes with four bf16 each: from a word of e4m3, or from words a and b of bf16. */
INLINE void operands(int FP8, const e4m3 *x, uint8x16_t a, uint8x16_t b, uint8x16_t to[2])
{
    if (!FP8) {
        to[0] = vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
        to[1] = vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
        return;
    }
    uint8x16_t turned = vsriq_n_u8(vshlq_n_u8(a, 1), a, 7); /* below 16 if the exponent is 0 */
    uint8x16_t upper = vqtbx1q_u8(vqtbl1q_u8(x->upper, vshrq_n_u8(a, 4)), x->tiny, turned);
    uint8x16_t lower = vqtbx1q_u8(vshlq_n_u8(a, 4), x->tiny_lower, turned);
    to[0] = vzip1q_u8(lower, upper);
    to[1] = vzip2q_u8(lower, upper);
}

/* Loads the columns of NR rows at `at` of q or the weights, and of the remainders: y[part][pair of rows]. */
INLINE void load_columns(int PARTS, int NR, const uint16_t *const part[2], int64_t at, bfloat16x8_t y[2][2])
{
    EACH (k, PARTS)
        EACH (i, (NR + 1) / 2) y[k][i] = vreinterpretq_bf16_u16(vld1q_u16(part[k] + at + 8 * i));
}

/* sum[i] += two lanes per register . columns of rows 2i, 2i + 1. */
INLINE void multiply(int PARTS, int NR, const uint8x16_t x[2], bfloat16x8_t y[2][2], float32x4_t sum[2][2])
{
    EACH (k, PARTS)
        EACH (i, (NR + 1) / 2)
            EACH (h, 2) sum[i][h] = vbfmmlaq_f32(sum[i][h], vreinterpretq_bf16_u8(x[h]), y[k][i]);
}

INLINE float32x4_t row_of(float32x4_t sum[2][2], int r)
{
    return r % 2 ? vuzp2q_f32(sum[r / 2][0], sum[r / 2][1]) : vuzp1q_f32(sum[r / 2][0], sum[r / 2][1]);
}

/* ---------------------------------------------------------------- q */

/* As kvc_avx512bf16_halves. */
bool kvc_i8mm_halves(const kvc_query_form *f, int64_t rows, int64_t dim)
{
    uint16x4_t any = vdup_n_u16(0);
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = r / KVC_ROWS * KVC_ROWS * dim + r % KVC_ROWS * 4;
        for (int64_t d = 0; d < dim; d += 4, at += COLUMNS) {
            float32x4_t x = vld1q_f32(f->q + r * dim + d);
            uint32x4_t half = vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0xffff0000u));
            uint16x4_t rest = vreinterpret_u16_bf16(vcvt_bf16_f32(vsubq_f32(x, vreinterpretq_f32_u32(half))));
            vst1_u16(f->half + at, vshrn_n_u32(half, 16));
            vst1_u16(f->rest + at, rest);
            any = vorr_u16(any, rest);
        }
    }
    return !(vmaxv_u16(vshl_n_u16(any, 1)));
}

/* ---------------------------------------------------------------- K: NH halves of tiles of 8 tokens */

INLINE void key_halves(int FP8, int PARTS, int NR, int NH, kvc_qk_args args, const e4m3 *table, int64_t half0)
{
    const kvc_query_form *f = &args.query->forms[KVC_PLAIN];
    int64_t dim = args.query->dim, word = 4 * KVC_TILE, four = FP8 ? word : 2 * word;
    const uint16_t *const q[2] = {f->half + args.row0 * dim, f->rest + args.row0 * dim};
    const float unit = f->unit;
    const uint8_t *from[8];
    float32x4_t sum[8][2][2];
    if (half0 % 2) args.ahead = 0; /* prefetch each line once */
    EACH (v, 2 * NH) {
        int64_t half = half0 + v / 2;
        from[v] = args.tiles + half / 2 * four * dim / 4 + half % 2 * 32 + v % 2 * 16;
        EACH (i, (NR + 1) / 2) sum[v][i][0] = sum[v][i][1] = vdupq_n_f32(0);
    }
    for (int64_t j = 0; j < dim; j += FP8 ? 4 : 8)
        EACH (step, FP8 ? 1 : 2) {
            bfloat16x8_t y[2][2];
            load_columns(PARTS, NR, q, (j + 4 * step) * KVC_ROWS, y);
            EACH (v, 2 * NH) {
                uint8x16_t x[2];
                const uint8_t *at = from[v] + (j / 4 + step) * four;
                if (v % 4 == 0) kvc_prefetch(at, 0, args.ahead);
                if (v % 4 == 0 && !FP8) kvc_prefetch(at, 1, args.ahead);
                operands(FP8, table, vld1q_u8(at), vld1q_u8(at + four - word), x);
                multiply(PARTS, NR, x, y, sum[v]);
            }
        }
    EACH (v, 2 * NH) {
        int64_t t = half0 * 8 + 4 * v;
        float32x4_t scale = FP8 ? vmulq_n_f32(kvc_scales(args.meta, t), unit) : vdupq_n_f32(unit);
        EACH (r, NR) vst1q_f32(args.s + r * args.ld + t, vmulq_f32(row_of(sum[v], r), scale));
    }
}

INLINE void qk(int FP8, kvc_qk_args args)
{
    e4m3 table = tables();
#define CALL(NR, N) key_halves(FP8, PARTS, NR, N, args, &table, at)
    if (args.query->forms[KVC_PLAIN].whole) {
#define PARTS 1
        KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 4, 2)
#undef PARTS
    } else {
#define PARTS 2
        KVC_BY_ROWS(CALL, args.rows, 2 * args.n_tiles, 1, 4, 4, 2)
#undef PARTS
    }
#undef CALL
}
void kvc_i8mm_qk_raw_bf16(const kvc_qk_args *args) { qk(0, *args); }
void kvc_i8mm_qk_fp8_e4m3(const kvc_qk_args *args) { qk(1, *args); }

/* ---------------------------------------------------------------- V: NC blocks of 8 dims from d0 */

typedef struct split_weights {
    uint16_t half[KVC_ROWS * KVC_MAX_PAGE], rest[KVC_ROWS * KVC_MAX_PAGE];
} split_weights;

/* p (times scale, if meta is given; 0 from token n on) as bf16, and the remainders. */
INLINE void split(split_weights *w, int parts, const float *p, int64_t ld, int64_t rows, const uint8_t *meta, int64_t n)
{
    for (int64_t t = 0; t < n; t += 4) {
        uint32x4_t stored = kvc_first(n - t);
        float32x4_t scale = meta ? kvc_scales(meta, t) : vdupq_n_f32(1);
        for (int64_t r = 0; r < rows; r++) {
            uint32x4_t y = vreinterpretq_u32_f32(vmulq_f32(vld1q_f32(p + r * ld + t), scale));
            float32x4_t x = vreinterpretq_f32_u32(vandq_u32(y, stored));
            uint16x4_t half = vreinterpret_u16_bf16(vcvt_bf16_f32(x));
            vst1_u16(w->half + t * KVC_ROWS + 4 * r, half);
            if (parts == 1) continue;
            float32x4_t back = vreinterpretq_f32_u32(vshll_n_u16(half, 16));
            vst1_u16(w->rest + t * KVC_ROWS + 4 * r, vreinterpret_u16_bf16(vcvt_bf16_f32(vsubq_f32(x, back))));
        }
    }
}

/* Clears all but the first `left` of the four tokens in words of bf16: the others may hold anything (NaN). */
INLINE void keep_first(int64_t left, uint8x16_t *a, uint8x16_t *b)
{
    const uint8x16_t lower = vreinterpretq_u8_u32(vdupq_n_u32(0xffff)), none = vdupq_n_u8(0);
    if (left == 1) *a = vandq_u8(*a, lower);
    *b = left == 3 ? vandq_u8(*b, lower) : none;
}

/* Adds the four tokens at `from`, of which `left` exist. */
INLINE void add_tokens(int FP8, int PARTS, int NR, int NC, const e4m3 *table, const uint8_t *from, int64_t word,
                       ptrdiff_t ahead, bfloat16x8_t y[2][2], int64_t left, float32x4_t sum[8][2][2])
{
    EACH (v, 2 * NC) {
        uint8x16_t x[2], a = vld1q_u8(from + 16 * v), b = FP8 ? a : vld1q_u8(from + word + 16 * v);
        if (v % 4 == 0) kvc_prefetch(from + 16 * v, 0, ahead);
        if (v % 4 == 0 && !FP8) kvc_prefetch(from + word + 16 * v, 0, ahead);
        if (!FP8 && left < 4) keep_first(left, &a, &b);
        operands(FP8, table, a, b, x);
        multiply(PARTS, NR, x, y, sum[v]);
    }
}

INLINE void value_halves(int FP8, int PARTS, int NR, int NC, kvc_pv_args args, const e4m3 *table,
                         const split_weights *w, int64_t d0)
{
    int64_t word = 4 * args.dim, t = 0;
    const uint16_t *const p[2] = {w->half, w->rest};
    const uint8_t *from = args.tiles + 4 * d0;
    bfloat16x8_t y[2][2];
    float32x4_t sum[8][2][2];
    if (d0 % 16) args.ahead = 0; /* prefetch each line once */
    EACH (i, (NR + 1) / 2)
        EACH (v, 2 * NC) sum[v][i][0] = sum[v][i][1] = vdupq_n_f32(0);
    for (; FP8 ? t < args.n : t + 4 <= args.n; t += 4, from += FP8 ? word : 2 * word) {
        load_columns(PARTS, NR, p, t * KVC_ROWS, y);
        add_tokens(FP8, PARTS, NR, NC, table, from, word, args.ahead, y, 4, sum);
    }
    if (!FP8 && t < args.n) {
        load_columns(PARTS, NR, p, t * KVC_ROWS, y);
        add_tokens(FP8, PARTS, NR, NC, table, from, word, args.ahead, y, args.n - t, sum);
    }
    EACH (r, NR)
        EACH (v, 2 * NC) kvc_add_to(args.o + r * args.dim + d0 + 4 * v, row_of(sum[v], r));
}

INLINE void pv(int FP8, kvc_pv_args args)
{
    e4m3 table = tables();
    split_weights w;
    int parts = args.digits == KVC_P_EXACT ? 2 : 1;
    split(&w, parts, args.p, args.ld, args.rows, FP8 ? args.meta : NULL, args.n);
#define CALL(NR, N) value_halves(FP8, PARTS, NR, N, args, &table, &w, at)
    if (parts == 1) {
#define PARTS 1
        KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 4, 2)
#undef PARTS
    } else {
#define PARTS 2
        KVC_BY_ROWS(CALL, args.rows, args.dim, 8, 4, 4, 2)
#undef PARTS
    }
#undef CALL
}
void kvc_i8mm_pv_raw_bf16(const kvc_pv_args *args) { pv(0, *args); }
void kvc_i8mm_pv_fp8_e4m3(const kvc_pv_args *args) { pv(1, *args); }
KVC_TARGET_END
#endif
