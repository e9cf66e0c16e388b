/* attend_work.h - private to attend*.c: how a call is split into items (sequence, KV head, block of queries, run of
 * columns), and the state of a worker. */
#ifndef KVC_ATTEND_WORK_H
#define KVC_ATTEND_WORK_H

#include "attend.h"

#include <stdatomic.h>

/* Buffered softmax weights by column and row, relative to m (-inf: none). */
typedef struct kvc_kept {
    float *m;       /* [columns][rows] */
    float *exact;   /* [columns][rows][kept_width], fp32: if K is raw */
    uint16_t *half; /* the same, fp16: for other formats of K */
} kvc_kept;

typedef struct kvc_job {
    const kvc_call *call;
    int64_t group, block_tokens, blocks; /* GQA group size; tokens per block; blocks of the longest (sequence, head) */
    int64_t columns;                     /* of the longest sequence */
    int64_t items;
    int64_t parts;      /* items of sequences with several runs, whose results are merged */
    int64_t together;   /* number of heads whose items are interleaved (attend_order.c) */
    atomic_llong *next; /* number of items claimed so far */
    /* Accumulated attention (see attend_accumulated.c), where all sequences have equally many runs: buffers of all
     * blocks if these are several, and sums over blocks. */
    kvc_kept kept;
    int64_t kept_width;
    atomic_llong *total; /* [B, H, accumulated_width] in fixed point; NULL for a single block */
} kvc_job;

/* An item: its sequence, head, block of queries and run of columns. */
typedef struct kvc_place {
    const kvc_job *job;
    const kvc_row *row;
    int64_t item, b, h, group; /* group: index of the (sequence, head, block) that its runs share */
    int64_t run, runs, part;   /* which of the runs; part: index of the first one's partial result */
    int64_t t0, tokens;        /* first query token and number of query tokens of the block */
    int64_t begin, end;        /* columns of the run */
    int64_t columns;           /* of the sequence */
    int64_t stored_columns;    /* the rest are own tokens in temporary pages */
} kvc_place;

/* A page as seen by an item. */
typedef struct kvc_view {
    int64_t item, column, lane; /* lane: index among interleaved items */
    bool last;                  /* last page of the item; an item without pages has one empty view */
    /* index of its first token; number of tokens. If n <= 0, the other fields are left from the previous view. */
    int64_t first, n;
    int64_t entry; /* for stored columns */
    const uint8_t *data;
    int key, value;
    int64_t page_size; /* according to its layout */
    kvc_layout layout;
} kvc_view;

/* A page of latents prepared for attention: the rotary part laid out as K, the latents as V. Both point into `room`, or
 * into the page for data that is the same in both layouts. */
typedef struct kvc_latent {
    kvc_side rotary, values;
    kvc_query query;  /* of the rotary part */
    float *s;         /* scores of the rotary part */
    float *mean;      /* [Dk] mean of the page, if the format has one; else NULL */
    float *tile;      /* one tile of rows */
    float *mean_room; /* [Dk] */
    uint8_t *room[2], *meta;
    bool packed, rotary_packed; /* if set, the panels below are used instead of the fields above */
    kvc_panel keys, rotary_keys, sums;
    uint8_t *panel_room[3];
} kvc_latent;

typedef struct kvc_work {
    kvc_place at;
    int64_t rows; /* in the block; row = t * G + g */
    kvc_query query;
    int64_t loaded;          /* 1 + the group whose queries are loaded and finite; 0: none */
    float *s;                /* scores of a page */
    float *o[KVC_SPACES];    /* [rows][Dv] for spaces used by the call and KVC_PLAIN, else NULL */
    bool summed[KVC_SPACES]; /* whether o[space] has any contribution */
    float *m, *l;            /* [rows], rounded up to a multiple of 16 */
    kvc_affine affine[2];    /* unpacked K and V of a page, for formats without kernels of their own */
    uint8_t *words[2];
    uint8_t *wide[3]; /* K and V of a page as wide kernels multiply them, and the rotary part of latents */
    kvc_kept kept;
    kvc_latent latent;
} kvc_work;

/* Maximum number of heads that a worker interleaves. */
enum { KVC_TOGETHER = 8 };
/* Lays out the workspace of a worker for n interleaved items in `block` and returns its size in floats. block = NULL
 * only computes the size. Per-page buffers are shared by the items. */
int64_t kvc_work_lay_out(kvc_work *w, int64_t n, const kvc_job *job, float *block);

/* Columns of a sequence that attention reads, including temporary own pages. */
int64_t kvc_item_columns(const kvc_call *call, const kvc_row *row);
/* attend_view.c: sets first and n, and the formats if n > 0. Returns n > 0. */
bool kvc_view_place(const kvc_place *p, int64_t c, kvc_view *v);
/* Sets the complete view; v is the previous view or zero (its layout is reused if the formats match). Returns n > 0.
 * kvc_in_sight: whether any query of the block may see a token of it. */
bool kvc_view_at(const kvc_place *p, int64_t c, kvc_view *v);
bool kvc_in_sight(const kvc_place *p, const kvc_view *v);
/* kvc_all_seen: whether every row of the block sees every token of the page. kvc_look: which tokens rows [r0, r0 + n)
 * see, and how many; false if none sees any. */
bool kvc_all_seen(const kvc_place *p, const kvc_view *v);
bool kvc_look(const kvc_place *p, const kvc_view *v, int64_t r0, int64_t n, uint64_t bits[][KVC_WORDS], int64_t *sees);
/* Moves p to an item of the same or a later sequence. */
void kvc_place_at(kvc_place *p, int64_t item);

/* attend_order.c: iterates over the pages of a worker's items in processing order, KVC_AHEAD pages ahead for
 * prefetching. One page ahead is not enough where memory latency exceeds the arithmetic of a page. */
enum { KVC_AHEAD = 2, KVC_AHEAD_PAGES = 4 };
typedef struct kvc_ahead {
    kvc_place places[KVC_TOGETHER];  /* by lane */
    int64_t at, end, b;              /* claimed range of items; sequence of the first */
    int64_t lane, first, last;       /* next lane; range of lanes in progress */
    int64_t step, steps;             /* current column of their runs; length of the longest */
    int64_t share;                   /* this worker's share of job->items if all were equally fast */
    kvc_view pages[KVC_AHEAD_PAGES]; /* ring buffer */
    int64_t page;
} kvc_ahead;
void kvc_ahead_begin(kvc_ahead *x, const kvc_job *job, int64_t share);
/* The next page (n = 0: nothing to do); NULL after the last item. distance: bytes to the page whose codes the kernels
 * should prefetch, which has the same layout; 0: none. */
const kvc_view *kvc_ahead_next(kvc_ahead *x, ptrdiff_t *distance);

/* Moves to an item: loads and prepares its queries, sets m = -inf and l = 0 (NaN if q is not finite). */
void kvc_work_begin(kvc_work *w, int64_t item);
/* attend_latent.c: allocates buffers from `block`; prepares a page of n tokens; adds its mean latent to o, weighted by
 * p. */
void kvc_latent_lay_out(kvc_work *w, float *block, int64_t *used);
void kvc_latent_begin(kvc_work *w, const kvc_side *key, const kvc_side *value, int64_t n);
void kvc_latent_add_mean(const kvc_work *w, const float *p, int64_t ld, int64_t rows, int64_t n, float *o);
/* Takes `floats` floats (rounded up to a multiple of 16) from the workspace. block = NULL: only counts. */
float *kvc_cut(float *block, int64_t *used, int64_t floats);

/* Panel kernels for latents, if the block has enough rows to justify packing and the level has no wide kernels. */
static inline const kvc_panel_kernels *kvc_panel_kernels_of(const kvc_work *w)
{
    const kvc_kernels *kernels = w->at.job->call->kernels;
    bool many = w->at.job->block_tokens * w->at.job->group > KVC_ROWS;
    return w->at.job->call->a->latent && many && !kernels->wide ? kernels->panel : NULL;
}

/* Updates o, m, l of all rows of the block with a page. ahead: see kvc_ahead_next. */
void kvc_page_attend(kvc_work *w, const kvc_view *v, ptrdiff_t ahead);

/* attend_accumulated.c: buffers for accumulated attention: of a call, of a worker, of the item in block `group`;
 * kvc_kept_of: of a row and column. */
kvc_status kvc_accumulated_begin(kvc_job *job);
void kvc_accumulated_end(kvc_job *job);
kvc_status kvc_kept_begin(kvc_work *w);
void kvc_kept_end(kvc_work *w);
void kvc_kept_at(kvc_work *w, int64_t group);
static inline int64_t kvc_block_rows(const kvc_job *job) { return job->block_tokens * job->group; }
static inline kvc_kept kvc_kept_from(const kvc_kept *room, int64_t row, int64_t width)
{
    return (kvc_kept){room->m + row, room->exact + row * width, room->half + row * width};
}
static inline kvc_kept kvc_kept_of(const kvc_work *w, int64_t c, int64_t row)
{
    return kvc_kept_from(&w->kept, c * kvc_block_rows(w->at.job) + row, w->at.job->kept_width);
}
/* Adds the item's weights to a->accumulated. Requires lse. */
void kvc_accumulate(kvc_work *w);

#endif
