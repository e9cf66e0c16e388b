/* attend.h - private to attend*.c: the state of one attention call. */
#ifndef KVC_ATTEND_H
#define KVC_ATTEND_H

#include "base/dispatch.h"
#include "base/util.h"
#include "page_access.h"

#define KVC_STREAM ((int64_t)8 << 20) /* approximate size of K and V as fp32 above which they exceed private caches */

/* Layout of the tokens of one (sequence, table row). Index i < stored is a stored token; own token j has index
 * stored + j. `contiguous`: slot of index i is first + i. */
typedef struct kvc_row {
    int64_t stored, own;
    int64_t first;         /* slot of index 0 (contiguous) */
    const int32_t *own_at; /* [own] which of the call's T tokens; NULL: own token j is token j */
    const int32_t *slots;  /* [stored] or NULL */
    bool contiguous;
    /* A raw page that this call fills and then seals: used in place of its column until the call returns. */
    int64_t filling, filling_column; /* entry or KVC_NONE */
    /* The sequence's part of the call, the same in all its rows. */
    int32_t *flag;
    int64_t token, own_slot;      /* its first token in q, k, v and out; slot of that of k */
    int64_t queries, query_slot;  /* how many, slot of the first */
    int64_t own_columns;          /* pages per head in own_pages, after own_page pages of other sequences */
    int64_t own_page, write_item; /* totals of the preceding sequences */
    int64_t runs;                 /* into which attend.c splits the columns of the sequence */
    int64_t attend_group, attend_item, attend_part; /* totals again, see kvc_place */
} kvc_row;

/* A sequence of a call whose sequences have different numbers of tokens (kvc_attend_varlen). */
typedef struct kvc_segment {
    int64_t sequence, token; /* for error messages; its first token in q, k, v and out */
    int64_t own, queries;
    int32_t *flag; /* set to 1 if there is NaN or Inf in k or v; the output is NaN then. NULL: an error */
} kvc_segment;

typedef struct kvc_call {
    const kvc_attend_args *a; /* `args` with checked copies of the caller's index arrays */
    kvc_attend_args args;
    int64_t *indices, *seals;
    const kvc_kernels *kernels;
    kvc_row *rows;                                              /* [B, Ht] */
    int32_t *own_list;                                          /* [B, T] storage for own_at, or NULL */
    const kvc_segment *segments;                                /* [B], or NULL: all have T tokens and Tq queries */
    int64_t lse_stride[2];                                      /* B, Hq */
    int64_t write_items, attend_items, most_queries, own_bytes; /* approximate size of k and v as fp32 */
    bool own_in_pages; /* every own token is on a raw page, which is exact: attend to the pages only */
    bool key_spaces[KVC_SPACES], value_spaces[KVC_SPACES], limbs, halves,
        affine;               /* required by the formats in the call */
    uint8_t *own_pages;       /* otherwise: own K/V, copied to temporary raw pages */
    int own_raw;              /* raw format of the call's k and v */
    const float *feedback[2]; /* [0]: of V, [1]: of K; see kvc_attend_feedback */
} kvc_call;

/* Dims of the output. */
static inline int64_t kvc_out_dim(const kvc_call *call)
{
    return call->a->latent ? call->a->store.key_dim : call->a->store.value_dim;
}
static inline const kvc_row *kvc_call_row(const kvc_call *call, int64_t b, int64_t h)
{
    int64_t heads = call->a->store.table_heads;
    return &call->rows[b * heads + (heads == 1 ? 0 : h)];
}
/* As kvc_entry_at and kvc_page_at, but use the row's filling page in place of its column. */
static inline int64_t kvc_call_entry_at(const kvc_call *call, int64_t b, int64_t h, int64_t c)
{
    const kvc_row *row = kvc_call_row(call, b, h);
    if (row->filling != KVC_NONE && row->filling_column == c) return row->filling;
    return kvc_entry_at(&call->a->store, b, h, c);
}
static inline kvc_page kvc_call_page_at(const kvc_call *call, int64_t b, int64_t h, int64_t c)
{
    const kvc_store *s = &call->a->store;
    return kvc_page_of(s, kvc_call_entry_at(call, b, h, c), h, kvc_column_layout(c, s->sinks, s->page_size));
}
static inline int64_t kvc_slot_of(const kvc_row *row, int64_t i)
{
    if (row->contiguous) return row->first + i;
    if (i >= row->stored) return row->own_slot + (row->own_at ? row->own_at[i - row->stored] : i - row->stored);
    return row->slots ? row->slots[i] : row->first + i;
}

/* attend_check.c: checks the score arguments (scale, window, softcap), on a CPU or a GPU. */
kvc_status kvc_scores_check(int64_t window, float scale, float softcap, const char *op);
/* attend_check.c: fills `call` (allocates rows, own_list) or fails. Nothing is written before it succeeds. */
kvc_status kvc_call_begin(kvc_call *call, const kvc_attend_args *args, const kvc_segment *segments);
void kvc_call_end(kvc_call *call);
/* attend_write.c: packs own pages where needed, writes own tokens after the stored ones, seals pages. */
kvc_status kvc_call_write(kvc_call *call);

/* Always returns KVC_E_MEMORY. */
kvc_status kvc_no_workspace(const char *op);
/* attend.c: runs body over [0, n), in parallel if `bytes` of memory traffic justify waking threads. */
void kvc_run(const kvc_exec *exec, int64_t n, int64_t bytes, void (*body)(int64_t, int64_t, void *), void *context);
/* The sequence of an item, searched from b on. first: the field with the total of items before. */
#define KVC_SEEK(call, b, item, first)                                                                                 \
    while ((b) + 1 < (call)->a->store.batch && kvc_call_row(call, (b) + 1, 0)->first <= (item)) (b)++
/* Writes, attends and finishes the call. */
kvc_status kvc_call_run(kvc_call *call);

#endif
