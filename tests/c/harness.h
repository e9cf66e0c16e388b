/* harness.h - shared by the C tests: checks that end the program, and reproducible random numbers. */
#ifndef KVC_HARNESS_H
#define KVC_HARNESS_H

#include "base/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whether new memory is filled with NaN; not with tools that detect uninitialized reads themselves. */
#ifdef KVC_UNPOISONED
enum { POISON = 0 };
#else
enum { POISON = 1 };
#endif

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, kvc_error());              \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define OK(call) CHECK((call) == KVC_OK)
#define FAILS(status, text, call) CHECK((call) == (status) && strstr(kvc_error(), text))
#define MB ((int64_t)1 << 20)

static inline int64_t random_below(int64_t n)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (int64_t)(state % (uint64_t)n);
}

void test_pools(void);
void test_spaces(void);
void test_tables(void);
void test_restores(void);
void test_evictions(void);
void test_moves(void);
void test_codecs(void);
void test_attention(void);
void test_arguments(void);
void test_driver(void);
void test_edges(void);
void test_rest(void);
void test_granular(void);
void test_latents(void);
void test_fed_back(void);
void test_keep(void);
void test_prefixes(void);

#endif
