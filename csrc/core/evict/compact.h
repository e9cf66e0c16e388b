/* compact.h - private to compact*.c: the moves of a call, a copy that passed the checks. */
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

/* Can a token of this side go from page to page in its codes? */
bool kvc_move_as_it_is(int64_t from, int64_t to, int key);
/* Needs this side of a run's page no encoding? If some of its tokens do, the others' codes are copied over what was encoded. */
bool kvc_run_as_it_is(const kvc_moves *m, int64_t run, int key);

#endif
