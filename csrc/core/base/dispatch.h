/* dispatch.h - one table of kernels per instruction set level. The scalar level is the reference. */
#ifndef KVC_DISPATCH_H
#define KVC_DISPATCH_H

#include "kvc.h"
#include "page.h"

struct kvc_side; /* codec.h */
struct kvc_room;

#define KVC_WORDS (KVC_MAX_PAGE / 64) /* number of 64-bit words for one bit per token */
#define KVC_ROWS 4                    /* maximum number of query rows per kernel call */
#define KVC_TINY 1e-30f /* rows and pages of weights below this are treated as zero, so that 1 / x cannot overflow */
#define KVC_NOISE 0.012f
#define KVC_SLACK 8       /* weights are at most e^8, which fits fp16; accumulated attention stores them so */
#define KVC_WIDE 16       /* maximum number of rows per call of a wide kernel */
#define KVC_WIDE_STEP 64  /* wide kernels require dims and tokens to be multiples of this */
#define KVC_P_LIMIT 16256 /* 127 * 128: largest value of a two-limb integer (128 * hi + lo, lo in 0..127) */

/* Query rows of one KV head, prepared once for all pages, in one form. Row r of each array is at r * dim. q includes
 * the softmax scale. */
typedef struct kvc_query_form {
    float *q; /* [rows][dim] */
    /* [rows][dim] two limbs: q ~ step * (128 * hi + lo); lo follows hi. avx2 and NEON use orders of their own. */
    int8_t *hi, *lo;
    float *step;  /* [rows] */
    int32_t *sum; /* [rows] sum over dims of 128 * hi + lo */
    int8_t *one;  /* [rows][dim] one limb: q ~ step * 128 * one. NULL if the level does not use it */
    /* [rows][dim] bf16: q before the softmax scale ~ half + rest; i8mm uses an order of its own */
    uint16_t *half, *rest;
    bool whole;       /* rest is 0 */
    float unit;       /* the softmax scale */
    int32_t *one_sum; /* [rows] sum over dims of `one` */
    int32_t *low_sum; /* [rows] sum over dims of lo; NEON only */
} kvc_query_form;

typedef struct kvc_query {
    int64_t rows, dim;
    /* set for the spaces that the call uses and KVC_PLAIN; pointers of others are NULL */
    kvc_query_form forms[KVC_SPACES];
    const kvc_query_form *form; /* the form for the current page */
    /* long sequence: one limb of q is precise enough for a page of rotated codes if the error of its scores stays
     * below KVC_NOISE (standard deviation) */
    bool coarse;
} kvc_query;

/* s[r * ld + t] = q[row0 + r] . k[t] for r < rows (<= KVC_ROWS), t < n_tiles * 16. Scores of tokens that were never
 * written are undefined and may be NaN. */
typedef struct kvc_qk_args {
    const uint8_t *tiles, *meta; /* of the page's K */
    const kvc_query *query;
    int64_t row0, rows, page_size, n_tiles;
    ptrdiff_t ahead; /* bytes from these tiles to the next page's, for prefetching; 0: none */
    float *s;
    int64_t ld;
    /* wide kernels: memory for the page's codes as they multiply them, 2 bytes per element; ready: an earlier call for
     * the same page has converted them */
    uint8_t *wide;
    bool ready;
    int64_t all_rows; /* query rows of all calls for this page */
} kvc_qk_args;
typedef void kvc_qk_fn(const kvc_qk_args *args);

/* Required precision of p. */
typedef enum kvc_digits {
    KVC_P_EXACT, /* 14 bits and more */
    KVC_P_BF16,  /* one bf16, if the output is bf16 */
    /* a page with little weight in a long sequence: 8 bits for codes below 8 bits that are rotated or in groups;
     * otherwise one bf16 */
    KVC_P_BYTE
} kvc_digits;

/* o[r * dim + d] += sum over t < n of p[r * ld + t] * v[t][d], r < rows (<= KVC_ROWS). p >= 0. p is 0 for tokens from n
 * up to the next multiple of 16; what the page holds there, even NaN, has no effect. For a rotated format, o is in
 * rotated space. */
typedef struct kvc_pv_args {
    const uint8_t *tiles, *meta; /* of the page's V */
    const float *p;
    int64_t ld, rows, dim, page_size, n;
    kvc_digits digits;
    ptrdiff_t ahead; /* as for K */
    float *o;
    uint8_t *wide; /* as for K */
    bool ready;
    int64_t all_rows;
} kvc_pv_args;
typedef void kvc_pv_fn(const kvc_pv_args *args);

/* Operations on 16 tokens at a time through x [dim][16], fp32 with one lane per token: see kernels/tile.h. They give
 * the same bytes as row by row. */
typedef struct kvc_tile_kernels {
    void (*load)(const uint8_t *const *row, kvc_dtype dtype, int64_t dim, float *x); /* 16 rows to x */
    /* x to 16 rows; NULL rows are skipped. stream: non-temporal stores, because the output is large
     * and not read soon. */
    void (*store)(const float *x, kvc_dtype dtype, int64_t dim, uint8_t *const *row, bool stream);
    /* 16 rows, `stride` bytes apart, to the words of a raw K tile. */
    void (*raw_key)(const uint8_t *rows, int64_t stride, int64_t words, uint8_t *tile, bool stream);
    bool (*finite)(const uint8_t *words, kvc_dtype dtype, int64_t n);    /* n 32-bit words, a multiple of 16 */
    void (*decode)(const struct kvc_side *side, int64_t tile, float *x); /* any format */
    /* for formats without statistics over tokens */
    void (*encode)(const struct kvc_room *side, int64_t tile, float *x);
    void (*encode_page)(const struct kvc_room *side, float *x); /* for formats with: x [tiles][dim][16] */
    /* Converts the codes of a tile to the layout of the other side. Not for raw formats. */
    void (*turn)(const struct kvc_side *side, int64_t tile, uint8_t *to);
    /* out [16]: the dot product of each row with y [dim], or with itself if y is NULL. */
    void (*dot)(const float *x, int64_t dim, const float *y, float *out);
    /* sums [dim][16] += x * factor [16] */
    void (*add)(const float *x, int64_t dim, const float *factor, float *sums);
    /* rows [rows][dim] (4 or 1) times `by` [dim][dim], columns [0, n). Returns n, the columns that
     * fill whole vectors. */
    int64_t (*map)(const float *x, int64_t rows, const float *by, int64_t dim, float *out);
} kvc_tile_kernels;

/* One side of a page of integer codes, prepared for the affine kernels. Codes have `bits` bits, in the layout of int8,
 * int4 or int2. The value of element d of token t is (code - centre) * scale + middle, with scale and middle of (d /
 * group, t). Set for stored tokens; the rest, up to a multiple of 16, is 0. */
#define KVC_MAX_GROUPS (KVC_MAX_DIM / 16)
typedef struct kvc_affine {
    int bits;
    bool symmetric; /* every middle is 0 */
    bool coarse;    /* 8-bit p may be used: codes have fewer than 8 bits, and groups confine outlier channels */
    int64_t dim, group, page_size;
    int32_t centre; /* the middle of the codes */
    const uint8_t *words;
    ptrdiff_t ahead;       /* bytes to the words to prefetch; 0 if codes were unpacked */
    float *scale, *middle; /* [dim / group][page_size] */
} kvc_affine;

/* n: tokens stored. words: page_size * dim bytes for unpacked codes. Otherwise as kvc_qk_fn and kvc_pv_fn. */
typedef void kvc_affine_fn(const struct kvc_side *side, int64_t n, ptrdiff_t ahead, uint8_t *words, kvc_affine *to);
typedef void kvc_qk_affine_fn(const struct kvc_side *side, const kvc_affine *page, const kvc_query *query, int64_t row0,
                              int64_t rows, int64_t n_tiles, float *s, int64_t ld);
typedef void kvc_pv_affine_fn(const kvc_affine *page, const float *p, int64_t ld, int64_t rows, int64_t n,
                              kvc_digits digits, float *o);

/* Kernels for up to KVC_WIDE query rows at once, for the formats that have an entry, if dim and tokens are multiples of
 * KVC_WIDE_STEP. As kvc_qk_fn and kvc_pv_fn, except that q is padded to a multiple of KVC_WIDE rows, or to KVC_WIDE / 2 in
 * a block of no more, and o to a multiple of KVC_WIDE rows; q's padding may be read, and o's written. A thread calls
 * begin before and end after using them. */
typedef struct kvc_wide_kernels {
    int rows[KVC_FORMATS]; /* the number of rows from which on they are faster */
    void (*begin)(void), (*end)(void);
    kvc_qk_fn *qk[KVC_FORMATS];
    kvc_pv_fn *pv[KVC_FORMATS];
} kvc_wide_kernels;

/* One side of a page of latents, with codes unpacked to bytes once for many query rows. For scores: word[tile][dim /
 * 4][16] with 4 dims per word. For sums: blocks of KVC_PANEL_DIMS dims (the last may have fewer), each word[tokens /
 * 4][dims] with 4 tokens per word, minus their middle. */
#define KVC_PANEL_DIMS 64
typedef struct kvc_panel {
    int kind; /* bits per code, or a kernel's own constant */
    int64_t dim;
    const uint8_t *words, *scale, *centroid; /* fp16: per token; per dim, or NULL */
    const float *mean;                       /* [dim], added to sums for each weight, or NULL */
} kvc_panel;

typedef struct kvc_panel_kernels {
    /* Packs n tokens, for sums or for scores; room: dim bytes per token. Returns false if there are no kernels for the
     * format. */
    bool (*pack)(const struct kvc_side *side, int64_t n, bool sums, uint8_t *room, kvc_panel *to);
    /* As kvc_qk_fn and kvc_pv_fn, for up to KVC_WIDE rows. add: adds to the scores in s. coarse: 8-bit p is precise
     * enough. keep: factor for each row of o, applied first; NULL: o is overwritten. */
    void (*qk)(const kvc_panel *k, const kvc_query *query, int64_t row0, int64_t rows, int64_t n_tiles, bool add,
               float *s, int64_t ld);
    void (*pv)(const kvc_panel *v, const float *p, int64_t ld, int64_t rows, int64_t n, bool coarse, const float *keep,
               float *o);
} kvc_panel_kernels;

typedef struct kvc_kernels {
    const char *name;
    const kvc_wide_kernels *wide;   /* or NULL */
    const kvc_panel_kernels *panel; /* or NULL */
    /* Encodes n rows [n][dim] (overwritten) to codes, one per byte, and the metadata of each row (kvc_meta_planes
     * elements, contiguous). Rotates rows of rotated formats. All levels give identical bytes. */
    void (*encode)(int format, float *rows, int64_t n, int64_t dim, const float *feedback, uint8_t *codes,
                   uint8_t *meta);
    /* In-place orthonormal Walsh-Hadamard transform of n rows, in blocks of the largest power of two in dim. */
    void (*rotate)(float *rows, int64_t n, int64_t dim);
    /* Converts row r of `form->q` to limbs, step and sum. A row with NaN or Inf becomes zeros with a step of NaN, so
     * that its scores are NaN. */
    void (*limbs)(const kvc_query_form *form, int64_t rows, int64_t dim);
    /* Fills half and rest from q, before the softmax scale is applied; returns true if rest is 0. NULL if not used. */
    bool (*halves)(const kvc_query_form *form, int64_t rows, int64_t dim);
    /* Online softmax over one page for up to KVC_ROWS rows: replaces scores s [rows][ld] by weights p; n16 per row
     * (tokens rounded up to 16). Scores whose bit in `visible` (row r, word t / 64, bit t % 64) is clear count as -inf.
     * softcap 0: none. Updates m, which weights are relative to, and the sum l of each row. m is the largest score so
     * far, or below it by at most KVC_SLACK, so that it changes rarely. keep[r] is the factor for the row's earlier
     * sums (1 if m did not change). A visible score of NaN or +inf makes l and keep NaN (and p undefined) for good. l
     * stays 0 while all scores are -inf. If a row sees no token, its m is undefined if it was -inf. */
    void (*softmax)(float *s, int64_t ld, int64_t rows, int64_t n16, const uint64_t (*visible)[KVC_WORDS],
                    float softcap, float *m, float *l, float *keep);
    /* m[i] = exp(m[i] - lse[i]), at most 1, for i < n; 0 if m is -inf or lse is +inf. m is not +inf; neither is NaN. */
    void (*factors)(float *m, const float *lse, int64_t n);
    /* Stores the weights of rows as fp16. */
    void (*keep)(const float *p, int64_t ld, int64_t rows, int64_t n16, uint16_t *to, int64_t to_ld);
    /* to[t] = sum over rows of p[r * ld + t] * factor[r], t < n16. p is fp16 if `half`, otherwise fp32. */
    void (*sum_rows)(const void *p, bool half, int64_t ld, int64_t rows, int64_t n16, const float *factor, float *to);
    /* Formats without kernels of their own (NULL) use the affine kernels, one side of a page at a
     * time: see affine.h. */
    kvc_qk_fn *qk[KVC_FORMATS];
    kvc_pv_fn *pv[KVC_FORMATS];
    kvc_affine_fn *affine;
    kvc_qk_affine_fn *qk_affine;
    kvc_pv_affine_fn *pv_affine;
    const kvc_tile_kernels *tile; /* NULL: pages are encoded and decoded row by row */
} kvc_kernels;

/* The levels of this build, worst first, terminated by one without kernels: see kernels/levels.c. */
typedef struct kvc_level {
    const kvc_kernels *kernels;
    bool (*usable)(void); /* whether the CPU supports it and the system allows it */
} kvc_level;
#define KVC_MAX_LEVELS 8
extern const kvc_level kvc_levels[];

/* The level in use (see kvc_isa); NULL after a failure. */
const kvc_kernels *kvc_kernels_get(void);

#endif
