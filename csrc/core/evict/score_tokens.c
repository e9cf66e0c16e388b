/* score_tokens.c - statistics of stored rows for policies (norms, cosines with their mean), computed tile by tile from
 * the pages, without a dense copy of the layer. Cost: decoding each tile and one multiply-add per element; the cosine
 * reads the pages twice. */
#include "base/alloc.h"
#include "attend/attend.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

typedef struct scorer {
    const kvc_store *s;
    int kind;
    int64_t width;
    float *out;
    atomic_bool failed;
} scorer;

/* Iterates over the tokens of a head, a tile at a time. */
typedef struct walk {
    const scorer *r;
    int64_t b, h;
    float *x, *rows; /* x: [dim][16]; rows: [16][dim], if the level has no tile kernels */
} walk;

static void decode_tile(const walk *w, const kvc_side *side, int64_t tile)
{
    const kvc_tile_kernels *kernels = kvc_kernels_get()->tile;
    if (kernels) {
        kernels->decode(side, tile, w->x);
        return;
    }
    kvc_decode(side, tile * KVC_TILE, KVC_TILE, w->rows);
    for (int64_t t = 0; t < KVC_TILE; t++)
        for (int64_t d = 0; d < side->dim; d++) w->x[d * KVC_TILE + t] = w->rows[t * side->dim + d];
}

typedef void visit(const float *x, int64_t dim, int64_t n, float *out, void *context);

static void each_tile(const walk *w, visit *look, void *context)
{
    const kvc_store *s = w->r->s;
    int64_t row = w->b * s->table_heads + (s->table_heads == 1 ? 0 : w->h), stored = s->rows[2 * row];
    float *out = w->r->out + (w->b * s->heads + w->h) * w->r->width;
    for (int64_t c = 0; c < kvc_columns_used(s, stored); c++) {
        int64_t first = kvc_column_first(c, s->sinks, s->page_size);
        int64_t n = kvc_min(kvc_column_size(c, s->sinks, s->page_size), stored - first);
        if (n <= 0) continue;
        kvc_page page = kvc_page_at(s, w->b, w->h, c);
        kvc_side side = kvc_side_of(s, &page, w->r->kind != KVC_VALUE_NORM);
        for (int64_t t = 0; t < n; t += KVC_TILE) {
            decode_tile(w, &side, t / KVC_TILE);
            look(w->x, side.dim, kvc_min(KVC_TILE, n - t), out + first + t, context);
        }
    }
}

static void dot(const float *x, int64_t dim, const float *y, float *out)
{
    const kvc_tile_kernels *kernels = kvc_kernels_get()->tile;
    if (kernels) {
        kernels->dot(x, dim, y, out);
        return;
    }
    for (int64_t t = 0; t < KVC_TILE; t++) out[t] = 0;
    for (int64_t d = 0; d < dim; d++)
        for (int64_t t = 0; t < KVC_TILE; t++) out[t] += x[d * KVC_TILE + t] * (y ? y[d] : x[d * KVC_TILE + t]);
}

/* Tokens from n on were never written: their results are computed but not stored. */
static void norms(const float *x, int64_t dim, int64_t n, float *out, void *unused)
{
    float square[KVC_TILE];
    (void)unused;
    dot(x, dim, NULL, square);
    for (int64_t t = 0; t < n; t++) out[t] = sqrtf(square[t]);
}

typedef struct centre {
    float lane[KVC_MAX_DIM * KVC_TILE], mean[KVC_MAX_DIM], length;
    const int32_t *slots; /* of the head's tokens; NULL if all are live */
    const float *begin;   /* start of the head's output */
} centre;

/* Adds the tile's rows, normalized to length 1. Stores 1 / length of each row, or 0 for dead tokens. */
static void add_units(const float *x, int64_t dim, int64_t n, float *out, void *context)
{
    centre *c = context;
    const kvc_tile_kernels *kernels = kvc_kernels_get()->tile;
    float factor[KVC_TILE] = {0};
    norms(x, dim, n, factor, NULL);
    for (int64_t t = 0; t < n; t++) {
        bool live = !c->slots || c->slots[out - c->begin + t] >= 0;
        out[t] = factor[t] = live ? 1 / fmaxf(factor[t], 1e-12f) : 0;
    }
    if (kernels && n == KVC_TILE) {
        kernels->add(x, dim, factor, c->lane);
        return;
    }
    for (int64_t d = 0; d < dim; d++) /* rows from n on may hold anything */
        for (int64_t t = 0; t < n; t++) c->lane[d * KVC_TILE + t] += x[d * KVC_TILE + t] * factor[t];
}

static void cosines(const float *x, int64_t dim, int64_t n, float *out, void *context)
{
    const centre *c = context;
    float sum[KVC_TILE];
    dot(x, dim, c->mean, sum);
    for (int64_t t = 0; t < n; t++) out[t] = out[t] > 0 ? sum[t] * out[t] / c->length : 0;
}

static void cosines_of(const walk *w, centre *c)
{
    const kvc_store *s = w->r->s;
    int64_t row = w->b * s->table_heads + (s->table_heads == 1 ? 0 : w->h);
    float square = 0;
    memset(c->lane, 0, sizeof c->lane);
    c->slots = s->slots ? s->slots + row * s->slot_capacity : NULL;
    c->begin = w->r->out + (w->b * s->heads + w->h) * w->r->width;
    each_tile(w, add_units, c);
    for (int64_t d = 0; d < s->key_dim; d++) {
        c->mean[d] = 0;
        for (int64_t t = 0; t < KVC_TILE; t++) c->mean[d] += c->lane[d * KVC_TILE + t];
        square += c->mean[d] * c->mean[d];
    }
    c->length = fmaxf(sqrtf(square), 1e-12f);
    each_tile(w, cosines, c);
}

static void score_heads(int64_t begin, int64_t end, void *context)
{
    scorer *r = context;
    const kvc_store *s = r->s;
    int64_t dim = kvc_max(s->key_dim, s->value_dim), rows = KVC_TILE * dim;
    float *block;
    if (kvc_scratch(2 * rows + (int64_t)(sizeof(centre) / sizeof(float)) + 16, sizeof *block, &block) != KVC_OK) {
        atomic_store(&r->failed, true);
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        walk w = {r, i / s->heads, i % s->heads, block, block + rows};
        memset(r->out + i * r->width, 0, (size_t)r->width * sizeof *r->out);
        if (r->kind == KVC_KEY_COSINE)
            cosines_of(&w, (centre *)(void *)(block + 2 * rows));
        else
            each_tile(&w, norms, NULL);
    }
    kvc_scratch_free(block);
}

/* Zeroes the results of dead tokens. */
static void clear_dead(const scorer *r)
{
    const kvc_store *s = r->s;
    for (int64_t i = 0; s->slots && i < s->batch * s->heads; i++) {
        int64_t row = i / s->heads * s->table_heads + (s->table_heads == 1 ? 0 : i % s->heads);
        for (int64_t t = 0; t < s->rows[2 * row]; t++)
            if (s->slots[row * s->slot_capacity + t] < 0) r->out[i * r->width + t] = 0;
    }
}

static kvc_status check_width(const scorer *r)
{
    for (int64_t i = 0; i < r->s->batch * r->s->table_heads; i++)
        KVC_CHECK(r->s->rows[2 * i] <= r->width, KVC_E_VALUE,
                  "score_tokens: width: expected the %lld tokens of row %lld, got %lld", (long long)r->s->rows[2 * i],
                  (long long)i, (long long)r->width);
    return KVC_OK;
}

kvc_status kvc_score_tokens(const kvc_store *store, int kind, int64_t width, float *out, const kvc_exec *exec)
{
    kvc_store s = *store;
    int64_t *indices;
    scorer r = {.s = &s, .kind = kind, .width = width, .out = out};
    const char *isa;
    KVC_TRY(kvc_isa(&isa));
    KVC_CHECK(kind >= 0 && kind < KVC_TOKEN_SCORES, KVC_E_VALUE, "score_tokens: kind: expected 0 to %d, got %d",
              KVC_TOKEN_SCORES - 1, kind);
    KVC_TRY(kvc_store_take(&s, 0, "score_tokens", &indices));
    kvc_status status = check_width(&r);
    int64_t heads = s.batch * s.heads;
    if (status == KVC_OK && width > 0) {
        kvc_run(exec, heads, heads * width * s.key_dim * 4, score_heads, &r);
        if (atomic_load(&r.failed)) status = kvc_no_workspace("score_tokens");
        if (status == KVC_OK) clear_dead(&r);
    }
    kvc_scratch_free(indices);
    return status;
}
