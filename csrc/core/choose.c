/* choose.c - which tokens stay: the best of a line by score, in O(N log N) and always the same. */
#include "alloc.h"

#include <math.h>
#include <stdlib.h>

typedef struct candidate {
    float score;
    int32_t slot, index;
} candidate;

/* Best first: by score, then the younger. */
static int better(const void *left, const void *right)
{
    const candidate *a = left, *b = right;
    if (a->score != b->score) return a->score > b->score ? -1 : 1;
    return a->slot > b->slot ? -1 : a->slot < b->slot;
}

kvc_status kvc_choose(const float *scores, const int32_t *slots, const uint8_t *protect, const int64_t *budget,
                      int64_t lines, int64_t width, uint8_t *keep)
{
    candidate *list;
    for (int64_t r = 0; r < lines; r++) {
        KVC_CHECK(budget[r] >= 0, KVC_E_VALUE, "select: budget: wanted 0 or more tokens, got %lld in row %lld",
                  (long long)budget[r], (long long)r);
        for (int64_t i = r * width; i < (r + 1) * width; i++)
            KVC_CHECK(slots[i] < 0 || !isnan(scores[i]), KVC_E_VALUE,
                      "select: scores: wanted numbers, got NaN at token %lld of row %lld", (long long)(i - r * width),
                      (long long)r);
    }
    KVC_TRY(kvc_alloc(width, sizeof *list, &list));
    for (int64_t r = 0; r < lines; r++) {
        int64_t n = 0, left = budget[r];
        for (int64_t i = 0; i < width; i++) {
            int64_t at = r * width + i;
            bool sure = slots[at] >= 0 && protect && protect[at];
            keep[at] = sure;
            left -= sure;
            if (slots[at] >= 0 && !sure) list[n++] = (candidate){scores[at], slots[at], (int32_t)i};
        }
        if (left < n) qsort(list, (size_t)n, sizeof *list, better);
        for (int64_t i = 0; i < n && i < left; i++) keep[r * width + list[i].index] = 1;
    }
    kvc_free(list);
    return KVC_OK;
}
