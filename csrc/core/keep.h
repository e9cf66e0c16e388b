/* keep.h - selection of tokens to keep, and functions on stored tokens for policies. */
#ifndef KVC_KEEP_H
#define KVC_KEEP_H

#include "kvc.h"

#ifdef KVC_EXPORT
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* Selects the tokens to keep: all protected tokens of each line, then those with the highest scores, `budget` in all; of
 * equal scores the newer token. scores, slots (-1: no token), protect (or NULL), keep: [lines, width]; budget: [lines].
 * KVC_E_VALUE for a NaN score. */
kvc_status kvc_choose(const float *scores, const int32_t *slots, const uint8_t *protect, const int64_t *budget,
                      int64_t lines, int64_t width, uint8_t *keep);
/* Number of tokens that each head keeps if the `heads` of a sequence share a budget (AdaKV, arXiv 2407.11550): the protected
 * tokens and the floor[b] best (including protected ones) of each head, then the best of all heads, total[b] in all.
 * scores, slots, protect: [B, heads, width]; budgets: [B, heads]. KVC_E_VALUE for NaN. */
kvc_status kvc_share(const float *scores, const int32_t *slots, const uint8_t *protect, const int64_t *total,
                     const int64_t *floor, int64_t batch, int64_t heads, int64_t width, int64_t *budgets);

/* The stored tokens of a table, by index: slots and positions (number of tokens of the row before this one), -1: no token,
 * [B, 1 or H, width]; width at least kvc_table_longest(). runs: [n_runs] (row, begin, end), slots of padding, ascending. */
void kvc_table_tokens(const kvc_table *table, const int64_t *runs, int64_t n_runs, int64_t width, int32_t *slots,
                      int64_t *positions);

/* Mean scores per query that could see the token: out [B, H, width] = score / (real[b] - position), 0 without a token;
 * positions from kvc_table_tokens. KVC_E_VALUE for a table without scores. */
kvc_status kvc_table_means(const kvc_table *table, const int64_t *positions, const int64_t *real, int64_t width,
                           float *out);

/* Stored tokens, for the next two functions: [batch, line_heads, width] from kvc_table_tokens, with line_heads 1 (all heads
 * store the same tokens) or `heads`. Results are for `heads`. */
typedef struct kvc_tokens {
    int64_t batch, heads, line_heads, width;
    const int32_t *slots;
    const int64_t *positions;
} kvc_tokens;

/* x [batch, heads, width], set to 0 from position newest[b] on, pooled over `kernel` adjacent tokens in sequence order: their
 * mean (missing neighbours count as 0) or maximum; 0 without a token. Source: the pooling of SnapKV (arXiv 2404.14469). */
kvc_status kvc_smooth(const kvc_tokens *lines, const float *x, const int64_t *newest, int64_t kernel, bool largest,
                      float *out);

/* kvc_choose with protected tokens: the first `sinks` positions, those from newest[b] on, and `protect` (or NULL; shape of
 * keep). scores: [batch, score_heads, width]; with heads 1 their mean is used. budget: [batch, heads]. */
typedef struct kvc_keep_args {
    int64_t score_heads, sinks;
    const float *scores;
    const uint8_t *protect;
    const int64_t *budget, *newest;
} kvc_keep_args;
kvc_status kvc_keep_tokens(const kvc_tokens *lines, const kvc_keep_args *args, uint8_t *keep);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
