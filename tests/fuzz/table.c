/* table.c - a table restores the contents of a hostile file, and continues: appends, evictions, copies, failing
 * allocations. Whatever is accepted must work; nothing is lost or freed twice. */
#include "input.h"

enum { ROWS = 3, COLUMNS = 8, TOKENS = 200 };

static int64_t hostile_entry(input *in, kvc_pool *pool, const kvc_spec *s, int64_t heads, int64_t c)
{
    int64_t offset, tokens = c == 0 && s->sinks == 0 ? 16 : kvc_column_layout(c, s->sinks, s->page_size);
    int formats[] = {s->raw, s->key, s->value, (int)below(in, KVC_FORMATS + 1)};
    uint8_t how = byte(in);
    int key = how < 128 ? s->key : formats[how & 3], value = how < 128 ? s->value : formats[how >> 2 & 3];
    if (how < 64 || c == 0) key = value = s->raw;
    if (how == 255) return number(in);
    if (kvc_format_check(key, s->key_dim) != KVC_OK || kvc_format_check(value, s->value_dim) != KVC_OK)
        return kvc_entry(0, key, value);
    int64_t bytes = heads * kvc_page_bytes(key, value, s->key_dim, s->value_dim, tokens);
    if (how == 254) bytes = 64 + bytes / 2;
    OK(kvc_pool_alloc(pool, bytes, &offset));
    memset(kvc_pool_base(pool) + offset, how, (size_t)bytes);
    return kvc_entry(offset, key, value);
}

/* Restores from the input; returns whether the table accepted it. All references are released or taken over. */
static bool restore(input *in, kvc_table *t)
{
    int64_t entries[ROWS * 4 * COLUMNS], rows[ROWS * 4 * 2], H = t->spec.heads;
    int32_t slots[ROWS * 4 * TOKENS];
    float scores[ROWS * 4 * TOKENS];
    kvc_contents x = {.batch = below(in, 8) ? t->batch : below(in, ROWS + 1), .table_heads = below(in, 3) ? 1 : H};
    x.columns = below(in, COLUMNS + 1), x.seen = below(in, 8) ? byte(in) : number(in);
    x.entries = entries, x.rows = rows;
    if (below(in, 2)) x.slots = slots, x.slot_capacity = below(in, TOKENS);
    if (below(in, 8) == 0 || t->scored) x.scores = scores, x.score_capacity = below(in, TOKENS);
    for (int64_t i = 0; i < ROWS * 4; i++) {
        rows[2 * i] = below(in, 16) ? below(in, 180) : number(in);
        rows[2 * i + 1] = below(in, 4) ? 0 : number(in);
    }
    for (int64_t i = 0; i < ROWS * 4 * TOKENS; i++) {
        slots[i] = in->at < in->end && below(in, 9) == 0 ? (int32_t)number(in) : (int32_t)(i % TOKENS);
        scores[i] = (float)i;
    }
    if (below(in, 16) == 1) scores[below(in, 100)] = real_number(in);
    int64_t cells = x.batch * x.table_heads * x.columns;
    for (int64_t i = 0; i < cells; i++)
        entries[i] = hostile_entry(in, t->pool, &t->spec, x.table_heads == 1 ? H : 1, i % x.columns);
    bool made[ROWS * 4 * COLUMNS]; /* entries that are only numbers hold no reference */
    for (int64_t i = 0; i < cells; i++) {
        made[i] = entries[i] >= 0 && entries[i] >> 16 < (int64_t)1 << 40 &&
                  kvc_pool_bytes(t->pool, kvc_entry_offset(entries[i])) > 0;
        for (int64_t j = 0; j < i && made[i]; j++) /* the same page twice: each use has its own reference */
            if (kvc_entry_offset(entries[j]) == kvc_entry_offset(entries[i]) && made[j]) {
                kvc_pool_ref(t->pool, kvc_entry_offset(entries[i]));
                break;
            }
    }
    kvc_alloc_fail_at(below(in, 6) ? 0 : 1 + below(in, 5));
    kvc_status status = kvc_table_restore(t, &x);
    kvc_alloc_fail_at(0);
    for (int64_t i = 0; i < cells; i++) {
        int64_t r = i / x.columns, c = i % x.columns;
        bool used = status == KVC_OK && t->entries[r * t->columns + c] != KVC_NONE;
        if (used) CHECK(t->entries[r * t->columns + c] == entries[i] && made[i]);
        if (made[i] && !used) kvc_pool_unref(t->pool, kvc_entry_offset(entries[i]));
    }
    return status == KVC_OK;
}

static void evict(input *in, kvc_table *t)
{
    int64_t heads = t->table_heads > 1 || below(in, 3) == 0 ? t->spec.heads : 1,
            width = kvc_table_longest(t) + below(in, 3), n, mh;
    uint8_t *keep = calloc((size_t)(t->batch * heads * width) + 1, 1);
    int32_t *formats = calloc((size_t)(t->batch * heads * t->columns) + 1, 4);
    kvc_demotion demotion = {formats, t->columns};
    uint8_t rule = byte(in), seed = byte(in);
    for (int64_t i = 0; i < t->batch * heads * width; i++)
        keep[i] =
            i % width < t->spec.sinks || (uint8_t)(i * 31 + seed * 7) > rule || (in->at < in->end && byte(in) & 1);
    for (int64_t i = 0; i < t->batch * heads * t->columns; i++)
        formats[i] = below(in, 3) ? -1 : (int32_t)below(in, KVC_FORMATS) << 8 | (int32_t)below(in, KVC_FORMATS + 1);
    kvc_status status = kvc_table_plan_evict(t, keep, below(in, 2) ? &demotion : NULL, heads, width);
    if (status == KVC_OK) {
        const kvc_move *moves = kvc_table_moves(t, &n, &mh);
        kvc_store s = kvc_table_store(t);
        s.table_heads = mh == t->spec.heads ? 1 : t->spec.heads;
        s.batch = 0;
        status = kvc_compact(&s, moves, n, NULL);
        if (status == KVC_OK && below(in, 4))
            kvc_table_commit(t);
        else
            kvc_table_rollback(t);
        CHECK(status == KVC_OK || status == KVC_E_MEMORY); /* a planned append can be executed */
    }
    free(keep), free(formats);
}

static void live_on(input *in, kvc_table **table)
{
    kvc_table *t = *table, *other = NULL;
    int64_t index[4], before[4], dropped, width;
    uint8_t real[ROWS * 256];
    float accumulated[4096];
    kvc_alloc_fail_at(below(in, 8) ? 0 : 1 + below(in, 9));
    switch (below(in, 12)) {
    case 0:
    case 1:
    case 2:
        for (size_t i = 0; i < sizeof real; i++) real[i] = (uint8_t)(i * 37 % 5 > 0);
        if (kvc_table_plan(t, below(in, 2) ? below(in, 5) : number(in) % 100,
                           below(in, 2) && t->batch <= ROWS ? real : NULL) == KVC_OK) {
            if (below(in, 4))
                kvc_table_commit(t);
            else
                kvc_table_rollback(t);
        }
        break;
    case 3: kvc_table_crop(t, below(in, 4) ? t->seen - below(in, 40) : number(in)); break;
    case 4:
        for (int i = 0; i < 4; i++) index[i] = below(in, 16) ? below(in, t->batch) : number(in);
        kvc_table_select(t, index, 1 + below(in, ROWS));
        break;
    case 5:
    case 6:
    case 7: evict(in, t); break;
    case 8:
        if (kvc_table_clone(t, &other) == KVC_OK) {
            *table = below(in, 2) ? other : t; /* the page is shared while the other table makes a step */
            kvc_table_plan(*table, 3, NULL);
            kvc_table_commit(*table);
            kvc_table_free(*table == t ? other : t);
        }
        break;
    case 9:
        for (int i = 0; i < 4; i++) before[i] = number(in);
        kvc_table_drop(t, before, below(in, 3) * t->spec.page_size, &dropped);
        break;
    case 10:
        kvc_table_keep_scores(t, below(in, 2));
        for (int i = 0; i < 4096; i++) accumulated[i] = (float)i;
        width = below(in, 255);
        if (t->batch * t->spec.heads * width <= 4096) kvc_table_observe(t, accumulated, width, .5f);
        break;
    default: kvc_table_reset(t, below(in, ROWS + 1));
    }
    kvc_alloc_fail_at(0);
    OK(kvc_pool_check((*table)->pool));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static kvc_pool *pool;
    if (!pool) OK(kvc_pool_new(512 * MB, &pool));
    int64_t alive = kvc_alloc_live();
    input in = {data, data + size};
    kvc_spec s = {.heads = 1 + below(&in, 4), .page_size = 16 * (1 + below(&in, 3)), .sinks = below(&in, 20)};
    s.key_dim = 16 * (1 + below(&in, 3)), s.value_dim = 16 * (1 + below(&in, 3)), s.recent = below(&in, 30);
    s.raw = (int)below(&in, 3), s.key = KVC_INT8 + (int)below(&in, 14), s.value = KVC_INT8 + (int)below(&in, 14);
    s.direct = below(&in, 4) == 0;
    kvc_table *t;
    if (kvc_table_new(pool, &s, 1 + below(&in, ROWS), &t) != KVC_OK) return 0;
    if (below(&in, 4) == 0) OK(kvc_table_keep_scores(t, true));
    if (below(&in, 3)) restore(&in, t);
    for (int step = 0; step < 24 && in.at < in.end && t->seen < 2000; step++) live_on(&in, &t);
    kvc_table_stats stats;
    kvc_table_get_stats(t, &stats);
    kvc_table_free(t);
    kvc_pool_stats left;
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0 && kvc_alloc_live() <= alive + 8); /* the pool's own lists may have grown */
    return 0;
}
