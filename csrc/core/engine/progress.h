/* progress.h - how a call that appends to an engine's sequence is split into parts. Also included by CUDA. */
#ifndef KVC_PROGRESS_H
#define KVC_PROGRESS_H

#include "page.h"

#include <stdbool.h>

/* Progress of a sequence: tokens, and tokens in sealed pages. */
typedef struct kvc_progress {
    int64_t stored, sealed;
} kvc_progress;

/* Target of a call: tokens after it, tokens in sealed pages after it, tokens per page, residual pages. */
typedef struct kvc_leads {
    int64_t end, last, page, ring;
    bool in_place; /* no pages are sealed */
} kvc_leads;

/* Advances to the end of the next part; false if it was the last. A part ends where new tokens would overwrite residual
 * pages that are not sealed yet. There are at most two parts. */
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
