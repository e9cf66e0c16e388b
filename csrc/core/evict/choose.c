/* choose.c - selects the tokens to keep: the best of a line, or of several lines together, by score. O(N) and
 * deterministic. */
#include "base/alloc.h"
#include "keep.h"

#include <math.h>
#include <string.h>

typedef struct candidate {
    float score;
    int32_t slot, index;
} candidate;

/* Order: higher score, then younger, then lower index. No two candidates are equal. */
static bool better(const candidate *a, const candidate *b)
{
    if (a->score != b->score) return a->score > b->score;
    return a->slot != b->slot ? a->slot > b->slot : a->index < b->index;
}

static void swap(candidate *a, candidate *b)
{
    candidate c = *a;
    *a = *b;
    *b = c;
}

/* Moves the best `left` of n to the front, unordered (Hoare's quickselect, median of three as pivot). */
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
        int64_t front = j + 1; /* these are no worse than the rest */
        if (left < front)
            n = front;
        else {
            list += front;
            n -= front;
            left -= front;
        }
    }
}

/* Collects the tokens of a line that are candidates; marks those that stay in any case in `keep` and counts them in
 * *sure. */
static int64_t candidates(const float *scores, const int32_t *slots, const uint8_t *protect, int64_t at, int64_t width,
                          uint8_t *keep, candidate *list, int64_t *sure)
{
    int64_t n = 0;
    *sure = 0;
    for (int64_t i = at; i < at + width; i++) {
        bool stays = slots[i] >= 0 && protect && protect[i];
        keep[i] = stays;
        *sure += stays;
        if (slots[i] >= 0 && !stays) list[n++] = (candidate){scores[i], slots[i], (int32_t)i};
    }
    return n;
}

static kvc_status check_scores(const float *scores, const int32_t *slots, int64_t lines, int64_t width)
{
    for (int64_t i = 0; i < lines * width; i++)
        KVC_CHECK(slots[i] < 0 || !isnan(scores[i]), KVC_E_VALUE,
                  "select: scores: expected numbers, got NaN at token %lld of row %lld", (long long)(i % width),
                  (long long)(i / width));
    KVC_CHECK(lines * width <= INT32_MAX, KVC_E_VALUE, "select: scores: expected at most 2^31, got %lld",
              (long long)(lines * width));
    return KVC_OK;
}

kvc_status kvc_choose(const float *scores, const int32_t *slots, const uint8_t *protect, const int64_t *budget,
                      int64_t lines, int64_t width, uint8_t *keep)
{
    candidate *list;
    for (int64_t r = 0; r < lines; r++)
        KVC_CHECK(budget[r] >= 0, KVC_E_VALUE, "select: budget: expected 0 or more tokens, got %lld in row %lld",
                  (long long)budget[r], (long long)r);
    KVC_TRY(check_scores(scores, slots, lines, width));
    KVC_TRY(kvc_alloc(width, sizeof *list, &list));
    for (int64_t r = 0; r < lines; r++) {
        int64_t sure, n = candidates(scores, slots, protect, r * width, width, keep, list, &sure);
        best_first(list, n, budget[r] - sure);
        for (int64_t i = 0; i < n && i < budget[r] - sure; i++) keep[list[i].index] = 1;
    }
    kvc_free(list);
    return KVC_OK;
}

kvc_status kvc_share(const float *scores, const int32_t *slots, const uint8_t *protect, const int64_t *total,
                     const int64_t *floor, int64_t batch, int64_t heads, int64_t width, int64_t *budgets)
{
    candidate *list;
    uint8_t *keep;
    KVC_TRY(check_scores(scores, slots, batch * heads, width));
    KVC_TRY(kvc_alloc(heads * width, sizeof *list, &list));
    kvc_status status = kvc_alloc(batch * heads * width, sizeof *keep, &keep);
    for (int64_t b = 0; status == KVC_OK && b < batch; b++) {
        int64_t rest = 0, left = total[b], *budget = budgets + b * heads;
        for (int64_t h = 0; h < heads; h++) {
            candidate *mine = list + rest;
            int64_t sure, n = candidates(scores, slots, protect, (b * heads + h) * width, width, keep, mine, &sure);
            int64_t more = floor[b] - sure < 0 ? 0 : floor[b] - sure < n ? floor[b] - sure : n;
            best_first(mine, n, more);
            memmove(mine, mine + more, (size_t)(n - more) * sizeof *mine);
            budget[h] = sure + more;
            left -= budget[h];
            rest += n - more;
        }
        best_first(list, rest, left);
        for (int64_t i = 0; i < rest && i < left; i++) budget[list[i].index / width - b * heads]++;
    }
    kvc_free(keep);
    kvc_free(list);
    return status;
}
