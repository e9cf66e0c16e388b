/* table_evict.h - private to table_evict*.c: an eviction in progress, and its current line. */
#ifndef KVC_TABLE_EVICT_H
#define KVC_TABLE_EVICT_H

#include "table.h"

/* Immutable pages are rewritten when more than 1/4 of their slots are dead, until at most 1/16 are. */
#define KVC_MERGE_ABOVE 4
#define KVC_MERGE_UNTIL 16

typedef struct kvc_offsets {
    int64_t *at, n, capacity;
} kvc_offsets;

typedef struct kvc_eviction {
    kvc_table after;            /* the new arrays; version, pool and plan are unused */
    kvc_offsets added, dropped; /* released on rollback; on commit */
    kvc_move *moves;
    int64_t n_moves, move_capacity;
    int64_t rewritten; /* tokens of rewritten pages */
    bool lost;         /* a live token is dropped */
} kvc_eviction;

typedef struct kvc_evict_page {
    int64_t entry, to, column; /* its page; page for its remaining tokens; its current column */
    int64_t formats;           /* target formats, encoded as in entries */
    int32_t *place;            /* [page_size] stored token for each slot, -1: dead */
    int64_t live;
    bool done, fresh; /* visited; `to` has none of its tokens yet */
} kvc_evict_page;

/* The current line. foreign: head `head` of a page group that is being split, so no token can stay in place. */
typedef struct kvc_line {
    const kvc_table *t;
    kvc_eviction *e;
    int64_t line, from, head; /* line in the new table; line and head in the current one */
    bool foreign;
    int64_t sinks, closed, open, tail; /* tokens; pages; pages; tokens left in them */
    kvc_evict_page sink, *pages, **sorted;
    int32_t *places, *merged, *order; /* [columns * page_size]; order includes sinks */
    int64_t *merged_to;
} kvc_line;

kvc_status kvc_offsets_push(kvc_offsets *list, int64_t offset);
/* A page (of all heads that an entry will name) in the formats of entry `like`. */
kvc_status kvc_line_new_page(kvc_line *line, int64_t c, int64_t like, int64_t *entry);
/* keep: [stored tokens of the current line]; formats: see kvc_demotion, [columns], or NULL. */
kvc_status kvc_line_evict(kvc_line *line, const uint8_t *keep, const int32_t *formats, int64_t columns);

#endif
