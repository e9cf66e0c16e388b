/* keep.c - queries of policies about the tokens of a table, each one pass over all lines: positions, scores smoothed
 * over neighbours, and the tokens to keep. Linear in the number of tokens. */
#include "keep.h"
#include "attend/attend.h"
#include "table/table.h"

#include <string.h>

/* Number of tokens of row b before `slot`. `runs` of padding (row, start, end), ascending, do not count. */
static int64_t position_of(int64_t slot, int64_t b, const int64_t *runs, int64_t n)
{
    int64_t pads = 0;
    for (const int64_t *run = runs; run < runs + 3 * n && run[0] <= b; run += 3)
        if (run[0] == b && slot > run[1]) pads += kvc_min(slot, run[2]) - run[1];
    return slot - pads;
}

void kvc_table_tokens(const kvc_table *t, const int64_t *runs, int64_t n_runs, int64_t width, int32_t *slots,
                      int64_t *positions)
{
    for (int64_t line = 0; line < kvc_lines(t); line++) {
        int64_t n = t->rows[2 * line], first = t->rows[2 * line + 1], b = line / t->table_heads;
        const int32_t *known = t->slots ? t->slots + line * t->slot_capacity : NULL;
        for (int64_t i = 0; i < width; i++, slots++, positions++) {
            *slots = i >= n ? -1 : known ? known[i] : (int32_t)(first + i);
            *positions = *slots < 0 ? -1 : n_runs ? position_of(*slots, b, runs, n_runs) : *slots;
        }
    }
}

kvc_status kvc_table_means(const kvc_table *t, const int64_t *positions, const int64_t *real, int64_t width, float *out)
{
    KVC_CHECK(t->scores && width <= t->score_capacity, KVC_E_VALUE,
              "means: expected a table that keeps scores, and at most %lld of a row, got %lld",
              (long long)(t->scores ? t->score_capacity : 0), (long long)width);
    for (int64_t r = 0; r < t->batch * t->spec.heads; r++, out += width) {
        int64_t b = r / t->spec.heads;
        const float *scores = t->scores + r * t->score_capacity;
        const int64_t *at = positions + (t->table_heads == 1 ? b : r) * width;
        for (int64_t i = 0; i < width; i++) out[i] = at[i] < 0 ? 0 : scores[i] / (float)kvc_max(1, real[b] - at[i]);
    }
    return KVC_OK;
}

/* ---------------------------------------------------------------- in sequence order */

#define DIGIT 11 /* bits per radix sort pass */

/* Indices of the live tokens of a line, sorted by slot. Both arrays have room for `width`. */
static int64_t by_slot(const int32_t *slots, int64_t width, int32_t *order, int32_t *spare)
{
    int64_t n = 0;
    uint32_t most = 0;
    for (int64_t i = 0; i < width; i++)
        if (slots[i] >= 0) {
            order[n++] = (int32_t)i;
            if ((uint32_t)slots[i] > most) most = (uint32_t)slots[i];
        }
    int32_t *from = order, *to = spare;
    for (int shift = 0; shift < 32 && most >> shift; shift += DIGIT) {
        int64_t place[(1 << DIGIT) + 1] = {0}, mask = (1 << DIGIT) - 1;
        for (int64_t i = 0; i < n; i++) place[1 + (slots[from[i]] >> shift & mask)]++;
        for (int64_t d = 1; d <= mask; d++) place[d] += place[d - 1];
        for (int64_t i = 0; i < n; i++) to[place[slots[from[i]] >> shift & mask]++] = from[i];
        int32_t *other = from;
        from = to;
        to = other;
    }
    if (from != order) memcpy(order, from, (size_t)n * sizeof *order);
    return n;
}

static float mean_of(const float *x, int64_t begin, int64_t end, int64_t kernel)
{
    float sum = 0;
    for (int64_t i = begin; i < end; i++) sum += x[i];
    return sum / (float)kernel;
}

static float most_of(const float *x, int64_t begin, int64_t end)
{
    float most = x[begin];
    for (int64_t i = begin + 1; i < end; i++)
        if (x[i] > most) most = x[i];
    return most;
}

kvc_status kvc_smooth(const kvc_tokens *l, const float *x, const int64_t *newest, int64_t kernel, bool largest,
                      float *out)
{
    KVC_CHECK(kernel > 0 && kernel % 2, KVC_E_VALUE, "smooth: kernel: expected an odd number, got %lld",
              (long long)kernel);
    int32_t *order;
    float *row;
    KVC_TRY(kvc_alloc(2 * l->width, sizeof *order, &order));
    kvc_status status = kvc_alloc(l->width, sizeof *row, &row);
    int64_t n = 0;
    for (int64_t r = 0; status == KVC_OK && r < l->batch * l->heads; r++) {
        int64_t b = r / l->heads, line = l->line_heads == 1 ? b : r;
        const int32_t *slots = l->slots + line * l->width;
        const int64_t *positions = l->positions + line * l->width;
        if (r == 0 || l->line_heads > 1 || r % l->heads == 0) n = by_slot(slots, l->width, order, order + l->width);
        for (int64_t i = 0; i < n; i++) row[i] = positions[order[i]] < newest[b] ? x[r * l->width + order[i]] : 0;
        memset(out + r * l->width, 0, (size_t)l->width * sizeof *out);
        for (int64_t i = 0; i < n; i++) {
            int64_t begin = kvc_max(0, i - kernel / 2), end = kvc_min(n, i + kernel / 2 + 1);
            out[r * l->width + order[i]] = largest ? most_of(row, begin, end) : mean_of(row, begin, end, kernel);
        }
    }
    kvc_free(row);
    kvc_free(order);
    return status;
}

/* ---------------------------------------------------------------- tokens to keep */

/* The scores of a line; the mean over the heads if the line stands for all of them. */
static void line_score(const kvc_tokens *l, const float *scores, int64_t score_heads, int64_t r, float *out)
{
    if (score_heads == l->heads) {
        memcpy(out, scores + r * l->width, (size_t)l->width * sizeof *out);
        return;
    }
    const float *x = scores + r * score_heads * l->width;
    for (int64_t i = 0; i < l->width; i++) {
        float sum = 0;
        for (int64_t h = 0; h < score_heads; h++) sum += x[h * l->width + i];
        out[i] = sum / (float)score_heads;
    }
}

kvc_status kvc_keep_tokens(const kvc_tokens *l, const kvc_keep_args *w, uint8_t *keep)
{
    int64_t lines = l->batch * l->heads, n = lines * l->width;
    float *scores;
    KVC_TRY(kvc_alloc(n, sizeof *scores + sizeof(int32_t) + 1, &scores));
    int32_t *slots = (int32_t *)(void *)(scores + n);
    uint8_t *protect = (uint8_t *)(slots + n);
    for (int64_t r = 0; r < lines; r++) {
        int64_t b = r / l->heads, at = r * l->width, line = (l->line_heads == 1 ? b : r) * l->width;
        line_score(l, w->scores, w->score_heads, r, scores + at);
        memcpy(slots + at, l->slots + line, (size_t)l->width * sizeof *slots);
        for (int64_t i = 0; i < l->width; i++) {
            int64_t position = l->positions[line + i];
            protect[at + i] = position < w->sinks || position >= w->newest[b] || (w->protect && w->protect[at + i]);
        }
    }
    kvc_status status = kvc_choose(scores, slots, protect, w->budget, lines, l->width, keep);
    kvc_free(scores);
    return status;
}
