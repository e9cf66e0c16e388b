/* compact.c - the copying part of an eviction. Pages with statistics over their tokens are encoded first; this
 * allocates memory and writes only to new pages. Copying encoded tokens comes afterwards and cannot fail. */
#include "base/alloc.h"
#include "compact.h"

#include <stdatomic.h>
#include <string.h>

typedef struct compactor {
    const kvc_store *s;
    kvc_moves m;
    int64_t heads; /* pages per entry */
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

/* Encodes one side of a page from the tokens moved to it. Places without a token are filled with copies of them. */
static void write_anew(const compactor *c, int64_t begin, int64_t end, int64_t h, int key, float *rows, float *scratch)
{
    kvc_room to = room_of(c, c->m.move[begin].to, h, c->m.move[begin].layout, key);
    const uint8_t *row[KVC_MAX_PAGE] = {0};
    for (int64_t i = begin; i < end; i++) {
        const kvc_move *m = &c->m.move[i];
        kvc_side from = side_of(c, m->from, h, m->layout, key);
        kvc_decode(&from, m->from_token, 1, rows + (i - begin) * to.dim);
        row[m->to_token] = (const uint8_t *)(rows + (i - begin) * to.dim);
    }
    for (int64_t t = 0, next = 0; t < to.page_size; t++)
        if (!row[t]) row[t] = (const uint8_t *)(rows + next++ % (end - begin) * to.dim);
    kvc_encode_page(&to, &(kvc_source){.row = row, .dtype = KVC_F32}, scratch);
}

/* Items are runs of moves to one page. */
static void write_pages(int64_t begin, int64_t end, void *context)
{
    compactor *c = context;
    int64_t dim = kvc_max(c->s->key_dim, c->s->value_dim), page = KVC_MAX_PAGE * dim;
    float *rows = NULL;
    for (int64_t i = begin; i < end; i++) {
        int64_t run = i / c->heads, first = c->m.starts[run];
        for (int key = 0; key < 2; key++) {
            if (kvc_run_keeps_codes(&c->m, run, key)) continue;
            if (!rows && kvc_alloc(page + kvc_page_scratch(dim, KVC_MAX_PAGE), sizeof *rows, &rows) != KVC_OK) {
                atomic_store(&c->failed, true);
                return;
            }
            write_anew(c, first, c->m.starts[run + 1], i % c->heads, key, rows, rows + page);
        }
    }
    kvc_free(rows);
}

/* Items are runs of moves of one line, processed in order: a token may be moved to a place that was just vacated. */
static void move_tokens(int64_t begin, int64_t end, void *context)
{
    const compactor *c = context;
    for (int64_t run = begin; run < end; run++)
        for (int64_t i = c->m.starts[run / c->heads]; i < c->m.starts[run / c->heads + 1]; i++) {
            const kvc_move *m = &c->m.move[i];
            int64_t h = run % c->heads;
            kvc_page from = kvc_page_of(c->s, m->from, h, m->layout), to = kvc_page_of(c->s, m->to, h, m->layout);
            if (m->from_token < 0) {
                int64_t bytes = kvc_page_layout(to.key, to.value, c->s->key_dim, c->s->value_dim, m->layout).bytes;
                memcpy(to.data, from.data, (size_t)bytes);
                continue;
            }
            for (int key = 0; key < 2; key++) {
                if (!kvc_move_keeps_codes(m->from, m->to, key)) continue;
                kvc_side a = side_of(c, m->from, h, m->layout, key);
                kvc_room b = room_of(c, m->to, h, m->layout, key);
                kvc_copy_token(&a, m->from_token, &b, m->to_token);
            }
        }
}

kvc_status kvc_compact(const kvc_store *s, const kvc_move *moves, int64_t n, const kvc_exec *exec)
{
    compactor c = {.s = s, .heads = s->table_heads == 1 ? s->heads : 1};
    const char *isa;
    KVC_TRY(kvc_isa(&isa));
    KVC_TRY(kvc_moves_take(&c.m, s, moves, n));
    int64_t bytes = n * (s->key_dim + s->value_dim) * 4;
    kvc_run(exec, c.m.runs * c.heads, bytes, write_pages, &c);
    bool failed = atomic_load(&c.failed);
    if (!failed) {
        kvc_moves_by_line(&c.m);
        kvc_run(exec, c.m.runs * c.heads, bytes, move_tokens, &c);
    }
    kvc_moves_free(&c.m);
    return failed ? kvc_no_workspace("compact") : KVC_OK;
}
