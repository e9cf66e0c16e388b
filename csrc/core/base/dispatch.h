/* dispatch.h - one table of kernels per instruction set level; the scalar one is the oracle. */
#ifndef KVC_DISPATCH_H
#define KVC_DISPATCH_H

#include "kvc.h"
#include "page.h"

struct kvc_side; /* codec.h */
struct kvc_room;

#define KVC_WORDS (KVC_MAX_PAGE / 64) /* 64-bit words for a bit a token */
#define KVC_ROWS 4                    /* query rows that a kernel takes at once, at most */
#define KVC_TINY 1e-30f               /* rows and pages of weights below it count as zero: 1 / x must not overflow */
#define KVC_NOISE 0.012f
#define KVC_SLACK 8       /* weights are e^8 at most: within fp16, where they are kept for the mass */
#define KVC_WIDE 16       /* rows that a wide kernel takes at once, at most */
#define KVC_WIDE_STEP 64  /* dims and tokens that it needs a multiple of */
#define KVC_P_LIMIT 16256 /* 127 * 128: largest value of a two-limb integer (128 * hi + lo, lo in 0..127) */

/* Query rows of one KV head, prepared once for all pages. Row r of every array at r * dim. The softmax scale is in
 * q. */
typedef struct kvc_query_form {
    float *q; /* [rows][dim] */
    /* [rows][dim], lo right behind hi: two limbs, q ~ step * (128 * hi + lo). avx2 and NEON have an order of their own. */
    int8_t *hi, *lo;
    float *step;  /* [rows] */
    int32_t *sum; /* [rows] sum over dims of 128 * hi + lo */
    int8_t *one;  /* [rows][dim] one limb: q ~ step * 128 * one; and its sums. Absent where no level wants it */
    uint16_t *half, *rest; /* [rows][dim] bf16: q before the softmax scale ~ half + rest. On i8mm in its own order */
    bool whole;            /* rest is 0 */
    float unit;            /* the softmax scale */
    int32_t *one_sum;      /* [rows] */
    int32_t *low_sum;      /* [rows] sum over dims of lo: NEON's */
} kvc_query_form;

typedef struct kvc_query {
    int64_t rows, dim;
    kvc_query_form forms[KVC_SPACES]; /* of spaces that the call meets and KVC_PLAIN; else pointers are NULL */
    const kvc_query_form *form;       /* that of the page at hand */
    bool coarse; /* a long sequence: one limb of q will do for a page of rotated codes, if that moves no score by more
                  * than KVC_NOISE (standard deviation) */
} kvc_query;

/* s[r * ld + t] = q[row0 + r] . k[t] for r < rows (<= KVC_ROWS), t < n_tiles * 16. Tokens that were never written may
 * give any value, NaN included. */
typedef struct kvc_qk_args {
    const uint8_t *tiles, *meta; /* of the page's K */
    const kvc_query *query;
    int64_t row0, rows, page_size, n_tiles;
    ptrdiff_t ahead; /* bytes from these tiles to those that will be wanted next, for prefetch; 0 for none */
    float *s;
    int64_t ld;
} kvc_qk_args;
typedef void kvc_qk_fn(const kvc_qk_args *args);

/* What will do for p. */
typedef enum kvc_digits {
    KVC_P_EXACT, /* 14 bits and more */
    KVC_P_BF16,  /* one bf16, as the output is one */
    KVC_P_BYTE   /* a page that weighs little in a long sequence: 8 bits for codes below 8 bits that are rotated or in
                  * groups, else one bf16 */
} kvc_digits;

/* o[r * dim + d] += sum over t < n of p[r * ld + t] * v[t][d], r < rows (<= KVC_ROWS). p >= 0. p of tokens n up to
 * the next multiple of 16 is 0, and what the page holds there (NaN, say) has no effect. For a rotated format o is in
 * rotated space. */
typedef struct kvc_pv_args {
    const uint8_t *tiles, *meta; /* of the page's V */
    const float *p;
    int64_t ld, rows, dim, page_size, n;
    kvc_digits digits;
    ptrdiff_t ahead; /* as for K */
    float *o;
} kvc_pv_args;
typedef void kvc_pv_fn(const kvc_pv_args *args);

/* 16 tokens at a time, through x [dim][16], fp32 with a lane per token: see kernels/tile.h. Same bytes as row by row. */
typedef struct kvc_tile_kernels {
    /* 16 rows to x. */
    void (*load)(const uint8_t *const *row, kvc_dtype dtype, int64_t dim, float *x); /* 16 rows to x */
    /* x to 16 rows, NULL: not. `stream`: they are many, and will not be read soon. */
    void (*store)(const float *x, kvc_dtype dtype, int64_t dim, uint8_t *const *row, bool stream);
    /* 16 rows, `stride` bytes apart, to the words of a raw K tile. */
    void (*raw_key)(const uint8_t *rows, int64_t stride, int64_t words, uint8_t *tile, bool stream);
    bool (*finite)(const uint8_t *words, kvc_dtype dtype, int64_t n);    /* n 32-bit words, 16 times k */
    void (*decode)(const struct kvc_side *side, int64_t tile, float *x); /* any format */
    void (*encode)(const struct kvc_room *side, int64_t tile, float *x); /* no statistics over tokens */
    void (*encode_page)(const struct kvc_room *side, float *x);          /* with: x [tiles][dim][16] */
    /* Codes of a tile to the layout of the other side; not of raw formats. */
    void (*turn)(const struct kvc_side *side, int64_t tile, uint8_t *to);
    /* out [16]: of each row its product with y [dim], or with itself (NULL). */
    void (*dot)(const float *x, int64_t dim, const float *y, float *out);
    /* sums [dim][16] += x * factor [16] */
    void (*add)(const float *x, int64_t dim, const float *factor, float *sums);
    /* Columns [0, n) of rows [rows][dim] (4 or 1) times `by` [dim][dim]; gives n, the columns that fill vectors. */
    int64_t (*map)(const float *x, int64_t rows, const float *by, int64_t dim, float *out);
} kvc_tile_kernels;

/* One side of a page whose codes are integers, ready for the affine kernels: codes of `bits`, laid out as those of
 * int8, int4, int2; the value of element d of token t is (code - centre) * scale + middle of (d / group, t). Filled for the tokens stored; what
 * follows them up to a multiple of 16 is 0. */
#define KVC_MAX_GROUPS (KVC_MAX_DIM / 16)
typedef struct kvc_affine {
    int bits;
    bool symmetric; /* every middle is 0 */
    bool coarse;    /* 8 bits of p do where digits say so: codes below 128, a loud channel is loud in its group alone */
    int64_t dim, group, page_size;
    int32_t centre; /* the middle of the codes */
    const uint8_t *words;
    ptrdiff_t ahead;       /* from words to those that are wanted next; 0 where codes were unpacked */
    float *scale, *middle; /* [dim / group][page_size] */
} kvc_affine;

/* n: tokens stored. words: room for page_size * dim bytes. Otherwise as kvc_qk_fn and kvc_pv_fn. */
typedef void kvc_affine_fn(const struct kvc_side *side, int64_t n, ptrdiff_t ahead, uint8_t *words, kvc_affine *to);
typedef void kvc_qk_affine_fn(const struct kvc_side *side, const kvc_affine *page, const kvc_query *query, int64_t row0,
                              int64_t rows, int64_t n_tiles, float *s, int64_t ld);
typedef void kvc_pv_affine_fn(const kvc_affine *page, const float *p, int64_t ld, int64_t rows, int64_t n,
                              kvc_digits digits, float *o);

/* Kernels for more query rows than KVC_ROWS, up to KVC_WIDE, for the formats that have an entry, where dim and tokens are
 * multiples of KVC_WIDE_STEP. As kvc_qk_fn and kvc_pv_fn; rows of q and o up to KVC_WIDE exist, and those past `rows` may
 * be read and overwritten. begin and end enclose all that a thread does. */
typedef struct kvc_wide_kernels {
    void (*begin)(void), (*end)(void);
    kvc_qk_fn *qk[KVC_FORMATS];
    kvc_pv_fn *pv[KVC_FORMATS];
} kvc_wide_kernels;

/* One side of a page of latents, its codes packed as bytes once for many query rows. For scores: word[tile][dim / 4][16] of 4
 * dims. For sums: blocks of KVC_PANEL_DIMS dims (the last may have fewer), each word[tokens / 4][dims] of 4 tokens, less
 * their middle. */
#define KVC_PANEL_DIMS 64
typedef struct kvc_panel {
    int kind; /* bits of a code, or what kernels have in their place */
    int64_t dim;
    const uint8_t *words, *scale, *centroid; /* fp16: of each token; of each dim, or NULL */
    const float *mean;                       /* [dim], which sums get for each weight, or NULL */
} kvc_panel;

typedef struct kvc_panel_kernels {
    /* Of n tokens, for sums or for scores; room: dim bytes a token. False: there are no kernels for the format. */
    bool (*pack)(const struct kvc_side *side, int64_t n, bool sums, uint8_t *room, kvc_panel *to);
    /* As kvc_qk_fn and kvc_pv_fn, of up to KVC_WIDE rows. add: to the scores in s. coarse: 8 bits of p will do. keep: what each
     * row of o is multiplied by first; NULL: o holds nothing yet. */
    void (*qk)(const kvc_panel *k, const kvc_query *query, int64_t row0, int64_t rows, int64_t n_tiles, bool add,
               float *s, int64_t ld);
    void (*pv)(const kvc_panel *v, const float *p, int64_t ld, int64_t rows, int64_t n, bool coarse, const float *keep,
               float *o);
} kvc_panel_kernels;

typedef struct kvc_kernels {
    const char *name;
    const kvc_wide_kernels *wide;   /* or NULL */
    const kvc_panel_kernels *panel; /* or NULL */
    /* Codec: n rows [n][dim] (overwritten) -> codes one a byte and the rows' metadata side by side (kvc_meta_planes
     * elements a row). Rows of a rotated format are rotated here. Identical bytes on every level. */
    void (*encode)(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                   uint8_t *meta);
    /* In-place orthonormal Walsh-Hadamard transform of n rows, in blocks of the largest power of two in dim. */
    void (*rotate)(float *rows, int64_t n, int64_t dim);
    /* Row r of `form->q` to limbs, step and sum. NaN or Inf in it: zeros with a step of NaN, which scores are then. */
    void (*limbs)(const kvc_query_form *form, int64_t rows, int64_t dim);
    /* Fills half and rest from q, which the scale is not in yet; true if rest is 0. NULL: not wanted. */
    bool (*halves)(const kvc_query_form *form, int64_t rows, int64_t dim);
    /* One page of up to KVC_ROWS rows: scores s [rows][ld] -> p in place, n16 a row (tokens rounded up to 16). Scores whose
     * bit in `visible` (row r, word t / 64, bit t % 64) is clear count as -inf. softcap 0 = none. Updates m, which weights
     * are relative to, and the sum l of each row: m is the largest score so far, or below it by KVC_SLACK at most, so that it
     * seldom moves; keep[r] is the factor by which earlier sums of the row must be multiplied (1 if m did not change). A
     * visible score of NaN or +inf makes l NaN for good and the factor NaN (and p anything); l stays 0 while all are
     * -inf. m of a row that sees nothing is undefined afterwards where it was -inf. */
    void (*softmax)(float *s, int64_t ld, int64_t rows, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                    float softcap, float *m, float *l, float *keep);
    /* m[i] = exp(m[i] - lse[i]), 1 at most, i < n; 0 where m is -inf or lse +inf. m is not +inf, neither is NaN. */
    void (*factors)(float *m, const float *lse, int64_t n);
    /* Weights of rows as fp16. */
    void (*keep)(const float *p, int64_t ld, int64_t rows, int64_t n16, uint16_t *to, int64_t to_ld);
    /* to[t] = sum over rows of p[r * ld + t] * factor[r], t < n16; p: fp32, or fp16 where `half`. */
    void (*sum_rows)(const void *p, bool half, int64_t ld, int64_t rows, int64_t n16, const float *factor, float *to);
    /* Formats without kernels of their own (NULL) are made affine, a side of a page at a time: see affine.h. */
    kvc_qk_fn *qk[KVC_FORMATS];
    kvc_pv_fn *pv[KVC_FORMATS];
    kvc_affine_fn *affine;
    kvc_qk_affine_fn *qk_affine;
    kvc_pv_affine_fn *pv_affine;
    const kvc_tile_kernels *tile; /* NULL: pages are encoded and decoded row by row */
} kvc_kernels;

/* The levels that are compiled in, worst first, up to one without kernels: see kernels/levels.c. */
typedef struct kvc_level {
    const kvc_kernels *kernels;
    bool (*usable)(void); /* can this CPU, and does the system let it? */
} kvc_level;
#define KVC_MAX_LEVELS 8
extern const kvc_level kvc_levels[];

/* The level in use (see kvc_isa); NULL after a failure. */
const kvc_kernels *kvc_kernels_get(void);

#endif
