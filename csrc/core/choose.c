/* choose.c - which tokens stay: the best of a line by score, in O(N) and always the same. */
#include "alloc.h"

#include <math.h>

typedef struct candidate {
    float score;
    int32_t slot, index;
} candidate;

/* By score, then the younger. Slots of a line differ, so no two candidates are equal. */
static bool better(const candidate *a, const candidate *b)
{
    return a->score != b->score ? a->score > b->score : a->slot > b->slot;
}

static void swap(candidate *a, candidate *b)
{
    candidate c = *a;
    *a = *b;
    *b = c;
}

/* The best `left` of n come first, in any order (Hoare's selection; the middle one of three as pivot). */
static void best_first(candidate *list, int64_t n, int64_t left)
{
    while (left > 0 && left < n) {
        candidate *middle = list + (n - 1) / 2, *last = list + n - 1;
        if (better(middle, list)) swap(middle, list);
        if (better(last, list)) swap(last, list);
        if (better(last, middle)) swap(last, middle);
        candidate pivot = *middle;
        int64_t i = -1, j = n;
        for (;;) {
            do i++;
            while (better(&list[i], &pivot));
            do j--;
            while (better(&pivot, &list[j]));
            if (i >= j) break;
            swap(&list[i], &list[j]);
        }
        int64_t front = j + 1; /* these are no worse than those behind */
        if (left < front)
            n = front;
        else {
            list += front;
            n -= front;
            left -= front;
        }
    }
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
        best_first(list, n, left);
        for (int64_t i = 0; i < n && i < left; i++) keep[r * width + list[i].index] = 1;
    }
    kvc_free(list);
    return KVC_OK;
}
