/* neon_bytes.h - int8 pages. The sums of all rows for a block of lanes (tokens of K, dims of V) stay in registers; the
 * block is as large as fits, so that loads and the setup of sums are shared by many products. Included by neon_ints.h.
 *
 *   DOT    16 lanes, one limb after the other. Per 64 bytes, limb and row 4 DOT; shared: a load, half a load of digits,
 *          and for the upper limb of K 4 instructions that remove the bias
 *   MMLA   8 lanes, both limbs. Per 64 bytes and row 4 MMLA; shared: 2 loads, half a load of digits, 4 zips */
#ifndef KVC_NEON_BYTES_H
#define KVC_NEON_BYTES_H

/* Loads the digits of numbers 8i to 8i + 7 of all rows. */
INLINE void load_digits(int NR, const int8_t *digits, int8x16_t d[4])
{
    if (NR == 4) {
        int8x16x4_t all = vld1q_s8_x4(digits);
        EACH (r, 4) d[r] = all.val[r];
    } else {
        EACH (r, NR) d[r] = vld1q_s8(digits + 16 * r);
    }
}

/* Prefetches n lines of the next page, if there is one. */
#define FETCH(n)                                                                                                       \
    if (fetch) {                                                                                                       \
        EACH (line, n) __builtin_prefetch(fetch + 64 * line, 0, 2);                                                    \
        fetch += 64 * (n);                                                                                             \
    }
/* Hides an address from clang, which otherwise computes offsets from one base register; multi-register
 * loads have none. */
#define OPAQUE(address) __asm__("" : "+r"(address))

#ifdef MMLA
enum { BYTE_LANES = 8 };

/* dot[r][v] = first[r] (from begin_with) + products of n words (a multiple of STEP, which is 4 or 8) of 8 lanes with
 * the digits. Words are `stride` bytes apart, from `at` on. Prefetches from `fetch` on, one line per two words. */
INLINE void byte_dots(bool KEY, int STEP, int NR, const uint8_t *at, int64_t stride, int64_t n, const int8_t *digits,
                      const int32x4_t first[4], const uint8_t *fetch, int32x4_t dot[4][4])
{
    int32x4_t sum[4][2][2];
    (void)KEY;
    EACH (r, NR)
        EACH (v, 2) start(sum[r][v], first[r]);
    for (int64_t left = n / STEP; left; left--) { /* n > 0 */
        FETCH(STEP / 2)
        KVC_UNROLL
        EACH (h, STEP / 2) {
            int8x16_t d[4];
            load_digits(NR, digits, d);
            digits += 16 * KVC_ROWS;
            OPAQUE(digits);
            uint8x16_t a[2] = {vld1q_u8(at), vld1q_u8(at + 16)};
            uint8x16_t b[2] = {vld1q_u8(at + stride), vld1q_u8(at + stride + 16)};
            at += 2 * stride;
            EACH (v, 2)
                EACH (r, NR) keys(sum[r][v], a[v], b[v], d[r]);
        }
    }
    int32x4_t limb = vdupq_n_s32(128); /* a constant would become a shift and an addition */
    __asm__("" : "+w"(limb));
    EACH (r, NR)
        EACH (v, 2) {
            columns(sum[r][v]);
            dot[r][v] = vmlaq_s32(sum[r][v][1], sum[r][v][0], limb);
        }
}

INLINE int32x4_t byte_first(bool KEY, const kvc_query_form *f, const int32_t *sum, int64_t r)
{
    (void)KEY, (void)f;
    return begin_with(kvc_times(-128, sum[r]));
}
#else
enum { BYTE_LANES = 16 };

/* Products of one word. Without the barriers, clang loads the codes of several words into registers before multiplying
 * and spills the sums; they make each register's products start after those of the previous one. */
#define ADD_WORD(MULTIPLY, codes, lane) /* a literal */                                                                \
    {                                                                                                                  \
        uint8x16x4_t w = vld1q_u8_x4(at);                                                                              \
        at += stride;                                                                                                  \
        OPAQUE(at);                                                                                                    \
        EACH (v, 4) {                                                                                                  \
            uint8x16_t x = w.val[v];                                                                                   \
            int32x4_t *y = sum[0] + (v + 3) % 4;                                                                       \
            if (NR == 3) __asm__ volatile("" : "+w"(x), "+w"(y[0]), "+w"(y[4]), "+w"(y[8]));                           \
            if (NR == 4) __asm__ volatile("" : "+w"(x), "+w"(y[0]), "+w"(y[4]), "+w"(y[8]), "+w"(y[12]));              \
            x = codes;                                                                                                 \
            EACH (r, NR) sum[r][v] = MULTIPLY(sum[r][v], x, d[r], lane);                                               \
        }                                                                                                              \
    }

/* sum[r][v] += products of the words of 16 lanes with the digits of one limb. The upper limb of K is signed, so its
 * codes lose their bias. */
INLINE void add_limb(bool LOW, bool KEY, int STEP, int NR, const uint8_t *at, int64_t stride, int64_t n,
                     const int8_t *digits, const uint8_t *fetch, int32x4_t sum[4][4])
{
    OPAQUE(stride); /* makes clang use loads with post-increment */
    for (int64_t left = n / STEP; left; left--) {
        FETCH(STEP)
        KVC_UNROLL
        EACH (h, STEP / 2) {
            int8x16_t d[4];
            load_digits(NR, digits, d);
            digits += 16 * KVC_ROWS;
            __asm__("" : "+r"(digits), "+w"(d[0]));
            if (LOW) {
                ADD_WORD(UDOT, x, 2)
                ADD_WORD(UDOT, x, 3)
            } else if (KEY) {
                ADD_WORD(DOT, CODES(x), 0)
                ADD_WORD(DOT, CODES(x), 1)
            } else {
                ADD_WORD(UDOT, x, 0)
                ADD_WORD(UDOT, x, 1)
            }
        }
    }
}

/* sum[r][v] = 128 * (codes . hi + first[r]) + codes . lo for n words (a multiple of STEP, which is 4 or 8) of 16 lanes,
 * `stride` bytes apart, from `at` on. Prefetches from `fetch` on, one line per word. */
INLINE void byte_dots(bool KEY, int STEP, int NR, const uint8_t *at, int64_t stride, int64_t n, const int8_t *digits,
                      const int32x4_t first[4], const uint8_t *fetch, int32x4_t sum[4][4])
{
    EACH (r, NR)
        EACH (v, 4) sum[r][v] = first[r];
    add_limb(false, KEY, STEP, NR, at, stride, n, digits, fetch, sum);
    EACH (r, NR)
        EACH (v, 4) sum[r][v] = vshlq_n_s32(sum[r][v], 7);
    add_limb(true, KEY, STEP, NR, at, stride, n, digits, NULL, sum);
}

/* For K, only the codes multiplied by the lower limb keep their bias. */
INLINE int32x4_t byte_first(bool KEY, const kvc_query_form *f, const int32_t *sum, int64_t r)
{
    return vdupq_n_s32(-(KEY ? f->low_sum : sum)[r]);
}
#endif

/* Scores of BYTE_LANES tokens from t on. */
INLINE void byte_keys(int STEP, int NR, kvc_qk_args args, int64_t dim, const int32x4_t first[4], float32x4_t step,
                      int64_t t)
{
    const uint8_t *at = args.tiles + t / KVC_TILE * KVC_TILE * dim + t % KVC_TILE * 4;
    const uint8_t *fetch = args.ahead ? args.tiles + args.ahead + t * dim : NULL;
    int32x4_t dot[4][4];
    float32x4_t scale[4], x[4];
    byte_dots(true, STEP, NR, at, 4 * KVC_TILE, dim / 4, kvc_neon_digits(args.query->form, args.row0, dim), first,
              fetch, dot);
    EACH (v, BYTE_LANES / 4) scale[v] = kvc_scales(args.meta, t + 4 * v);
    EACH (r, NR) {
        EACH (v, BYTE_LANES / 4) x[v] = vmulq_f32(vcvtq_f32_s32(dot[r][v]), vmulq_n_f32(scale[v], step[r]));
        if (BYTE_LANES == 16)
            vst1q_f32_x4(args.s + r * args.ld + t, ((float32x4x4_t){{x[0], x[1], x[2], x[3]}}));
        else
            EACH (v, 2) vst1q_f32(args.s + r * args.ld + t + 4 * v, x[v]);
    }
}

INLINE void byte_qk(int STEP, int64_t dim, kvc_qk_args args)
{
    const kvc_query_form *f = args.query->form;
    float32x4_t step = vld1q_f32(f->step + args.row0);
    int32x4_t first[KVC_ROWS];
    for (int64_t r = 0; r < args.rows; r++) first[r] = byte_first(true, f, f->sum, args.row0 + r);
#define CALL(NR, N) byte_keys(STEP, NR, args, dim, first, step, at)
    KVC_BY_ROWS(CALL, args.rows, args.n_tiles * KVC_TILE, BYTE_LANES, 1, 1, 1)
#undef CALL
}
void ISA(qk_int8)(const kvc_qk_args *args)
{
    args->query->dim == 128 ? byte_qk(8, 128, *args) : byte_qk(4, args->query->dim, *args);
}

/* Sums of BYTE_LANES dims from d0 on. */
INLINE void byte_values(int STEP, int NR, kvc_pv_args args, int64_t dim, int64_t n, const weights *w,
                        const int32x4_t first[4], float32x4_t step, int64_t d0)
{
    int64_t words = (n + KVC_TILE - 1) / KVC_TILE * 4;
    const uint8_t *fetch = args.ahead ? args.tiles + args.ahead + 4 * d0 * words : NULL;
    int32x4_t dot[4][4];
    byte_dots(false, STEP, NR, args.tiles + 4 * d0, 4 * dim, words, w->digits, first, fetch, dot);
    EACH (r, NR) {
        float *o = args.o + r * dim + d0;
        if (BYTE_LANES == 16) {
            float32x4x4_t y = vld1q_f32_x4(o);
            EACH (v, 4) y.val[v] = vfmaq_n_f32(y.val[v], vcvtq_f32_s32(dot[r][v]), step[r]);
            vst1q_f32_x4(o, y);
        } else {
            EACH (v, 2) vst1q_f32(o + 4 * v, vfmaq_n_f32(vld1q_f32(o + 4 * v), vcvtq_f32_s32(dot[r][v]), step[r]));
        }
    }
}

INLINE void byte_pv(int STEP, int64_t dim, int64_t n, kvc_pv_args args)
{
    weights w;
    int32x4_t first[KVC_ROWS]; /* codes are biased by 128 */
    kvc_neon_weigh(&w, args.p, args.ld, args.rows, args.n, args.meta, NULL);
    float32x4_t step = vld1q_f32(w.step);
    for (int64_t r = 0; r < args.rows; r++) first[r] = byte_first(false, NULL, w.sum, r);
#define CALL(NR, N) byte_values(STEP, NR, args, dim, n, &w, first, step, at)
    KVC_BY_ROWS(CALL, args.rows, dim, BYTE_LANES, 1, 1, 1)
#undef CALL
}
/* For the common page size and dim, all loop counts are constants. */
void ISA(pv_int8)(const kvc_pv_args *args)
{
    args->dim == 128 && args->n == 64 ? byte_pv(8, 128, 64, *args) : byte_pv(4, args->dim, args->n, *args);
}

#undef FETCH
#undef OPAQUE
#endif
