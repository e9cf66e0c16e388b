/* table_evict.h - private to table_evict*.c: an eviction under way, and the line that is being worked on. */
#ifndef KVC_TABLE_EVICT_H
#define KVC_TABLE_EVICT_H

#include "table.h"

/* Pages that cannot be changed are written anew when more than 1/4 of them is dead, until at most 1/16 is. */
#define KVC_MERGE_ABOVE 4
#define KVC_MERGE_UNTIL 16

typedef struct kvc_offsets {
    int64_t *at, n, capacity;
} kvc_offsets;

typedef struct kvc_eviction {
    kvc_table after;            /* the arrays that will be; its version, pool, plan mean nothing */
    kvc_offsets added, dropped; /* given back on rollback, on commit */
    kvc_move *moves;
    int64_t n_moves, move_capacity;
    int64_t rewritten; /* tokens of pages that are written anew */
    bool lost;         /* a token was live and will not be */
} kvc_eviction;

typedef struct kvc_evict_page {
    int64_t entry, to, column; /* where it lies; where what is left of it will; its column now */
    int64_t formats;           /* that it shall have, as in entries */
    int32_t *place;            /* [page_size] which stored token will be there, -1 dead */
    int64_t live;
    bool done, fresh; /* looked at; `to` has none of its tokens yet */
} kvc_evict_page;

/* A line at work. foreign: it is head `head` of a group of pages that parts now: nothing can stay where it is. */
typedef struct kvc_line {
    const kvc_table *t;
    kvc_eviction *e;
    int64_t line, from, head; /* of the table that will be; of the table that is */
    bool foreign;
    int64_t sinks, closed, open, tail; /* tokens; pages; pages; tokens left in them */
    kvc_evict_page sink, *pages, **sorted;
    int32_t *places, *merged, *order; /* [columns * page_size]; order also of sinks */
    int64_t *merged_to;
} kvc_line;

kvc_status kvc_offsets_push(kvc_offsets *list, int64_t offset);
/* A page (of all heads that an entry will name) in the formats of entry `like`. */
kvc_status kvc_line_new_page(kvc_line *line, int64_t c, int64_t like, int64_t *entry);
/* keep: [stored tokens of the line that is]; formats: see kvc_demotion, [columns], or NULL. */
kvc_status kvc_line_evict(kvc_line *line, const uint8_t *keep, const int32_t *formats, int64_t columns);

#endif
