/* compact.c - the copying half of an eviction. Pages with statistics over their tokens are written first: that needs
 * memory, and touches new pages only. The rest, tokens as they are, cannot fail. */
#include "base/alloc.h"
#include "attend/attend.h"

#include <stdatomic.h>
#include <string.h>

typedef struct compactor {
    const kvc_store *s;
    const kvc_move *moves;
    int64_t *starts, runs, heads; /* of runs; [runs] = n */
    atomic_bool failed;
} compactor;

static kvc_side side_of(const compactor *c, int64_t entry, int64_t h, int64_t layout, int key)
{
    kvc_page page = kvc_page_of(c->s, entry, h, layout);
    return kvc_side_of(c->s, &page, key);
}

static kvc_room room_of(const compactor *c, int64_t entry, int64_t h, int64_t layout, int key)
{
    kvc_page page = kvc_page_of(c->s, entry, h, layout);
    return kvc_room_of(c->s, &page, key);
}

/* Can a token of this side go from page to page in its codes? */
static bool as_it_is(int64_t from, int64_t to, int key)
{
    int a = key ? kvc_entry_key(from) : kvc_entry_value(from), b = key ? kvc_entry_key(to) : kvc_entry_value(to);
    return a == b && (!key || kvc_format_traits(a).keys == KVC_KEYS_TOKEN);
}

/* One side of a page from the tokens that come to it; they stand in for places that none comes to. */
static void write_anew(const compactor *c, int64_t begin, int64_t end, int64_t h, int key, float *rows, float *scratch)
{
    kvc_room to = room_of(c, c->moves[begin].to, h, c->moves[begin].layout, key);
    const uint8_t *row[KVC_MAX_PAGE] = {0};
    for (int64_t i = begin; i < end; i++) {
        const kvc_move *m = &c->moves[i];
        kvc_side from = side_of(c, m->from, h, m->layout, key);
        kvc_decode(&from, m->from_token, 1, rows + (i - begin) * to.dim);
        row[m->to_token] = (const uint8_t *)(rows + (i - begin) * to.dim);
    }
    for (int64_t t = 0, next = 0; t < to.page_size; t++)
        if (!row[t]) row[t] = (const uint8_t *)(rows + next++ % (end - begin) * to.dim);
    kvc_encode_page(&to, &(kvc_source){.row = row, .dtype = KVC_F32}, scratch);
}

/* Needs this side of a page no encoding? If some of its tokens do, the others' codes are copied over what was encoded. */
static bool all_as_they_are(const compactor *c, int64_t begin, int64_t end, int key)
{
    bool all = true;
    for (int64_t i = begin; i < end; i++)
        all = all && (c->moves[i].from_token < 0 || as_it_is(c->moves[i].from, c->moves[i].to, key));
    return all;
}

/* Runs of moves to one page. */
static void write_pages(int64_t begin, int64_t end, void *context)
{
    compactor *c = context;
    int64_t dim = kvc_max(c->s->key_dim, c->s->value_dim), page = KVC_MAX_PAGE * dim;
    float *rows = NULL;
    for (int64_t i = begin; i < end; i++) {
        int64_t run = i / c->heads, first = c->starts[run];
        for (int key = 0; key < 2; key++) {
            if (all_as_they_are(c, first, c->starts[run + 1], key)) continue;
            if (!rows && kvc_alloc(page + kvc_page_scratch(dim, KVC_MAX_PAGE), sizeof *rows, &rows) != KVC_OK) {
                atomic_store(&c->failed, true);
                return;
            }
            write_anew(c, first, c->starts[run + 1], i % c->heads, key, rows, rows + page);
        }
    }
    kvc_free(rows);
}

/* Runs of moves of one line, in order: a token may go where another has just left. */
static void move_tokens(int64_t begin, int64_t end, void *context)
{
    const compactor *c = context;
    for (int64_t run = begin; run < end; run++)
        for (int64_t i = c->starts[run / c->heads]; i < c->starts[run / c->heads + 1]; i++) {
            const kvc_move *m = &c->moves[i];
            int64_t h = run % c->heads;
            kvc_page from = kvc_page_of(c->s, m->from, h, m->layout), to = kvc_page_of(c->s, m->to, h, m->layout);
            if (m->from_token < 0) {
                int64_t bytes = kvc_page_layout(to.key, to.value, c->s->key_dim, c->s->value_dim, m->layout).bytes;
                memcpy(to.data, from.data, (size_t)bytes);
                continue;
            }
            for (int key = 0; key < 2; key++) {
                if (!as_it_is(m->from, m->to, key)) continue;
                kvc_side a = side_of(c, m->from, h, m->layout, key);
                kvc_room b = room_of(c, m->to, h, m->layout, key);
                kvc_copy_token(&a, m->from_token, &b, m->to_token);
            }
        }
}

static void find_runs(compactor *c, int64_t n, bool by_line)
{
    c->runs = 0;
    for (int64_t i = 0; i < n; i++) {
        const kvc_move *m = &c->moves[i];
        bool same = i && m->line == m[-1].line;
        if (!by_line) same = same && m->to == m[-1].to && m->from_token >= 0 && m[-1].from_token >= 0;
        if (!same) c->starts[c->runs++] = i;
    }
    c->starts[c->runs] = n;
}

static kvc_status check_move(const kvc_store *s, const kvc_move *m)
{
    KVC_CHECK(m->layout == s->page_size || m->layout == kvc_sink_tokens(s->sinks), KVC_E_VALUE,
              "compact: moves: wanted pages of %lld tokens, or of the %lld sinks, got %lld", (long long)s->page_size,
              (long long)s->sinks, (long long)m->layout);
    KVC_TRY(kvc_entry_check(s, m->from, 0, m->layout, "compact", "moves: from"));
    KVC_TRY(kvc_entry_check(s, m->to, 0, m->layout, "compact", "moves: to"));
    bool whole = m->from_token == -1, same = (m->from & 0xffff) == (m->to & 0xffff);
    KVC_CHECK(whole || (m->from_token >= 0 && m->from_token < m->layout && m->to_token >= 0 && m->to_token < m->layout),
              KVC_E_VALUE, "compact: moves: wanted tokens from 0 to %lld, or -1 for a page, got %lld to %lld",
              (long long)m->layout - 1, (long long)m->from_token, (long long)m->to_token);
    for (int key = 0; key < 2; key++) {
        int to = key ? kvc_entry_key(m->to) : kvc_entry_value(m->to);
        KVC_CHECK(
            same || (!whole && (as_it_is(m->from, m->to, key) || !kvc_format_is_raw(to))), KVC_E_VALUE,
            "compact: moves: wanted pages of one format, or single tokens to a quantized one, got entries %lld to "
            "%lld",
            (long long)m->from, (long long)m->to);
    }
    return whole ? kvc_apart_check(s, m->from, m->to, m->layout, "compact", "moves") : KVC_OK;
}

kvc_status kvc_compact(const kvc_store *s, const kvc_move *moves, int64_t n, const kvc_exec *exec)
{
    compactor c = {.s = s, .moves = moves, .heads = s->table_heads == 1 ? s->heads : 1};
    const char *isa;
    KVC_TRY(kvc_isa(&isa));
    KVC_TRY(kvc_store_check(s, "compact"));
    for (int64_t i = 0; i < n; i++) KVC_TRY(check_move(s, &moves[i]));
    KVC_TRY(kvc_alloc(n + 1, sizeof *c.starts, &c.starts));
    int64_t bytes = n * (s->key_dim + s->value_dim) * 4;
    find_runs(&c, n, false);
    kvc_run(exec, c.runs * c.heads, bytes, write_pages, &c);
    bool failed = atomic_load(&c.failed);
    if (!failed) {
        find_runs(&c, n, true);
        kvc_run(exec, c.runs * c.heads, bytes, move_tokens, &c);
    }
    kvc_free(c.starts);
    return failed ? kvc_no_workspace("compact") : KVC_OK;
}
