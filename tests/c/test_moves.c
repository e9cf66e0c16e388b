/* test_moves.c - which pages an eviction empties, fills, rewrites or leaves unchanged, by the documentation of
 * kvc_table_plan_evict: a line of full pages with given numbers of tokens to keep, compared with results counted by
 * hand or by exhaustive search. */
#include "harness.h"
#include "table/table.h"

enum { P = 16, PAGES = 24, TAIL = P + 5 }; /* the last full page is open, too: it is sealed one page later */

typedef struct line {
    kvc_table *t, *sharer;
    int64_t pages, tail, live[PAGES];
    int64_t before[PAGES]; /* entries of the closed pages */
    int64_t used;          /* bytes of the pool */
    uint8_t keep[PAGES * P + TAIL];
} line;

/* Keeps live[i] tokens of closed page i, and TAIL in open ones. */
static void open_line(line *l, kvc_pool *pool, int key, int value, const int64_t *live, int64_t pages, bool shared)
{
    kvc_spec s = {2, 32, 32, P, 0, 0, KVC_RAW_F32, key, value, false};
    kvc_pool_stats stats;
    memset(l, 0, sizeof *l);
    OK(kvc_table_new(pool, &s, 1, &l->t));
    OK(kvc_table_plan(l->t, pages * P + TAIL, NULL));
    kvc_table_commit(l->t);
    l->pages = pages, l->tail = TAIL;
    for (int64_t i = 0; i < pages; i++) {
        l->live[i] = live[i];
        l->before[i] = l->t->entries[1 + i];
        for (int64_t k = 0; k < live[i]; k++) l->keep[i * P + (7 * k + i) % P] = 1; /* anywhere in the page */
    }
    for (int64_t k = 0; k < TAIL; k++) l->keep[pages * P + k] = 1;
    if (shared) OK(kvc_table_clone(l->t, &l->sharer));
    kvc_pool_get_stats(pool, &stats);
    l->used = stats.used;
}

static void plan(line *l, const kvc_demotion *down)
{
    OK(kvc_table_plan_evict(l->t, l->keep, down, 1, l->pages * P + l->tail));
}

static void close_line(line *l)
{
    kvc_table_free(l->t);
    kvc_table_free(l->sharer);
}

/* Live tokens of the page in column 1 + c, and whether it is one of the original pages. */
static int64_t live_of(const line *l, int64_t c)
{
    int64_t n = 0;
    for (int64_t i = c * P; i < (c + 1) * P; i++) n += !l->t->slots || l->t->slots[i] >= 0;
    return n;
}

static int64_t closed_of(const line *l) { return (l->t->rows[0] - l->tail) / P; }

static bool was_there(const line *l, int64_t entry)
{
    for (int64_t i = 0; i < l->pages; i++)
        if (l->before[i] == entry) return true;
    return false;
}

static int64_t sum(const int64_t *x, int64_t n)
{
    int64_t all = 0;
    for (int64_t i = 0; i < n; i++) all += x[i];
    return all;
}

/* Tokens that can be copied as codes: as few pages as hold them, the fullest; each token of other
 * pages is copied once. */
static void test_filling(kvc_pool *pool)
{
    for (int round = 0; round < 60; round++) {
        line l;
        int64_t live[PAGES], n = 1 + random_below(PAGES), moves, heads, copied = 0, least = P;
        for (int64_t i = 0; i < n; i++) live[i] = random_below(3) ? random_below(P + 1) : P;
        open_line(&l, pool, KVC_INT8, KVC_INT4, live, n, false);
        plan(&l, NULL);
        CHECK(kvc_table_evicts(l.t) == (sum(live, n) < n * P));
        const kvc_move *m = kvc_table_moves(l.t, &moves, &heads);
        CHECK(heads == 2);
        for (int64_t i = 0; i < moves; i++) CHECK(m[i].from != m[i].to && m[i].from_token >= 0 && m[i].layout == P);
        kvc_table_commit(l.t);
        int64_t stay = (sum(live, n) + P - 1) / P;
        CHECK(l.t->rewritten == 0 && closed_of(&l) == stay);
        for (int64_t c = 0; c < closed_of(&l); c++) {
            CHECK(was_there(&l, l.t->entries[1 + c]) && live_of(&l, c) > 0);
        }
        for (int64_t i = 0; i < n; i++) /* pages with the fewest tokens are freed */
            for (int64_t c = 0; c < closed_of(&l); c++)
                if (l.t->entries[1 + c] == l.before[i] && live[i] < least) least = live[i];
        for (int64_t i = 0, gone; i < n; i++) {
            gone = 1;
            for (int64_t c = 0; c < closed_of(&l); c++) gone &= l.t->entries[1 + c] != l.before[i];
            CHECK(!gone || live[i] <= least);
            copied += gone ? live[i] : 0;
        }
        CHECK(moves == copied);
        kvc_pool_stats now;
        kvc_pool_get_stats(pool, &now);
        int64_t group = kvc_group_bytes(l.t, 1, KVC_INT8, KVC_INT4);
        CHECK(now.used == l.used - (n - stay) * group);
        close_line(&l);
    }
}

/* Pages that cannot change: exhaustive search for the documented rule. The emptiest k are rewritten as fewer pages, for
 * the first k after which at most 1/16 is dead; otherwise the first k that frees most. */
static int64_t anew(const int64_t *live, int64_t n)
{
    int64_t sorted[PAGES], pages = 0, all = 0, best = 0, most = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t want = 1; live[i] && want; want = 0) sorted[pages++] = live[i], all += live[i];
    for (int64_t i = 0; i < pages; i++)
        for (int64_t j = i + 1; j < pages; j++)
            if (sorted[j] < sorted[i]) {
                int64_t swap = sorted[i];
                sorted[i] = sorted[j], sorted[j] = swap;
            }
    if (4 * (pages * P - all) <= pages * P) return 0;
    for (int64_t k = 1; k <= pages; k++) {
        int64_t left = pages - k + (sum(sorted, k) + P - 1) / P;
        if (pages - left > most) best = k, most = pages - left;
        if (pages - left > 0 && 16 * (left * P - all) <= left * P) break;
    }
    return sum(sorted, best);
}

static void test_merging(kvc_pool *pool)
{
    int merged = 0;
    for (int round = 0; round < 300; round++) {
        line l;
        int64_t live[PAGES], n = 1 + random_below(PAGES), moves, heads, low = random_below(P);
        for (int64_t i = 0; i < n; i++) {
            live[i] = round % 3 ? low + random_below(P + 1 - low) : random_below(2) ? P : P / 2;
        }
        open_line(&l, pool, round % 2 ? KVC_INT4 : KVC_KIVI2, KVC_INT8, live, n, false);
        plan(&l, NULL);
        CHECK(kvc_table_evicts(l.t) == (sum(live, n) < n * P));
        const kvc_move *m = kvc_table_moves(l.t, &moves, &heads);
        int64_t rewritten = anew(live, n), pages = (rewritten + P - 1) / P;
        CHECK(moves == pages * P); /* the last page is padded */
        for (int64_t i = 0; i < moves; i++) {
            CHECK(!was_there(&l, m[i].to) && was_there(&l, m[i].from) && m[i].to_token == i % P && m[i].layout == P);
            for (int64_t c = 0; c < n; c++)
                if (m[i].from == l.before[c]) CHECK(l.keep[c * P + m[i].from_token]);
        }
        for (int64_t i = 1; i < rewritten; i++) { /* in order */
            int64_t at[2] = {0};
            for (int64_t k = 0; k < 2; k++)
                for (int64_t c = 0; c < n; c++)
                    if (m[i - k].from == l.before[c]) at[k] = c * P + m[i - k].from_token;
            CHECK(at[0] > at[1]);
        }
        for (int64_t i = rewritten; i < moves; i++) /* padding repeats tokens of the page */
            CHECK(m[i].from == m[i - rewritten + (pages - 1) * P].from && m[i].to == m[moves - P].to);
        kvc_table_commit(l.t);
        kvc_table_stats stats;
        kvc_table_get_stats(l.t, &stats);
        CHECK(l.t->rewritten == rewritten && stats.rewritten == rewritten);
        CHECK(stats.kept == sum(live, n) + TAIL);
        for (int64_t c = 0; c < closed_of(&l); c++) {
            for (int64_t i = 0; i < n; i++)
                if (l.before[i] == l.t->entries[1 + c]) CHECK(live_of(&l, c) == live[i]);
        }
        kvc_pool_stats now;
        kvc_pool_get_stats(pool, &now);
        int64_t group = kvc_group_bytes(l.t, 1, round % 2 ? KVC_INT4 : KVC_KIVI2, KVC_INT8);
        CHECK(now.used == l.used - (n - closed_of(&l)) * group);
        merged += rewritten > 0;
        close_line(&l);
    }
    CHECK(merged > 50 && merged < 250);
}

/* Exactly a quarter is not more than a quarter; then down to exactly a sixteenth. Computed by hand. */
static void test_quarter(kvc_pool *pool)
{
    line l;
    const int64_t quarter[] = {8, 16, 12, 12}, over[] = {8, 16, 12, 11};
    open_line(&l, pool, KVC_INT4, KVC_INT4, quarter, 4, false);
    plan(&l, NULL);
    kvc_table_commit(l.t);
    CHECK(l.t->rewritten == 0 && l.t->rows[0] == 4 * P + TAIL && l.t->entries[1] == l.before[0]);
    close_line(&l);
    open_line(&l, pool, KVC_INT4, KVC_INT4, over, 4, false);
    plan(&l, NULL);
    kvc_table_rollback(l.t);
    CHECK(l.t->rewritten == 0 && l.t->rows[0] == 4 * P + TAIL);
    plan(&l, NULL);
    kvc_table_commit(l.t); /* 8 + 11 + 12: 2 pages, 1 of 48 dead; the full one stays */
    CHECK(l.t->rewritten == 31 && closed_of(&l) == 3);
    int64_t first = l.t->entries[1], second = l.t->entries[2], third = l.t->entries[3];
    CHECK(!was_there(&l, first) && second == l.before[1] && !was_there(&l, third));
    CHECK(live_of(&l, 0) == P && live_of(&l, 1) == P && live_of(&l, 2) == 15);
    close_line(&l);
}

/* Shared pages are never written: other owners keep every byte and every page. */
static void test_shared(kvc_pool *pool)
{
    const int64_t few[] = {15, 13, 14, 13}, many[] = {4, 16, 2, 9};
    for (int i = 0; i < 2; i++) {
        line l;
        open_line(&l, pool, KVC_INT8, KVC_INT8, i ? many : few, 4, true);
        int64_t tail = l.t->entries[6], full = l.t->entries[5];
        l.keep[5 * P + i] = 0; /* the last open page's tokens move up, and it is shared */
        plan(&l, NULL);
        int64_t n, heads;
        const kvc_move *m = kvc_table_moves(l.t, &n, &heads);
        for (int64_t k = 0; k < n; k++) CHECK(!was_there(&l, m[k].to) && m[k].to != tail);
        kvc_table_commit(l.t);
        l.tail = TAIL - 1;
        CHECK(l.t->rewritten == (i ? 15 : 0) && closed_of(&l) == (i ? 2 : 4)); /* 4 + 2 + 9; 16 stay */
        CHECK(l.t->entries[closed_of(&l) + 1] == full && kvc_pool_refs(pool, kvc_entry_offset(full)) == 2);
        CHECK(l.t->entries[closed_of(&l) + 2] != tail && l.sharer->entries[6] == tail);
        for (int64_t c = 0; c < 4; c++)
            CHECK(l.sharer->entries[1 + c] == l.before[c] && kvc_pool_refs(pool, kvc_entry_offset(l.before[c])) >= 1);
        CHECK(kvc_pool_refs(pool, kvc_entry_offset(tail)) == 1);
        CHECK(kvc_pool_refs(pool, kvc_entry_offset(l.before[1])) == 2);
        CHECK(kvc_pool_refs(pool, kvc_entry_offset(l.before[0])) == (i ? 1 : 2));
        close_line(&l);
    }
}

/* Open pages stay in place, and their tokens move up in order, across all of them. */
static void test_tail(kvc_pool *pool)
{
    line l;
    const int64_t full[] = {P};
    open_line(&l, pool, KVC_INT8, KVC_INT8, full, 1, false);
    int64_t first = l.t->entries[2], last = l.t->entries[3], n, heads;
    plan(&l, NULL);
    kvc_table_moves(l.t, &n, &heads);
    CHECK(!kvc_table_evicts(l.t) && n == 0);
    kvc_table_commit(l.t);
    CHECK(l.t->rows[0] == P + TAIL && !l.t->slots);
    l.keep[P + 14] = l.keep[P + 16] = l.keep[P + 19] = 0;
    plan(&l, NULL);
    const kvc_move *m = kvc_table_moves(l.t, &n, &heads);
    CHECK(kvc_table_evicts(l.t) && n == 4);
    const int64_t from[] = {15, 17, 18, 20};
    for (int64_t i = 0; i < 4; i++) {
        CHECK(m[i].from == (from[i] < P ? first : last) && m[i].from_token == from[i] % P);
        CHECK(m[i].to == (14 + i < P ? first : last) && m[i].to_token == (14 + i) % P && m[i].layout == P);
    }
    kvc_table_commit(l.t);
    CHECK(l.t->entries[2] == first && l.t->entries[3] == last && l.t->rows[0] == P + 18 && l.t->rewritten == 0);
    for (int64_t i = 0; i < 4; i++) CHECK(l.t->slots[P + 14 + i] == P + from[i]);
    for (int64_t i = 0; i < 18; i++) l.keep[P + i] = i >= 16;
    l.tail = 18;
    plan(&l, NULL);
    kvc_table_commit(l.t); /* the last two go to the first page */
    CHECK(l.t->rows[0] == P + 2 && kvc_pool_refs(pool, kvc_entry_offset(last)) == 0 && l.t->entries[3] == KVC_NONE);
    CHECK(l.t->entries[2] == first && l.t->slots[P] == P + 18 && l.t->slots[P + 1] == P + 20);
    l.keep[P] = l.keep[P + 1] = 0, l.tail = 2;
    plan(&l, NULL);
    kvc_table_commit(l.t); /* nothing is left of it */
    CHECK(l.t->rows[0] == P && kvc_pool_refs(pool, kvc_entry_offset(first)) == 0);
    close_line(&l);
}

/* Pages that change format are rewritten together, but never shared ones. */
static void test_other_formats(kvc_pool *pool)
{
    for (int shared = 0; shared < 2; shared++) {
        line l;
        const int64_t live[] = {16, 16, 10, 16, 0};
        int32_t down = KVC_INT4 << 8 | KVC_INT2, formats[6] = {-1, down, -1, down, KVC_INT8 << 8 | KVC_INT8, down};
        kvc_demotion demotion = {formats, 6};
        open_line(&l, pool, KVC_INT8, KVC_INT8, live, 5, shared);
        plan(&l, &demotion);
        CHECK(kvc_table_evicts(l.t));
        kvc_table_commit(l.t);
        CHECK(l.t->rewritten == (shared ? 0 : 26) && closed_of(&l) == 4);
        for (int64_t c = 0; c < 4; c++)
            CHECK((l.t->entries[1 + c] & 0xffff) == (!shared && c % 2 == 0 ? down : KVC_INT8 << 8 | KVC_INT8));
        if (!shared) CHECK(live_of(&l, 0) == P && live_of(&l, 2) == 10 && l.t->entries[2] == l.before[1]);
        close_line(&l);
    }
}

static void test_refusals(kvc_pool *pool)
{
    line l;
    const int64_t full[] = {P, P};
    int64_t live = 0;
    int32_t formats[3] = {-1, -1, -1};
    kvc_demotion down = {formats, 3};
    open_line(&l, pool, KVC_INT8, KVC_INT8, full, 2, false);
    live = kvc_alloc_live();
#define REFUSED(text, keep, demote, heads, width)                                                                      \
    FAILS(KVC_E_VALUE, text, kvc_table_plan_evict(l.t, keep, demote, heads, width));                                   \
    CHECK(!l.t->plan && kvc_alloc_live() == live)
    REFUSED("1 or 2 heads, got 3", l.keep, NULL, 3, 53);
    REFUSED("1 or 2 heads, got 0", l.keep, NULL, 0, 53);
    REFUSED("53 stored tokens of row 0, got 52", l.keep, NULL, 1, 52);
    const int refused[] = {KVC_RAW_F32 << 8 | KVC_INT8,     KVC_INT8 << 8 | KVC_RAW_F32,
                           KVC_FORMATS << 8 | KVC_INT8,     KVC_INT8 << 8 | KVC_FORMATS,
                           KVC_RAW_BF16 << 8 | KVC_RAW_F16, KVC_RAW_F32 << 8 | KVC_RAW_F32};
    for (int i = 0; i < 6; i++) {
        formats[i % 3] = refused[i];
        REFUSED("expected quantized formats", l.keep, &down, 1, 53);
        formats[i % 3] = -1;
    }
    formats[2] = KVC_INT4_G32 << 8 | KVC_MXFP4;
    plan(&l, &down);
    CHECK(kvc_table_evicts(l.t) && !kvc_table_seals(l.t, &live));
    kvc_table_rollback(l.t);
    CHECK(!kvc_table_evicts(l.t));
    close_line(&l);

    kvc_spec s = {2, 32, 48, P, 3, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8, false};
    OK(kvc_table_new(pool, &s, 2, &l.t));
    OK(kvc_table_plan(l.t, 20, NULL));
    kvc_table_commit(l.t);
    l.sharer = NULL;
    live = kvc_alloc_live();
    memset(l.keep, 1, sizeof l.keep);
    l.keep[20 + 2] = 0; /* the last sink of row 1 */
    REFUSED("first 3 tokens (sinks) kept, got token 2 of row 1", l.keep, NULL, 1, 20);
    l.keep[22] = 1, l.keep[60 + 1] = 0;
    REFUSED("got token 1 of row 1", l.keep, NULL, 2, 20);
    formats[1] = KVC_INT8 << 8 | KVC_INT4_G32; /* V's dim is not a multiple of 32 */
    l.keep[61] = 1;
    REFUSED("head dims 32 and 48", l.keep, &down, 1, 20);
    formats[1] = -1, formats[2] = -1;
    l.keep[20 + 4] = 0; /* heads diverge: from here on each has a row */
    OK(kvc_table_plan_evict(l.t, l.keep, NULL, 2, 20));
    int64_t n, heads;
    kvc_table_moves(l.t, &n, &heads);
    CHECK(heads == 1 && n > 0);
    kvc_table_commit(l.t);
    CHECK(l.t->table_heads == 2);
    live = kvc_alloc_live();
    REFUSED("expected 2 heads, got 1; heads that store different tokens", l.keep, NULL, 1, 20);
    close_line(&l);
}

/* Heads that get different formats diverge, too. */
static void test_parting(kvc_pool *pool)
{
    line l;
    const int64_t full[] = {P, P};
    int32_t formats[2][3] = {{-1, -1, -1}, {-1, -1, KVC_INT4 << 8 | KVC_INT4}};
    kvc_demotion down = {formats[0], 3};
    static uint8_t keep[2 * 2 * (2 * P + TAIL)];
    open_line(&l, pool, KVC_INT8, KVC_INT8, full, 2, false);
    memset(keep, 1, sizeof keep);
    OK(kvc_table_plan_evict(l.t, keep, &down, 2, 53));
    kvc_table_commit(l.t);
    CHECK(l.t->table_heads == 2 && l.t->rewritten == P && l.t->rows[0] == 53 && l.t->rows[2] == 53);
    const int64_t *other = l.t->entries + l.t->columns;
    CHECK((l.t->entries[2] & 0xffff) == (KVC_INT8 << 8 | KVC_INT8) && (other[2] & 0xffff) == formats[1][2]);
    for (int i = 0; i < 2; i++) CHECK(kvc_pool_refs(pool, kvc_entry_offset(l.before[i])) == 0);
    close_line(&l);

    /* not where sequences do */
    kvc_spec s = {2, 32, 32, P, 0, 0, KVC_RAW_F32, KVC_INT8, KVC_INT8, false};
    int32_t by_sequence[2][2][3] = {{{-1, -1, -1}, {-1, -1, -1}}, {{-1, formats[1][2], -1}, {-1, formats[1][2], -1}}};
    OK(kvc_table_new(pool, &s, 2, &l.t));
    for (int i = 0; i < 2; i++) {
        OK(kvc_table_plan(l.t, P, NULL));
        kvc_table_commit(l.t);
    }
    l.sharer = NULL;
    OK(kvc_table_plan_evict(l.t, keep, &(kvc_demotion){by_sequence[0][0], 3}, 2, 2 * P));
    kvc_table_commit(l.t);
    CHECK(l.t->table_heads == 1);
    close_line(&l);
}

/* What a great eviction leaves takes little room. */
static void test_room(kvc_pool *pool)
{
    line l;
    int64_t live[PAGES] = {P, 3};
    kvc_table_stats before, after;
    open_line(&l, pool, KVC_INT8, KVC_INT8, live, PAGES, false);
    OK(kvc_table_keep_scores(l.t, true));
    plan(&l, NULL);
    kvc_table_commit(l.t);
    kvc_table_get_stats(l.t, &before);
    memset(l.keep, 1, sizeof l.keep);
    CHECK(l.t->rows[0] == 2 * P + TAIL);
    l.keep[2] = 0;
    OK(kvc_table_plan_evict(l.t, l.keep, NULL, 1, 2 * P + TAIL));
    kvc_table_commit(l.t);
    kvc_table_get_stats(l.t, &after);
    CHECK(after.table_bytes < before.table_bytes / 2 && l.t->score_capacity >= l.t->rows[0]);
    close_line(&l);
}

void test_moves(void)
{
    kvc_pool *pool;
    OK(kvc_pool_new(64 * MB, &pool));
    test_filling(pool);
    test_merging(pool);
    test_quarter(pool);
    test_shared(pool);
    test_tail(pool);
    test_other_formats(pool);
    test_refusals(pool);
    test_parting(pool);
    test_room(pool);
    kvc_pool_stats left;
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0);
    kvc_pool_release(pool);
}
