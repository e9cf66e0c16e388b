/* play.h - plays the layer: a table, its calls of kvc_attend, evictions; every result is held against reference.h, on the
 * values that the pages hold, and every stored token against the one that was given. */
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
    double tolerance;               /* of outputs, relative */
    double loud;                    /* an outlier channel's factor in K; 0 none */
    float *score;                   /* as live, where the table keeps scores; NULL else */
    bool latent;                    /* calls of latents (MLA): K the latents, V the rotary part */
} play;

typedef struct step {
    int64_t T, queries; /* queries: Tq; 0: T; -1: none */
    int64_t window;
    int64_t late; /* pads on the left of the last row */
    float softcap;
    bool aux, mass, pads, failures; /* failures: every allocation fails once first */
    bool wild, given;               /* NaN and Inf in some queries; the mass against a given lse */
    kvc_dtype out;
    const kvc_exec *exec;
} step;

void play_open(play *p, kvc_pool *pool, const kvc_spec *spec, int64_t batch, int64_t group, int64_t capacity);
void play_step(play *p, const step *how);
/* Enables scores in the table; play_observe adds the attention of a step to them, after a decay. */
void play_keep_scores(play *p);
void play_observe(play *p, const float *received, int64_t width);
/* Each token stays with `chance` of 8; each head for itself if `ragged`. to: formats that closed pages get (key << 8 |
 * value) or -1. */
void play_evict(play *p, int64_t chance, bool ragged, int32_t to);
void play_crop(play *p, int64_t seen);
/* Every live token is stored once, as it was given but for its format's error; kvc_read says the same. */
void play_check(const play *p);
/* A planned append of T tokens, and its arguments, which play_end_call frees. */
kvc_attend_args play_plan_call(play *p, int64_t T, int64_t Tq, bool transposed);
void play_end_call(kvc_attend_args *a);
void play_close(play *p);

/* Shared by play.c and play_held.c: cleared memory; the line of (b, h) in the table, the slot of its token i, the entry of the
 * page that it is in, and what that holds; a dense array, and where (b, h, t) is in it. */
void *play_room(int64_t n, size_t size);
int64_t play_line(const kvc_table *t, int64_t b, int64_t h);
int64_t play_slot(const kvc_table *t, int64_t line, int64_t i);
int64_t play_entry(const play *p, int64_t b, int64_t h, int64_t i);
void play_row(const play *p, int64_t entry, int64_t h, int64_t i, int key_side, double *row);
kvc_dense play_dense(int64_t B, int64_t H, int64_t T, int64_t D, kvc_dtype dtype, bool transposed);
void *play_poison(int64_t n, size_t size); /* memory full of NaN */
int64_t play_at(const kvc_dense *x, int64_t b, int64_t h, int64_t t);

/* The call gets a table of its own, to spoil and to free. */
static inline int64_t *play_own_table(kvc_attend_args *a)
{
    int64_t n = a->store.batch * a->store.table_heads * a->store.columns, *table = play_room(n, sizeof *table);
    a->store.table = memcpy(table, a->store.table, (size_t)n * sizeof *table);
    return table;
}

/* Zero mean, unit variance, about normal; one that `dtype` has. */
float random_number(kvc_dtype dtype);
/* Four parts in two threads. */
extern const kvc_exec in_threads;
/* The level's name, and whether it is the oracle. */
bool is_scalar(void);
/* What the level stored, folded into one number; the levels must agree. */
extern uint64_t stored_bytes;
void fold(const void *bytes, int64_t n);

#endif
