/* play.h - emulates a layer: a table, its calls of kvc_attend, evictions. Every result is compared with reference.h
 * over the stored values, and every stored token with the given one. */
#ifndef KVC_PLAY_H
#define KVC_PLAY_H

#include "harness.h"
#include "reference.h"

typedef struct play {
    kvc_pool *pool;
    kvc_table *t;
    kvc_spec spec;
    kvc_dtype dtype;
    int64_t batch, group, capacity; /* B, G, slots */
    float *given[2];                /* K, V: [B][H][capacity][dim] */
    uint8_t *live;                  /* [B][H][capacity] */
    double tolerance;               /* relative, of outputs */
    double loud;                    /* factor of an outlier channel in K; 0: none */
    float *score;                   /* as live, if the table keeps scores; else NULL */
    bool latent;                    /* calls on latents (MLA): K is the latents, V the rotary part */
} play;

typedef struct step {
    int64_t T, queries; /* queries: Tq; 0: T; -1: none */
    int64_t window;
    int64_t late; /* left padding of the last row */
    float softcap;
    bool aux, accumulated, pads, failures; /* failures: every allocation fails once first */
    bool wild, given; /* wild: NaN and Inf in some queries; given: accumulated attention with a given lse */
    kvc_dtype out;
    const kvc_exec *exec;
} step;

void play_open(play *p, kvc_pool *pool, const kvc_spec *spec, int64_t batch, int64_t group, int64_t capacity);
void play_step(play *p, const step *how);
/* Enables scores in the table; play_observe adds the attention of a step to them, after a decay. */
void play_keep_scores(play *p);
void play_observe(play *p, const float *received, int64_t width);
/* Keeps each token with a probability of `chance` / 8; separately for each head if `ragged`. to: formats for closed
 * pages (key << 8 | value), or -1. */
void play_evict(play *p, int64_t chance, bool ragged, int32_t to);
void play_crop(play *p, int64_t seen);
/* Checks that every live token is stored once, with its values up to the format's error; kvc_read must agree. */
void play_check(const play *p);
/* Plans an append of T tokens and returns its arguments, which play_end_call frees. */
kvc_attend_args play_plan_call(play *p, int64_t T, int64_t Tq, bool transposed);
void play_end_call(kvc_attend_args *a);
void play_close(play *p);

/* Shared by play.c and play_held.c: zeroed memory; the line of (b, h) in the table, the slot of its token i, the entry
 * of its page, and the page's contents; a dense array, and the offset of (b, h, t) in it. */
void *play_room(int64_t n, size_t size);
int64_t play_line(const kvc_table *t, int64_t b, int64_t h);
int64_t play_slot(const kvc_table *t, int64_t line, int64_t i);
int64_t play_entry(const play *p, int64_t b, int64_t h, int64_t i);
void play_row(const play *p, int64_t entry, int64_t h, int64_t i, int key_side, double *row);
kvc_dense play_dense(int64_t B, int64_t H, int64_t T, int64_t D, kvc_dtype dtype, bool transposed);
void *play_poison(int64_t n, size_t size); /* memory filled with NaN */
int64_t play_at(const kvc_dense *x, int64_t b, int64_t h, int64_t t);

/* Gives the call its own copy of the table, to modify and free. */
static inline int64_t *play_own_table(kvc_attend_args *a)
{
    int64_t n = a->store.batch * a->store.table_heads * a->store.columns, *table = play_room(n, sizeof *table);
    a->store.table = memcpy(table, a->store.table, (size_t)n * sizeof *table);
    return table;
}

/* Zero mean, unit variance, approximately normal; representable in `dtype`. */
float random_number(kvc_dtype dtype);
/* Four parts in two threads. */
extern const kvc_exec in_threads;
/* Whether the level is the scalar one, the reference. */
bool is_scalar(void);
/* Hash of everything that the level stored; all levels must agree. */
extern uint64_t stored_bytes;
void fold(const void *bytes, int64_t n);

#endif
