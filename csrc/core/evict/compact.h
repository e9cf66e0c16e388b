/* compact.h - private to compact*.c: checked copy of the moves of a call. */
#ifndef KVC_COMPACT_H
#define KVC_COMPACT_H

#include "attend/attend.h"

/* Run i is moves starts[i] to starts[i + 1]: those of single tokens to one page (or a whole page), later those of a line. */
typedef struct kvc_moves {
    kvc_move *move;
    int64_t n, *starts, runs;
} kvc_moves;

/* Copies and checks n moves, each by itself and all together: no two to one token, none to or from a page that is written
 * anew, none across lines. Runs are then of a page. */
kvc_status kvc_moves_take(kvc_moves *m, const kvc_store *store, const kvc_move *moves, int64_t n);
void kvc_moves_by_line(kvc_moves *m);
void kvc_moves_free(kvc_moves *m);

/* True if a token of this side can move between pages as codes. */
bool kvc_move_as_it_is(int64_t from, int64_t to, int key);
/* True if this side of a run's page needs no encoding. Where only some tokens need it, the page is encoded and the codes of
 * the others are then copied over the result. */
bool kvc_run_as_it_is(const kvc_moves *m, int64_t run, int key);

#endif
