/* attend.h - private to attend*.c: what one call knows about its rows. */
#ifndef KVC_ATTEND_H
#define KVC_ATTEND_H

#include "base/dispatch.h"
#include "base/util.h"
#include "page_access.h"

#define KVC_STREAM ((int64_t)8 << 20) /* bytes of K and V as fp32 that no private cache holds */

/* One (sequence, table row): how its tokens lie. Index i < stored is a stored token; own token j has index
 * stored + j. `contiguous`: slot of index i is first + i. */
typedef struct kvc_row {
    int64_t stored, own;
    int64_t first;         /* slot of index 0 (contiguous) */
    const int32_t *own_at; /* [own] which of the call's T tokens; NULL: own token j is token j */
    const int32_t *slots;  /* [stored] or NULL */
    bool contiguous;
    /* A raw page that this call fills and seals: it stands for its column until the call is over. */
    int64_t filling, filling_column; /* entry or KVC_NONE */
} kvc_row;

typedef struct kvc_call {
    const kvc_attend_args *a;
    const kvc_kernels *kernels;
    kvc_row *rows;     /* [B, Ht] */
    int32_t *own_list; /* [B, T] storage for own_at, or NULL */
    bool own_in_pages; /* every own token falls on a raw page: pages are exact, attend to them alone */
    bool rotated_key, rotated_value, limbs, halves, affine; /* what the formats that it meets need */
    /* otherwise own K/V in raw pages of their own: [B, H, own_columns] pages */
    uint8_t *own_pages;
    int64_t own_columns;
    int own_raw; /* raw format of the call's k and v */
} kvc_call;

static inline const kvc_row *kvc_call_row(const kvc_call *call, int64_t b, int64_t h)
{
    int64_t heads = call->a->store.table_heads;
    return &call->rows[b * heads + (heads == 1 ? 0 : h)];
}
/* As kvc_entry_at and kvc_page_at: the row's filling page stands for its column. */
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
static inline int64_t kvc_slot_of(const kvc_call *call, const kvc_row *row, int64_t i)
{
    if (row->contiguous) return row->first + i;
    if (i >= row->stored) return call->a->seen + (row->own_at ? row->own_at[i - row->stored] : i - row->stored);
    return row->slots ? row->slots[i] : row->first + i;
}

/* attend_check.c: fills `call` (allocates rows, own_list) or fails; nothing is written before it has passed. */
kvc_status kvc_call_begin(kvc_call *call, const kvc_attend_args *args);
void kvc_call_end(kvc_call *call);
/* attend_write.c: packs own pages where needed, writes own tokens behind the stored ones, seals. */
kvc_status kvc_call_write(kvc_call *call);

/* Always KVC_E_MEMORY. */
kvc_status kvc_no_workspace(const char *op);
/* attend.c: body over [0, n), in parallel if touching `bytes` is worth waking threads for. */
void kvc_run(const kvc_exec *exec, int64_t n, int64_t bytes, void (*body)(int64_t, int64_t, void *), void *context);
/* Bytes of the call's own k and v, about. */
static inline int64_t kvc_own_bytes(const kvc_attend_args *a)
{
    return a->store.batch * a->store.heads * a->T * (a->store.key_dim + a->store.value_dim) * 4;
}

#endif
