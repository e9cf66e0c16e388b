/* compact_check.c - validates the moves of an eviction, individually and together: a re-encoded page receives its
 * tokens in one run, no token is written twice, and what one line writes no other line reads or writes, because lines
 * run in parallel. */
#include "base/alloc.h"
#include "compact.h"

#include <stdlib.h>
#include <string.h>

bool kvc_move_keeps_codes(int64_t from, int64_t to, int key)
{
    int a = key ? kvc_entry_key(from) : kvc_entry_value(from), b = key ? kvc_entry_key(to) : kvc_entry_value(to);
    return a == b && (!key || kvc_format_traits(a).keys == KVC_KEYS_TOKEN);
}

bool kvc_run_keeps_codes(const kvc_moves *m, int64_t run, int key)
{
    bool all = true;
    for (int64_t i = m->starts[run]; i < m->starts[run + 1]; i++)
        all = all && (m->move[i].from_token < 0 || kvc_move_keeps_codes(m->move[i].from, m->move[i].to, key));
    return all;
}

static void find_runs(kvc_moves *m, bool by_line)
{
    m->runs = 0;
    for (int64_t i = 0; i < m->n; i++) {
        const kvc_move *x = &m->move[i];
        bool same = i && x->line == x[-1].line;
        if (!by_line) same = same && x->to == x[-1].to && x->from_token >= 0 && x[-1].from_token >= 0;
        if (!same) m->starts[m->runs++] = i;
    }
    m->starts[m->runs] = m->n;
}

void kvc_moves_by_line(kvc_moves *m) { find_runs(m, true); }

void kvc_moves_free(kvc_moves *m)
{
    kvc_free(m->move);
    kvc_free(m->starts);
}

static kvc_status check_move(const kvc_store *s, const kvc_move *m)
{
    KVC_CHECK(m->layout == s->page_size || m->layout == kvc_sink_tokens(s->sinks), KVC_E_VALUE,
              "compact: moves: expected pages of %lld tokens, or of the %lld sinks, got %lld", (long long)s->page_size,
              (long long)s->sinks, (long long)m->layout);
    KVC_TRY(kvc_entry_check(s, m->from, 0, m->layout, "compact", "moves: from"));
    KVC_TRY(kvc_entry_check(s, m->to, 0, m->layout, "compact", "moves: to"));
    bool whole = m->from_token == -1, same = (m->from & 0xffff) == (m->to & 0xffff);
    KVC_CHECK(whole || (m->from_token >= 0 && m->from_token < m->layout && m->to_token >= 0 && m->to_token < m->layout),
              KVC_E_VALUE, "compact: moves: expected tokens from 0 to %lld, or -1 for a page, got %lld to %lld",
              (long long)m->layout - 1, (long long)m->from_token, (long long)m->to_token);
    for (int key = 0; key < 2; key++) {
        int to = key ? kvc_entry_key(m->to) : kvc_entry_value(m->to);
        KVC_CHECK(
            same || (!whole && (kvc_move_keeps_codes(m->from, m->to, key) || !kvc_format_is_raw(to))), KVC_E_VALUE,
            "compact: moves: expected pages of one format, or single tokens to a quantized one, got entries %lld to "
            "%lld",
            (long long)m->from, (long long)m->to);
    }
    return whole ? kvc_apart_check(s, m->from, m->to, m->layout, "compact", "moves") : KVC_OK;
}

/* The bytes that a run writes. */
typedef struct target {
    /* line: counted by change of number, because separate runs with the same number also run in parallel */
    int64_t begin, end, line;
    bool anew;
} target;

static int by_place(const void *a, const void *b)
{
    const target *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* A run must not write a token twice. Then a run to a page has at most as many moves as the page has tokens. */
static kvc_status check_run(const kvc_moves *m, int64_t run)
{
    uint64_t taken[KVC_MAX_PAGE / 64] = {0};
    for (int64_t i = m->starts[run]; i < m->starts[run + 1]; i++) {
        const kvc_move *x = &m->move[i];
        uint64_t bit = x->from_token < 0 ? 0 : (uint64_t)1 << x->to_token % 64, *word = &taken[x->to_token / 64 & 3];
        KVC_CHECK(!(*word & bit), KVC_E_VALUE,
                  "compact: moves: expected one move to a token, got two to token %lld of page %lld",
                  (long long)x->to_token, (long long)kvc_entry_offset(x->to));
        KVC_CHECK(x->layout == m->move[m->starts[run]].layout, KVC_E_VALUE,
                  "compact: moves: expected one layout of page %lld, got %lld and %lld tokens",
                  (long long)kvc_entry_offset(x->to), (long long)m->move[m->starts[run]].layout, (long long)x->layout);
        *word |= bit;
    }
    return KVC_OK;
}

/* Targets are sorted by address. None may overlap, except runs of one line to the same page. */
static kvc_status check_targets(const target *t, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        const target *a = &t[i - 1], *b = &t[i];
        bool apart = b->begin >= a->end, one = b->begin == a->begin && b->end == a->end && b->line == a->line;
        KVC_CHECK(apart || (one && !a->anew && !b->anew), KVC_E_VALUE,
                  "compact: moves: expected pages to write that share no bytes, got one at %lld and one at %lld",
                  (long long)a->begin, (long long)b->begin);
    }
    return KVC_OK;
}

/* What a move reads must not be written by other lines or be re-encoded. */
static kvc_status check_source(const kvc_store *s, const kvc_move *m, int64_t line, const target *t, int64_t n)
{
    int64_t begin = kvc_entry_offset(m->from), end = begin + kvc_entry_bytes(s, m->from, m->layout), low = 0;
    for (int64_t high = n; low < high;) { /* binary search for the last target that begins before `end` */
        int64_t middle = low + (high - low) / 2;
        if (t[middle].begin < end)
            low = middle + 1;
        else
            high = middle;
    }
    KVC_CHECK(!low || t[low - 1].end <= begin || (t[low - 1].line == line && !t[low - 1].anew), KVC_E_VALUE,
              "compact: moves: expected to read a page that nothing else writes, got one at %lld that moves to %lld "
              "overwrite",
              (long long)begin, (long long)t[low - 1].begin);
    return KVC_OK;
}

static kvc_status check_together(const kvc_moves *m, const kvc_store *s)
{
    target *t;
    int64_t line = 0;
    kvc_status status = KVC_OK;
    KVC_TRY(kvc_alloc(m->runs, sizeof *t, &t));
    for (int64_t r = 0; status == KVC_OK && r < m->runs; r++) {
        const kvc_move *x = &m->move[m->starts[r]];
        int64_t begin = kvc_entry_offset(x->to), bytes = kvc_entry_bytes(s, x->to, x->layout);
        line += r && x->line != x[-1].line;
        t[r] = (target){begin, begin + bytes, line, !kvc_run_keeps_codes(m, r, 0) || !kvc_run_keeps_codes(m, r, 1)};
        status = check_run(m, r);
    }
    if (status == KVC_OK && m->runs) qsort(t, (size_t)m->runs, sizeof *t, by_place);
    if (status == KVC_OK) status = check_targets(t, m->runs);
    line = 0;
    for (int64_t i = 0; status == KVC_OK && i < m->n; i++) {
        line += i && m->move[i].line != m->move[i - 1].line;
        status = check_source(s, &m->move[i], line, t, m->runs);
    }
    kvc_free(t);
    return status;
}

kvc_status kvc_moves_take(kvc_moves *m, const kvc_store *s, const kvc_move *moves, int64_t n)
{
    *m = (kvc_moves){.n = n};
    KVC_TRY(kvc_store_check(s, "compact"));
    kvc_status status = kvc_alloc(n, sizeof *m->move, &m->move);
    if (status == KVC_OK) status = kvc_alloc(n + 1, sizeof *m->starts, &m->starts);
    if (status == KVC_OK && n) memcpy(m->move, moves, (size_t)n * sizeof *moves);
    for (int64_t i = 0; status == KVC_OK && i < n; i++) status = check_move(s, &m->move[i]);
    if (status == KVC_OK) {
        find_runs(m, false);
        status = check_together(m, s);
    }
    if (status != KVC_OK) kvc_moves_free(m);
    return status;
}
