/* play_evict.c - evictions in an emulated layer, and the scores by which callers select tokens. */
#include "play.h"

void play_keep_scores(play *p)
{
    OK(kvc_table_keep_scores(p->t, true));
    p->score = play_room(p->batch * p->spec.heads * p->capacity, sizeof *p->score);
}

void play_observe(play *p, const float *received, int64_t width)
{
    const kvc_table *t = p->t;
    int64_t longest = kvc_table_longest(t), H = p->spec.heads;
    float decay = .75f, *narrow = play_room(p->batch * H * longest, sizeof *narrow);
    for (int64_t bh = 0; bh < p->batch * H; bh++) {
        int64_t line = play_line(t, bh / H, bh % H);
        memcpy(narrow + bh * longest, received + bh * width, (size_t)longest * sizeof *narrow);
        for (int64_t i = 0; i < t->rows[2 * line]; i++) {
            float *score = p->score + bh * p->capacity + play_slot(t, line, i);
            if (play_slot(t, line, i) >= 0) *score = *score * decay + narrow[bh * longest + i];
        }
    }
    OK(kvc_table_observe(p->t, narrow, longest, decay));
    free(narrow);
}

/* ---------------------------------------------------------------- evictions */

void play_crop(play *p, int64_t seen)
{
    OK(kvc_table_crop(p->t, seen));
    play_check(p);
}

void play_evict(play *p, int64_t chance, bool ragged, int32_t to)
{
    kvc_table *t = p->t;
    int64_t H = p->spec.heads, heads = ragged || t->table_heads > 1 ? H : 1, width = kvc_table_longest(t), n,
            move_heads;
    uint8_t *keep = play_room(p->batch * heads * width, 1);
    int32_t *formats = play_room(p->batch * heads * t->columns, sizeof *formats);
    for (int64_t i = 0; i < p->batch * heads * t->columns; i++) formats[i] = random_below(2) ? to : -1;
    for (int64_t r = 0; r < p->batch * heads; r++)
        for (int64_t i = 0; i < width; i++) {
            keep[r * width + i] = i < p->spec.sinks || random_below(8) < chance;
            int64_t b = r / heads, line = play_line(t, b, r % heads);
            int64_t slot = i < t->rows[2 * line] ? play_slot(t, line, i) : -1;
            for (int64_t h = 0; h < H; h++)
                if (slot >= 0 && !keep[r * width + i] && (heads == 1 || h == r % heads))
                    p->live[(b * H + h) * p->capacity + slot] = 0;
        }
    kvc_demotion demotion = {formats, t->columns};
    OK(kvc_table_plan_evict(t, keep, &demotion, heads, width));
    if (random_below(2)) { /* roll back once */
        kvc_table_rollback(t);
        OK(kvc_table_plan_evict(t, keep, &demotion, heads, width));
    }
    const kvc_move *moves = kvc_table_moves(t, &n, &move_heads);
    kvc_store store = kvc_table_store(t);
    store.batch = 0;
    store.table_heads = move_heads == H ? 1 : H;
    for (int64_t fail = 1; kvc_alloc_fail_at(fail), kvc_compact(&store, moves, n, NULL) != KVC_OK; fail++)
        CHECK(fail < 9 && strstr(kvc_error(), "out of memory"));
    kvc_alloc_fail_at(0);
    kvc_table before = *t;
    kvc_table_commit(t);
    CHECK(t->version != before.version || (t->entries == before.entries && t->rows == before.rows));
    free(keep);
    free(formats);
    play_check(p);
}
