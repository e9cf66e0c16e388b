/* progress.h - in which parts a call appends to a sequence of an engine's. Also included by CUDA. */
#ifndef KVC_PROGRESS_H
#define KVC_PROGRESS_H

#include "page.h"

#include <stdbool.h>

/* How far a sequence has come: tokens, and those of them in sealed pages. */
typedef struct kvc_progress {
    int64_t stored, sealed;
} kvc_progress;

/* Where a call leads it: tokens behind the call, those in sealed pages then, tokens of a page, residual pages. */
typedef struct kvc_leads {
    int64_t end, last, page, ring;
    bool in_place; /* no pages are sealed */
} kvc_leads;

/* To the end of its next part; false: of the last. A part ends where new tokens would fall on residual pages that are still
 * to be sealed; there are two at most. */
KVC_INLINE bool kvc_progress_on(const kvc_leads *to, kvc_progress *at)
{
    int64_t stop = to->end;
    if (!to->in_place) {
        int64_t limit = at->sealed + to->ring * to->page, whole;
        if (at->stored > at->sealed && to->last < to->end && limit < to->end) stop = limit;
        whole = stop / to->page * to->page;
        if (whole > to->last) whole = to->last;
        if (whole > at->sealed) at->sealed = whole;
    }
    at->stored = stop;
    return stop < to->end;
}

#endif
