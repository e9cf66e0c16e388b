/* attend.h - private to attend*.c: what one call knows about its rows. */
#ifndef KVC_ATTEND_H
#define KVC_ATTEND_H

#include "codec/codec.h"
#include "base/dispatch.h"
#include "base/status.h"
#include "base/util.h"

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

/* Entry of (b, h, column) resolved: the page of this head. */
typedef struct kvc_page {
    uint8_t *data;
    int key, value;
    int64_t page_size; /* that it is laid out for */
} kvc_page;

/* Columns that n tokens reach into. */
static inline int64_t kvc_columns_used(const kvc_store *s, int64_t n)
{
    return n == 0 ? 0 : 1 + kvc_column(n - 1, s->sinks, s->page_size);
}

/* The page of one head that entry `entry` names. */
kvc_page kvc_page_of(const kvc_store *store, int64_t entry, int64_t h, int64_t page_size);
/* The page at column c of sequence b, head h; within a call the row's filling page stands for its column. */
kvc_page kvc_page_at(const kvc_store *store, int64_t b, int64_t h, int64_t c);
int64_t kvc_call_entry_at(const kvc_call *call, int64_t b, int64_t h, int64_t c);
kvc_page kvc_call_page_at(const kvc_call *call, int64_t b, int64_t h, int64_t c);
static inline const kvc_row *kvc_call_row(const kvc_call *call, int64_t b, int64_t h)
{
    int64_t heads = call->a->store.table_heads;
    return &call->rows[b * heads + (heads == 1 ? 0 : h)];
}
kvc_side kvc_page_key(const kvc_store *store, const kvc_page *page);
kvc_side kvc_page_value(const kvc_store *store, const kvc_page *page);
int64_t kvc_slot_of(const kvc_call *call, const kvc_row *row, int64_t index);

/* attend_check.c: fills `call` (allocates rows, own_list) or fails; nothing is written before it has passed. */
kvc_status kvc_call_begin(kvc_call *call, const kvc_attend_args *args);
void kvc_call_end(kvc_call *call);
/* For the texts: `op` is the caller, `what` holds the entry. */
kvc_status kvc_store_check(const kvc_store *store, const char *op);
kvc_status kvc_entry_check(const kvc_store *store, int64_t entry, int64_t c, int64_t page_size, const char *op,
                           const char *what);
/* Two entries whose pages share no bytes? */
kvc_status kvc_apart_check(const kvc_store *store, int64_t from, int64_t to, int64_t page_size, const char *op,
                           const char *what);

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
