/* attend_work.h - private to attend.c, attend_work.c and attend_mass.c: how a call is cut into items, and what one worker
 * needs for an item of (sequence, KV head, block of queries, run of columns). */
#ifndef KVC_ATTEND_WORK_H
#define KVC_ATTEND_WORK_H

#include "attend.h"

typedef struct kvc_job {
    const kvc_call *call;
    int64_t group, block_tokens, blocks, runs; /* G; tokens a block; blocks and runs a (sequence, head) */
    int64_t columns;                           /* of the longest sequence */
    float *partial;                            /* [items] x (rows x (Dv + 2)): o, m, l; NULL when runs == 1 */
    /* For the mass of a single query (else NULL): weights of every page relative to m of that time, and that m. */
    float *kept, *kept_m; /* [B, H, columns, G, kept_width], [B, H, columns, G] */
    int64_t kept_width;
} kvc_job;

/* A page as an item meets it. */
typedef struct kvc_view {
    int64_t first, n; /* index of its first token, tokens stored; n = 0: nothing, the rest is undefined */
    const uint8_t *data;
    int key, value;
    int64_t page_size; /* that it is laid out for */
    kvc_layout layout;
} kvc_view;

typedef struct kvc_work {
    const kvc_job *job;
    const kvc_row *row;
    int64_t b, h, t0, tokens, rows; /* first query token, tokens and rows of the block; row = t * G + g */
    int64_t columns;                /* of the sequence */
    kvc_query query;
    float *s, *o, *o_rotated, *m, *l; /* [rows][KVC_MAX_PAGE], [rows][Dv] twice, [rows] twice */
    kvc_affine affine[2];             /* K and V of a page, for formats without kernels, and room for their codes */
    uint8_t *words[2];
    float *block; /* what all of it is cut from */
} kvc_work;

/* Floats of a worker's block; with a block, cuts it up. */
int64_t kvc_work_lay_out(kvc_work *w, const kvc_job *job, float *block);

/* Columns of a sequence that hold something for attention, own pages included. */
int64_t kvc_item_columns(const kvc_call *call, const kvc_row *row);
kvc_view kvc_view_at(const kvc_work *w, int64_t c);

/* Which (sequence, head) comes next. */
void kvc_work_at(kvc_work *w, int64_t b, int64_t h);
/* And which block of its queries: loads and prepares q; m = -inf, l = 0 (NaN where q is). */
void kvc_work_begin(kvc_work *w, int64_t b, int64_t h, int64_t block);

/* Scores of rows [r0, r0 + n) of a page, n <= KVC_ROWS. `sees`: how many tokens each sees; false: none does, and nothing
 * is computed. `ahead`: bytes to the page that is next, 0 if it lies otherwise. */
bool kvc_page_scores(kvc_work *w, const kvc_view *v, int64_t r0, int64_t n, ptrdiff_t ahead, float *s, int64_t ld,
                     uint64_t bits[KVC_ROWS][KVC_WORDS], int64_t sees[KVC_ROWS]);
/* The page's part in o, m, l of all rows of the block. c: its column. */
void kvc_page_attend(kvc_work *w, const kvc_view *v, int64_t c, ptrdiff_t ahead);

/* attend_mass.c. Room for what a single query's weights are kept in, all of it "not met"; none for more queries. */
kvc_status kvc_mass_begin(kvc_job *job);
void kvc_mass_end(kvc_job *job);
/* a->mass of the tokens of w's (sequence, head) from what was kept, or of all from a second pass; lse is known. */
void kvc_mass_of_kept(kvc_work *w);
kvc_status kvc_mass_of_scores(const kvc_job *job);

#endif
