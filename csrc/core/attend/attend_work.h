/* attend_work.h - private to attend*.c: how a call is split into items (sequence, KV head, block of queries, run of
 * columns), and the state of a worker. */
#ifndef KVC_ATTEND_WORK_H
#define KVC_ATTEND_WORK_H

#include "attend.h"

#include <stdatomic.h>

/* Weights of pages by column and row: m that they are relative to (-inf: none), fp32 or fp16. */
typedef struct kvc_kept {
    float *m;       /* [columns][rows] */
    float *exact;   /* [columns][rows][kept_width]: of raw K */
    uint16_t *half; /* the same, of other K */
} kvc_kept;

typedef struct kvc_job {
    const kvc_call *call;
    int64_t group, block_tokens, blocks, runs; /* G; tokens a block; blocks and runs a (sequence, head) */
    int64_t columns;                           /* of the longest sequence */
    int64_t items;
    int64_t together; /* heads whose items lie side by side in the order in which workers take them (attend_order.c) */
    atomic_llong *next; /* items of that order already claimed */
    /* For the mass (see attend_mass.c): room of every block where blocks have several runs, and sums over blocks. */
    kvc_kept kept;
    int64_t kept_width;
    atomic_llong *total; /* [B, H, mass_width]; NULL for a single block */
} kvc_job;

/* An item: its sequence, head, block of queries and run of columns. */
typedef struct kvc_place {
    const kvc_job *job;
    const kvc_row *row;
    int64_t item, b, h, group; /* group: of runs over one block of queries of (b, h) */
    int64_t t0, tokens;        /* first query token, tokens of the block */
    int64_t begin, end;        /* columns of the run */
    int64_t columns;           /* of the sequence */
    int64_t stored_columns;    /* of them; then own ones in pages of their own */
} kvc_place;

/* A page as seen by an item. */
typedef struct kvc_view {
    int64_t item, column, lane; /* lane: group % together */
    bool last;                  /* of the item's pages; an item without pages has one that holds nothing */
    int64_t first, n; /* index of its first token, tokens stored; n <= 0: none, and the rest is the view's before */
    int64_t entry;    /* of stored columns */
    const uint8_t *data;
    int key, value;
    int64_t page_size; /* of its layout */
    kvc_layout layout;
} kvc_view;

/* A page of latents as attention takes it: the rotary part laid out as K, the latents as V; both point into `room`, or, what
 * both sides have alike, into the page. */
typedef struct kvc_latent {
    kvc_side rotary, values;
    kvc_query query;  /* of the rotary part */
    float *s;         /* its scores */
    float *mean;      /* [Dk] of the page, where the format has one; else NULL */
    float *tile;      /* a tile of rows */
    float *mean_room; /* [Dk] */
    uint8_t *room[2], *meta;
    bool packed, rotary_packed; /* used instead of the fields above: */
    kvc_panel keys, rotary_keys, sums;
    uint8_t *panel_room[3];
} kvc_latent;

typedef struct kvc_work {
    kvc_place at;
    int64_t rows; /* of the block; row = t * G + g */
    kvc_query query;
    int64_t loaded;          /* the group whose queries are loaded, all finite, + 1 */
    float *s;                /* scores of a page */
    float *o[KVC_SPACES];    /* [rows][Dv]; of spaces that the call meets and KVC_PLAIN, else NULL */
    bool summed[KVC_SPACES]; /* is there anything in it? */
    float *m, *l;            /* [rows] up to a multiple of 16 */
    kvc_affine affine[2];    /* K and V of a page, for formats without kernels, and room for their codes */
    uint8_t *words[2];
    kvc_kept kept;
    kvc_latent latent;
} kvc_work;

/* Number of heads whose items a worker interleaves. */
enum { KVC_TOGETHER = 8 };
/* Floats of a worker's block for n items at a time; with a block, cuts it up. What a page needs they share. */
int64_t kvc_work_lay_out(kvc_work *w, int64_t n, const kvc_job *job, float *block);

/* Columns of a sequence that hold something for attention, own pages included. */
int64_t kvc_item_columns(const kvc_call *call, const kvc_row *row);
/* attend_view.c: only first, n, and if n is above 0 the formats of a view; false if it is not. */
bool kvc_view_place(const kvc_place *p, int64_t c, kvc_view *v);
/* The whole view, of which v is an earlier one or zero (a layout is kept where formats are the same); false if n is not above
 * 0. Whether a query of the block may see a token of it. */
bool kvc_view_at(const kvc_place *p, int64_t c, kvc_view *v);
bool kvc_in_sight(const kvc_place *p, const kvc_view *v);
/* Whether every row of the block sees every token of the page; which tokens rows [r0, r0 + n) see, and how many (false: none
 * sees any). */
bool kvc_all_seen(const kvc_place *p, const kvc_view *v);
bool kvc_look(const kvc_place *p, const kvc_view *v, int64_t r0, int64_t n, uint64_t bits[][KVC_WORDS], int64_t *sees);
/* Moves p to an item of the same or a later sequence. */
void kvc_place_at(kvc_place *p, int64_t item);

/* attend_order.c: the pages of the items that a worker takes, in the order in which they are attended to, and KVC_AHEAD more,
 * which are on their way from memory. One page ahead is too few where memory takes longer than a page's arithmetic. */
enum { KVC_AHEAD = 2, KVC_AHEAD_PAGES = 4 };
typedef struct kvc_ahead {
    kvc_place places[KVC_TOGETHER];  /* by lane */
    int64_t at, end;                 /* taken, of the order */
    int64_t lane, first, last;       /* that is next; those of the items under way */
    int64_t step, steps;             /* column of their runs, of the longest of them */
    int64_t share;                   /* of job->items, that would be this worker's if all were as fast */
    kvc_view pages[KVC_AHEAD_PAGES]; /* a ring */
    int64_t page;
} kvc_ahead;
void kvc_ahead_begin(kvc_ahead *x, const kvc_job *job, int64_t share);
/* The next page (n = 0: nothing to do); NULL after the last item. distance: bytes from it to the page whose
 * codes its kernels prefetch, laid out the same; 0: none. */
const kvc_view *kvc_ahead_next(kvc_ahead *x, ptrdiff_t *distance);

/* Where w is: loads and prepares q; m = -inf, l = 0 (NaN where q is). */
void kvc_work_begin(kvc_work *w, int64_t item);
/* attend_latent.c: room for a page, cut off `block`; a page of n tokens laid out for attention; adds its mean latent to o by
 * the weights p. */
void kvc_latent_lay_out(kvc_work *w, float *block, int64_t *used);
void kvc_latent_begin(kvc_work *w, const kvc_side *key, const kvc_side *value, int64_t n);
void kvc_latent_add_mean(const kvc_work *w, const float *p, int64_t ld, int64_t rows, int64_t n, float *o);
/* Takes `floats` floats (a multiple of 16) from the workspace; only counts them while there is none. */
float *kvc_cut(float *block, int64_t *used, int64_t floats);

/* Kernels for panels of latents, if the block has rows enough to pack for and the level nothing better. */
static inline const kvc_panel_kernels *kvc_panel_kernels_of(const kvc_work *w)
{
    const kvc_kernels *kernels = w->at.job->call->kernels;
    bool many = w->at.job->block_tokens * w->at.job->group > KVC_ROWS;
    return w->at.job->call->a->latent && many && !kernels->wide ? kernels->panel : NULL;
}

/* The page's part in o, m, l of all rows of the block. ahead: see kvc_ahead_next. */
void kvc_page_attend(kvc_work *w, const kvc_view *v, ptrdiff_t ahead);

/* attend_mass.c: the mass of a call; of a worker; of its item, in block `group`; one row at a column. */
kvc_status kvc_mass_begin(kvc_job *job);
void kvc_mass_end(kvc_job *job);
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
/* Adds what w's block kept to a->mass; its lse is known. */
void kvc_mass_of(kvc_work *w);

#endif
