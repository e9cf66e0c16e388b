/* page_access.h - looks up pages and their sides in a store's table. Call kvc_store_take first. */
#ifndef KVC_PAGE_ACCESS_H
#define KVC_PAGE_ACCESS_H

#include "base/status.h"
#include "codec/codec.h"

/* The page of one head that an entry names. */
typedef struct kvc_page {
    uint8_t *data;
    int key, value;
    int64_t page_size; /* of its layout */
} kvc_page;

/* Number of columns that n tokens occupy. */
static inline int64_t kvc_columns_used(const kvc_store *s, int64_t n)
{
    return n == 0 ? 0 : 1 + kvc_column(n - 1, s->sinks, s->page_size);
}

/* The entry at column c of sequence b, head h, and its page. */
static inline int64_t kvc_entry_at(const kvc_store *s, int64_t b, int64_t h, int64_t c)
{
    return s->table[(b * s->table_heads + (s->table_heads == 1 ? 0 : h)) * s->columns + c];
}
kvc_page kvc_page_at(const kvc_store *store, int64_t b, int64_t h, int64_t c);
/* The page of head h that `entry` names. */
kvc_page kvc_page_of(const kvc_store *store, int64_t entry, int64_t h, int64_t page_size);
/* K (key = 1) or V of a page, to read and to write. */
kvc_side kvc_side_of(const kvc_store *store, const kvc_page *page, int key);
kvc_room kvc_room_of(const kvc_store *store, const kvc_page *page, int key);

/* Checks everything but the table and its pages. For messages: `op` is the caller, `what` holds the entry. */
kvc_status kvc_store_check(const kvc_store *store, const char *op);
/* Checks the store and copies its rows, and its table as far as `T` more tokens reach, to one block of workspace, which
 * the store names from then on: an index is read from the caller once. */
kvc_status kvc_store_take(kvc_store *store, int64_t T, const char *op, int64_t **indices);
kvc_status kvc_entry_check(const kvc_store *store, int64_t entry, int64_t c, int64_t page_size, const char *op,
                           const char *what);
/* Bytes that an entry refers to: one page per head, or one page. */
int64_t kvc_entry_bytes(const kvc_store *store, int64_t entry, int64_t page_size);
/* True if the pages of two entries do not overlap. */
kvc_status kvc_apart_check(const kvc_store *store, int64_t from, int64_t to, int64_t page_size, const char *op,
                           const char *what);

#endif
