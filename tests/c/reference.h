/* reference.h - the stored formats and attention written a second time, in float64 and from page.h's text alone: nothing
 * of the library's arithmetic is used. */
#ifndef KVC_REFERENCE_H
#define KVC_REFERENCE_H

#include "kvc.h"

/* Small floats by their definition. */
double ref_half(uint16_t h);
double ref_element(kvc_dtype dtype, const void *array, int64_t i);
/* Puts `x` into element i of an array; x must be one that the dtype has. */
void ref_put(kvc_dtype dtype, void *array, int64_t i, float x);

/* What a page holds as token t of one side, [dim]. */
void ref_page_row(const uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                  int64_t page_size, int64_t t, double *row);
/* Half a step of the grid that token t's elements were rounded to, [dim]: how far a value may be off at most. */
void ref_page_steps(const uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                    int64_t page_size, int64_t t, double *half_step);
/* Rows of the standalone ops: packed codes and metadata side by side. */
void ref_quantized_row(int format, const uint8_t *codes, const uint8_t *meta, int64_t dim, double *row);

/* One query over n tokens that it sees: out [value_dim] and the natural log of the sum of exp(scores); weights [n]. */
typedef struct ref_tokens {
    int64_t n, key_dim, value_dim;
    const double *k, *v; /* [n][key_dim], [n][value_dim] */
    const bool *sees;    /* [n] */
} ref_tokens;
double ref_attend(const ref_tokens *tokens, const double *q, double scale, double softcap, const float *aux,
                  double *out, double *weights);

#endif
