/* compact.h - private to compact*.c: a checked copy of a call's moves. */
#ifndef KVC_COMPACT_H
#define KVC_COMPACT_H

#include "attend/attend.h"

/* Run i is moves starts[i] to starts[i + 1]: first grouped by destination page (a whole-page copy is a run of its own),
 * later by line. */
typedef struct kvc_moves {
    kvc_move *move;
    int64_t n, *starts, runs;
} kvc_moves;

/* Copies and checks n moves, individually and together: no two write the same token, none reads or writes a page that
 * is re-encoded, none crosses lines. Afterwards, runs are by page. */
kvc_status kvc_moves_take(kvc_moves *m, const kvc_store *store, const kvc_move *moves, int64_t n);
void kvc_moves_by_line(kvc_moves *m);
void kvc_moves_free(kvc_moves *m);

/* True if this side of a token can be copied between the pages without re-encoding. */
bool kvc_move_keeps_codes(int64_t from, int64_t to, int key);
/* True if no token of this side of the run's page needs re-encoding. If only some do, the page is encoded, and the
 * codes of the others are then copied over the result. */
bool kvc_run_keeps_codes(const kvc_moves *m, int64_t run, int key);

#endif
