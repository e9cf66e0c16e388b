/* keep.h - which tokens stay, and what policies ask about those that are stored. */
#ifndef KVC_KEEP_H
#define KVC_KEEP_H

#include "kvc.h"

#ifdef KVC_EXPORT
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* Which tokens to keep: of each line the `budget` of highest score, ties for the younger; protected ones first of all,
 * and all of them. scores, slots (-1: no token), protect (or NULL), keep: [lines, width]; budget: [lines]. KVC_E_VALUE
 * on a score that is NaN. */
kvc_status kvc_choose(const float *scores, const int32_t *slots, const uint8_t *protect, const int64_t *budget,
                      int64_t lines, int64_t width, uint8_t *keep);
/* How many tokens each head keeps when the `heads` of a sequence share a budget (AdaKV, 2407.11550): of each head the
 * protected tokens and its best floor[b] (protected ones counted) are sure, then the best of all heads, until there are
 * total[b]. scores, slots, protect: [B, heads, width]; budgets: [B, heads]. KVC_E_VALUE on NaN. */
kvc_status kvc_share(const float *scores, const int32_t *slots, const uint8_t *protect, const int64_t *total,
                     const int64_t *floor, int64_t batch, int64_t heads, int64_t width, int64_t *budgets);

/* What a table stores, by index: slots (-1: no token) and positions, tokens of the row before this one (-1: no token),
 * [B, 1 or H, width]; width at least kvc_table_longest(). runs: [n_runs] (row, begin, end), slots of pads, ascending. */
void kvc_table_tokens(const kvc_table *table, const int64_t *runs, int64_t n_runs, int64_t width, int32_t *slots,
                      int64_t *positions);

/* Scores per query that could see the token: out [B, H, width] = score / (real[b] - position), 0 where no token is;
 * positions as kvc_table_tokens tells, KVC_E_VALUE for a table without scores. */
kvc_status kvc_table_means(const kvc_table *table, const int64_t *positions, const int64_t *real, int64_t width,
                           float *out);

/* Stored tokens, for the two that follow: [batch, line_heads, width] as kvc_table_tokens tells, of line_heads 1 (all heads
 * store the same) or `heads`, what results are for. */
typedef struct kvc_tokens {
    int64_t batch, heads, line_heads, width;
    const int32_t *slots;
    const int64_t *positions;
} kvc_tokens;

/* x [batch, heads, width], 0 from position newest[b] on, smoothed over the `kernel` tokens around each in the order of the
 * sequence: their mean (where there are fewer, as if the others were 0), or the largest; 0 where no token is. Source: the
 * pooling of SnapKV (2404.14469). */
kvc_status kvc_smooth(const kvc_tokens *lines, const float *x, const int64_t *newest, int64_t kernel, bool largest,
                      float *out);

/* kvc_choose with what stays in any case: the first `sinks` positions, those from newest[b] on, `protect` (or NULL, as
 * keep). scores: [batch, score_heads, width]; with heads 1 their mean counts. budget: [batch, heads]. */
typedef struct kvc_wish {
    int64_t score_heads, sinks;
    const float *scores;
    const uint8_t *protect;
    const int64_t *budget, *newest;
} kvc_wish;
kvc_status kvc_keep_tokens(const kvc_tokens *lines, const kvc_wish *wish, uint8_t *keep);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
