/* test_evict.c - evictions in a random walk of tables, per head, with demotion, and every allocation failing once: the
 * expected contents of each slot of each head, and no lost pages. The walk emulates the ops: a token is a tag. */
#include "harness.h"
#include "table/table.h"

enum { ROWS = 4, HEADS = 3, SLOTS = 700 };

typedef struct model {
    int32_t tag[ROWS][HEADS][SLOTS]; /* 0: none */
} model;

static int64_t line_of(const kvc_table *t, int64_t b, int64_t h)
{
    return b * t->table_heads + (t->table_heads == 1 ? 0 : h);
}

/* Location of a token of head h in the page of an entry; `heads`: number of pages per entry. */
static char *tag_at(const kvc_table *t, int64_t entry, int64_t heads, int64_t h, int64_t layout, int64_t token)
{
    const kvc_spec *s = &t->spec;
    int64_t bytes =
        kvc_page_layout(kvc_entry_key(entry), kvc_entry_value(entry), s->key_dim, s->value_dim, layout).bytes;
    CHECK(token < layout && 4 * token + 4 <= bytes);
    return (char *)kvc_pool_base(t->pool) + kvc_entry_offset(entry) + (heads == 1 ? 0 : h * bytes) + 4 * token;
}

static char *tag_of(const kvc_table *t, int64_t b, int64_t h, int64_t i)
{
    const kvc_spec *s = &t->spec;
    int64_t c = kvc_column(i, s->sinks, s->page_size), heads = kvc_entry_heads(t);
    return tag_at(t, t->entries[line_of(t, b, h) * t->columns + c], heads, h,
                  kvc_column_layout(c, s->sinks, s->page_size), i - kvc_column_first(c, s->sinks, s->page_size));
}

static int64_t slot_of(const kvc_table *t, int64_t line, int64_t i)
{
    return t->slots ? t->slots[line * t->slot_capacity + i] : t->rows[2 * line + 1] + i;
}

static void check_table(const kvc_table *t, const model *m)
{
    CHECK(!t->scores == !t->scored || kvc_table_longest(t) == 0);
    kvc_table_stats stats;
    int64_t live[ROWS], kept = 0;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < HEADS; h++) {
            int64_t line = line_of(t, b, h), found = 0, wanted = 0;
            for (int64_t i = 0; i < t->rows[2 * line]; i++) {
                int64_t slot = slot_of(t, line, i);
                if (slot < 0) continue;
                CHECK(slot < t->seen && m->tag[b][h][slot]);
                CHECK(!memcmp(tag_of(t, b, h, i), &m->tag[b][h][slot], 4));
                if (t->scores) CHECK(t->scores[(b * HEADS + h) * t->score_capacity + i] == (float)m->tag[b][h][slot]);
                found++;
            }
            for (int64_t i = 0; i < t->seen; i++) wanted += m->tag[b][h][i] != 0;
            CHECK(found == wanted);
            kept += found;
        }
    kvc_table_live(t, live);
    kvc_table_get_stats(t, &stats);
    for (int64_t b = 0; b < t->batch; b++) kept -= live[b];
    CHECK(kept == 0 && stats.seen == t->seen);
    OK(kvc_pool_check(t->pool));
}

/* Runs `call` with its first, second, ... allocation failing until it succeeds; a failure must change nothing. */
#define WITH_FAILURES(t, m, call)                                                                                      \
    for (int64_t n_ = 1;; n_++) {                                                                                      \
        kvc_pool_stats before_, after_;                                                                                \
        kvc_pool_get_stats((t)->pool, &before_);                                                                       \
        kvc_alloc_fail_at(n_);                                                                                         \
        kvc_status status_ = (call);                                                                                   \
        kvc_alloc_fail_at(0);                                                                                          \
        if (status_ == KVC_OK) break;                                                                                  \
        kvc_pool_get_stats((t)->pool, &after_);                                                                        \
        CHECK(status_ == KVC_E_MEMORY && n_ < 3000 && before_.used == after_.used && !(t)->plan);                      \
        if (n_ < 20) check_table(t, m);                                                                                \
    }

static void append(kvc_table *t, model *m, bool pads)
{
    static int32_t number;
    int64_t T = random_below(3) ? random_below(6) : random_below(90), n_seals;
    uint8_t mask[ROWS * 90];
    if (t->seen + T > SLOTS) return;
    for (int64_t i = 0; i < t->batch * T; i++) mask[i] = random_below(8) > 0;
    WITH_FAILURES(t, m, kvc_table_plan(t, T, pads ? mask : NULL));
    const int64_t *seals = kvc_table_seals(t, &n_seals);
    int64_t P = t->spec.page_size, heads = kvc_entry_heads(t);
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < HEADS; h++) {
            int64_t i = t->rows[2 * line_of(t, b, h)];
            for (int64_t j = 0; j < T; j++) {
                bool real = !pads || mask[b * T + j];
                m->tag[b][h][t->seen + j] = real ? ++number : 0;
                if (!real) continue;
                int64_t c = kvc_column(i, t->spec.sinks, P), entry = t->entries[line_of(t, b, h) * t->columns + c];
                for (int64_t k = 0; k < n_seals; k++)
                    if (seals[2 * k + 1] == entry) entry = seals[2 * k]; /* written raw, then sealed */
                memcpy(tag_at(t, entry, heads, h, kvc_column_layout(c, t->spec.sinks, P),
                              i - kvc_column_first(c, t->spec.sinks, P)),
                       &number, 4);
                i++;
            }
        }
    for (int64_t k = 0; k < n_seals; k++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < P; i++)
                memcpy(tag_at(t, seals[2 * k + 1], heads, h, P, i), tag_at(t, seals[2 * k], heads, h, P, i), 4);
    kvc_table_commit(t);
    for (int64_t r = 0; t->scores && r < t->batch * HEADS; r++) { /* the score is the tag, too */
        int64_t line = line_of(t, r / HEADS, r % HEADS);
        for (int64_t i = 0; i < t->rows[2 * line]; i++) {
            int64_t slot = slot_of(t, line, i);
            if (slot >= 0) t->scores[r * t->score_capacity + i] = (float)m->tag[r / HEADS][r % HEADS][slot];
        }
    }
}

/* As `kvc_compact` does. */
static void compact(const kvc_table *t)
{
    int64_t n, heads; /* heads: pages per entry of the new table */
    const kvc_move *moves = kvc_table_moves(t, &n, &heads);
    for (const kvc_move *m = moves; m < moves + n; m++)
        for (int64_t h = 0; h < heads; h++) {
            if (m->from_token < 0)
                memcpy(tag_at(t, m->to, heads, h, m->layout, 0), tag_at(t, m->from, heads, h, m->layout, 0),
                       (size_t)(4 * m->layout));
            else
                memcpy(tag_at(t, m->to, heads, h, m->layout, m->to_token),
                       tag_at(t, m->from, heads, h, m->layout, m->from_token), 4);
        }
}

static void evict(kvc_table *t, model *m)
{
    static uint8_t keep[ROWS * HEADS * SLOTS];
    static int32_t formats[ROWS * HEADS * 64];
    int64_t width = kvc_table_longest(t), heads = t->table_heads > 1 || random_below(2) ? HEADS : 1;
    int64_t share = 1 + random_below(8), columns = t->columns < 64 ? t->columns : 64;
    kvc_demotion down = {formats, columns};
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t line = heads == 1 ? b : line_of(t, b, h);
            for (int64_t i = 0; i < width; i++)
                keep[(b * heads + h) * width + i] = i < t->spec.sinks || random_below(8) < share;
            for (int64_t c = 0; c < columns; c++) {
                int64_t entry = t->entries[line * t->columns + c];
                bool small = entry == KVC_NONE || kvc_format_bits(kvc_entry_key(entry)) < 8 ||
                             kvc_format_bits(kvc_entry_value(entry)) < 8;
                formats[(b * heads + h) * columns + c] = small || random_below(3) ? -1
                                                         : random_below(2)        ? KVC_INT8 << 8 | KVC_INT4
                                                                                  : KVC_INT4 << 8 | KVC_INT4;
            }
        }
    WITH_FAILURES(t, m, kvc_table_plan_evict(t, keep, random_below(2) ? &down : NULL, heads, width));
    FAILS(KVC_E_VALUE, "under way", kvc_table_plan_evict(t, keep, NULL, heads, width));
    if (random_below(4) == 0) { /* rolled back before anything was copied */
        kvc_table_rollback(t);
        return;
    }
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < HEADS; h++) {
            int64_t line = line_of(t, b, h);
            for (int64_t i = 0; i < t->rows[2 * line]; i++) {
                int64_t slot = slot_of(t, line, i);
                if (slot >= 0 && !keep[(b * heads + (heads == 1 ? 0 : h)) * width + i]) m->tag[b][h][slot] = 0;
            }
        }
    compact(t);
    kvc_table_commit(t);
}

static void walk(kvc_pool *pool, const kvc_spec *spec, bool pads, bool scored, int steps)
{
    static model m, other, old;
    kvc_table *t, *clone = NULL;
    OK(kvc_table_new(pool, spec, 1 + random_below(ROWS), &t));
    OK(kvc_table_keep_scores(t, scored));
    memset(&m, 0, sizeof m);
    for (int step = 0; step < steps; step++) {
        int64_t what = random_below(24), index[ROWS], n = 1 + random_below(ROWS);
        if (what < 12)
            append(t, &m, pads);
        else if (what < 19)
            evict(t, &m);
        else if (what < 21) {
            WITH_FAILURES(t, &m, kvc_table_crop(t, t->seen - random_below(t->seen / 6 + 1)));
        } else if (what < 22) {
            old = m;
            for (int64_t i = 0; i < n; i++) {
                index[i] = random_below(t->batch);
                memcpy(m.tag[i], old.tag[index[i]], sizeof m.tag[i]);
            }
            OK(kvc_table_select(t, index, n));
        } else if (what < 23) {
            kvc_table_free(clone);
            OK(kvc_table_clone(t, &clone));
            other = m;
        } else if (t->seen > SLOTS / 2)
            OK(kvc_table_reset(t, random_below(ROWS + 1)));
        check_table(t, &m);
        if (clone) check_table(clone, &other);
    }
    kvc_table_free(t);
    kvc_table_free(clone);
    kvc_pool_stats left;
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0 && left.resident == 0);
}

/* A table of two heads with n tokens, all marked to be kept. */
static kvc_table *open_table(kvc_pool *pool, int64_t n, uint8_t *keep)
{
    kvc_spec s = {2, 32, 32, 16, 0, 0, KVC_RAW_F32, KVC_INT8, KVC_INT4, false};
    kvc_table *t;
    OK(kvc_table_new(pool, &s, 1, &t));
    OK(kvc_table_plan(t, n, NULL));
    kvc_table_commit(t);
    memset(keep, 1, (size_t)n);
    return t;
}

/* An open page without evictions stays shared; otherwise only what remains of it is copied. */
static void test_open_page(kvc_pool *pool)
{
    uint8_t keep[10];
    int64_t n, heads;
    for (int64_t gone = -1; gone < 10; gone++) {
        kvc_table *t = open_table(pool, 10, keep), *other;
        int64_t entry = t->entries[1];
        OK(kvc_table_clone(t, &other));
        if (gone >= 0) keep[gone] = 0;
        OK(kvc_table_plan_evict(t, keep, NULL, 1, 10));
        const kvc_move *m = kvc_table_moves(t, &n, &heads);
        bool copied = gone >= 0 && gone < 9; /* evicting the last one leaves the others in place */
        CHECK(n == (copied ? 9 : 0) && kvc_table_evicts(t) == (gone >= 0));
        for (int64_t i = 0; i < n; i++)
            CHECK(m[i].from == entry && m[i].from_token == i + (i >= gone) && m[i].to_token == i);
        kvc_table_commit(t);
        CHECK((t->entries[1] != entry) == copied && kvc_pool_refs(pool, kvc_entry_offset(entry)) == (copied ? 1 : 2));
        CHECK(t->rows[0] == (gone < 0 ? 10 : 9) && other->entries[1] == entry && other->rows[0] == 10);
        kvc_table_free(t);
        kvc_table_free(other);
    }
}

/* Arrays much larger than needed are shrunk; others are kept. */
static void test_room_left(kvc_pool *pool)
{
    enum { N = 6400 };
    static uint8_t keep[N];
    for (int64_t left = 32; left < N; left *= 4) {
        kvc_table *t = open_table(pool, N, keep);
        OK(kvc_table_keep_scores(t, true));
        int64_t columns = t->columns, slots, scores = t->score_capacity;
        keep[5] = 0; /* so that there are stored slots */
        OK(kvc_table_plan_evict(t, keep, NULL, 1, N));
        kvc_table_commit(t);
        CHECK(t->columns == columns && t->score_capacity == scores && t->slot_capacity >= t->rows[0]);
        slots = t->slot_capacity;
        memset(keep + left, 0, (size_t)(N - left));
        for (int i = 0; i < 2; i++) { /* capacity for the previous length; then for the remaining one */
            OK(kvc_table_plan_evict(t, keep, NULL, 1, N));
            kvc_table_commit(t);
        }
        const int64_t rows = t->rows[0], used = kvc_table_columns(t, rows);
        const int64_t were[] = {columns, slots, scores}, need[] = {used, rows, rows};
        const int64_t are[] = {t->columns, t->slot_capacity, t->score_capacity};
        for (int i = 0; i < 3; i++) {
            CHECK(are[i] >= need[i] && (are[i] == were[i] || were[i] > 3 * need[i]));
            CHECK(are[i] <= 2 * need[i] + 32 || were[i] <= 5 * need[i] + 64);
        }
        kvc_table_free(t);
    }
}

void test_evictions(void)
{
    static const kvc_spec specs[] = {
        /* heads, dims, page size, sinks, recent, raw, key, value, direct */
        {HEADS, 32, 32, 16, 4, 0, KVC_RAW_BF16, KVC_INT8, KVC_INT8, false},
        {HEADS, 64, 32, 16, 0, 20, KVC_RAW_F32, KVC_INT4, KVC_INT8, false},
        {HEADS, 32, 32, 16, 20, 0, KVC_RAW_F16, KVC_RAW_F16, KVC_RAW_F16, false},
        {HEADS, 32, 32, 32, 4, 0, KVC_RAW_F32, KVC_INT8, KVC_FP8_E4M3, true},
    };
    kvc_pool *pool;
    OK(kvc_pool_new(256 * MB, &pool));
    test_open_page(pool);
    test_room_left(pool);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        for (int how = 0; how < 4; how++) walk(pool, &specs[i], how & 1, how & 2, 150);
    kvc_pool_release(pool);
}
