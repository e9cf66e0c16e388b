/* table.h - private to table*.c. */
#ifndef KVC_TABLE_H
#define KVC_TABLE_H

#include "base/alloc.h"
#include "base/util.h"

/* One cell that a plan changed. The table owns the reference to `now`, the plan the one to `before`. */
typedef struct kvc_change {
    int64_t cell, before;
} kvc_change;

struct kvc_plan {
    struct kvc_eviction *eviction; /* NULL: an append */
    int64_t T;
    int64_t *own;   /* [B] real tokens */
    uint8_t *real;  /* [B, T] or NULL */
    int64_t *seals; /* [n_seals, 2] */
    kvc_change *changes;
    int32_t *slots; /* sidecar that commit installs, or NULL */
    int64_t slot_capacity;
    float *scores; /* the same for scores */
    int64_t score_capacity;
    int64_t n_seals, seal_capacity, n_changes, change_capacity;
};

/* table_plan.c, table_evict_plan.c: apply or undo a plan. For kvc_table_commit and _rollback. */
void kvc_append_end(kvc_table *table, bool commit);
void kvc_eviction_end(kvc_table *table, bool commit);

/* A counted array of `count` elements. */
kvc_status kvc_array_new(int64_t count, int64_t size, void *out);
void kvc_table_release_arrays(kvc_table *table);
/* KVC_E_VALUE while an append or eviction is in progress. */
kvc_status kvc_table_no_plan(const kvc_table *table, const char *what);
/* Bytes of the pages that an entry names at column c in the given formats. */
int64_t kvc_group_bytes(const kvc_table *table, int64_t c, int key, int value);
/* Formats in which column c is sealed. */
kvc_span kvc_table_sealed(const kvc_table *table, int64_t c);
/* Lines of the table (a row of entries each), and the heads that an entry names. */
static inline int64_t kvc_lines(const kvc_table *t) { return t->batch * t->table_heads; }
static inline int64_t kvc_entry_heads(const kvc_table *t) { return t->table_heads == 1 ? t->spec.heads : 1; }
static inline bool kvc_table_stays_raw(const kvc_table *t, int64_t c)
{
    kvc_span to = kvc_table_sealed(t, c);
    return to.key == t->spec.raw && to.value == t->spec.raw;
}
static inline int64_t kvc_table_columns(const kvc_table *t, int64_t n)
{
    return n == 0 ? 0 : 1 + kvc_column(n - 1, t->spec.sinks, t->spec.page_size);
}
static inline bool kvc_entry_is_raw(int64_t entry)
{
    return kvc_format_is_raw(kvc_entry_key(entry)) && kvc_format_is_raw(kvc_entry_value(entry));
}
/* A fresh sidecar of at least `capacity` tokens a row, holding the slots of all stored tokens. */
kvc_status kvc_table_new_slots(const kvc_table *table, int64_t capacity, int32_t **slots);
/* The sidecar becomes `slots` (owned; NULL none). */
void kvc_table_set_slots(kvc_table *table, int32_t *slots, int64_t capacity);
void kvc_table_drop_plain_slots(kvc_table *table);
/* The same for scores; new places are 0. */
kvc_status kvc_table_new_scores(const kvc_table *table, int64_t capacity, float **scores);
void kvc_table_set_scores(kvc_table *table, float *scores, int64_t capacity);

#endif
