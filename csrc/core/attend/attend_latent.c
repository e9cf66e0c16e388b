/* attend_latent.c - prepares a page of latents (MLA) for attention. The key is the latent (stored as K) and the rotary
 * part (stored as V); the value is the latent. V is therefore used for scores and K is summed, so each side is
 * converted to the other side's layout: as it is if the level has a kernel for the format, otherwise as fp32. The cost,
 * once per page, is small compared with the products for all query heads. */
#include "attend_work.h"

#include <string.h>

/* Floats needed to hold one side of a page as fp32. */
static int64_t side_floats(const kvc_store *s, int64_t dim)
{
    return kvc_max(s->page_size, kvc_sink_tokens(s->sinks)) * dim;
}

void kvc_latent_lay_out(kvc_work *w, float *block, int64_t *used)
{
    const kvc_store *s = &w->at.job->call->a->store;
    kvc_latent *x = &w->latent;
    x->room[0] = (uint8_t *)kvc_cut(block, used, side_floats(s, s->value_dim));
    x->room[1] = (uint8_t *)kvc_cut(block, used, side_floats(s, s->key_dim));
    x->meta = (uint8_t *)kvc_cut(block, used, side_floats(s, s->value_dim)); /* at least the metadata of any format */
    x->mean_room = kvc_cut(block, used, s->key_dim);
    x->tile = kvc_cut(block, used, KVC_TILE * kvc_max(s->key_dim, s->value_dim));
    for (int i = 0; kvc_panel_kernels_of(w) && i < 3; i++)
        x->panel_room[i] = (uint8_t *)kvc_cut(block, used, side_floats(s, i == 1 ? s->value_dim : s->key_dim) / 4);
}

/* [16 tokens][dim] to [dim][16 tokens]. */
static void transpose(const float *rows, int64_t dim, float *to)
{
    for (int64_t t = 0; t < KVC_TILE; t++)
        for (int64_t d = 0; d < dim; d++) to[d * KVC_TILE + t] = rows[t * dim + d];
}

/* Decodes the first n tokens of a side to fp32 in the other side's layout. */
static kvc_side as_floats(kvc_work *w, const kvc_side *side, int64_t n, uint8_t *room)
{
    const kvc_tile_kernels *kernels = w->at.job->call->kernels->tile;
    int64_t D = side->dim;
    float *to = (float *)(void *)room;
    if (side->key) {
        uint8_t *row[KVC_MAX_PAGE] = {0};
        for (int64_t t = 0; t < n; t++) row[t] = (uint8_t *)(to + t * D);
        kvc_decode_page(side, n, KVC_F32, row, false, w->latent.tile);
    }
    for (int64_t t = 0; !side->key && t < n; t += KVC_TILE)
        if (kernels) {
            kernels->decode(side, t / KVC_TILE, to + t * D);
        } else {
            kvc_decode(side, t, KVC_TILE, w->latent.tile);
            transpose(w->latent.tile, D, to + t * D);
        }
    return (kvc_side){KVC_RAW_F32, !side->key, D, side->page_size, room, NULL};
}

/* A tile of 16-bit values: words of two dims of a token become words of two tokens of a dim, or the other way round. */
static void turn_halves(const kvc_side *side, const uint32_t *from, uint32_t *to)
{
    int64_t D = side->dim;
    for (int64_t pair = 0; pair < KVC_TILE / 2; pair++)
        for (int64_t d = 0; d < D; d += 2) {
            int64_t k = d / 2 * KVC_TILE + 2 * pair, v = pair * D + d;
            const uint32_t *x = from + (side->key ? k : v);
            uint32_t *y = to + (side->key ? v : k);
            y[0] = (x[0] & 0xffff) | x[1] << 16;
            y[1] = x[0] >> 16 | (x[1] & 0xffff0000);
        }
}

static kvc_side turned(kvc_work *w, const kvc_side *side, int64_t n, uint8_t *room)
{
    const kvc_kernels *kernels = w->at.job->call->kernels;
    int f = side->format;
    bool own = side->key ? kernels->pv[f] != NULL : kernels->qk[f] != NULL;
    if (kvc_format_is_raw(f)) own = kernels->wide && kernels->wide->qk[f]; /* else fp32 takes no longer */
    if (!own || !kernels->tile) return as_floats(w, side, n, room);
    for (int64_t t = 0; t < n; t += KVC_TILE) {
        int64_t at = t / KVC_TILE * kvc_tile_bytes(f, side->dim);
        if (kvc_format_is_raw(f))
            turn_halves(side, (const uint32_t *)(const void *)(side->tiles + at), (uint32_t *)(void *)(room + at));
        else
            kernels->tile->turn(side, t / KVC_TILE, room + at);
    }
    return (kvc_side){f, !side->key, side->dim, side->page_size, room, side->meta};
}

/* Packs the latents for both roles, and the rotary part if supported. Returns false if the level has no kernels for the
 * format. */
static bool pack(kvc_work *w, const kvc_side *key, const kvc_side *value, int64_t n)
{
    const kvc_kernels *kernels = w->at.job->call->kernels;
    kvc_latent *x = &w->latent;
    if (!kernels->panel->pack(key, n, false, x->panel_room[0], &x->keys)) return false;
    kernels->panel->pack(key, n, true, x->panel_room[2], &x->sums);
    x->rotary_packed = kernels->panel->pack(value, n, false, x->panel_room[1], &x->rotary_keys);
    if (x->keys.centroid) { /* transform to the space of the codes */
        kvc_load_rows(x->keys.centroid, 0, KVC_F16, 1, key->dim, x->mean_room);
        kernels->rotate(x->mean_room, 1, key->dim);
        x->sums.mean = x->mean_room;
    }
    return true;
}

void kvc_latent_begin(kvc_work *w, const kvc_side *key, const kvc_side *value, int64_t n)
{
    kvc_latent *x = &w->latent;
    x->mean = NULL;
    x->packed = kvc_panel_kernels_of(w) && pack(w, key, value, n);
    x->values = x->packed ? *key : turned(w, key, n, x->room[1]);
    if (x->packed && x->rotary_packed) return;
    x->rotary = turned(w, value, n, x->room[0]);
    if (x->rotary.meta && kvc_format_traits(value->format).keys == KVC_KEYS_CENTRED) { /* V stores no mean: use 0 */
        int64_t page = value->page_size, tokens = kvc_meta_bytes(value->format, 0, value->dim, page);
        memcpy(x->meta, value->meta, (size_t)tokens);
        memset(x->meta + tokens, 0, (size_t)(kvc_meta_bytes(value->format, 1, value->dim, page) - tokens));
        x->rotary.meta = x->meta;
    }
    if (!x->packed && x->values.meta && kvc_format_traits(key->format).keys == KVC_KEYS_CENTRED) {
        x->mean = x->mean_room;
        kvc_load_rows(key->meta + kvc_token_meta_bytes(kvc_format_traits(key->format), 1, key->dim, key->page_size), 0,
                      KVC_F16, 1, key->dim, x->mean);
    }
}

void kvc_latent_add_mean(const kvc_work *w, const float *p, int64_t ld, int64_t rows, int64_t n, float *o)
{
    const kvc_kernels *kernels = w->at.job->call->kernels;
    int64_t D = w->query.dim;
    float sum[KVC_ROWS * KVC_TILE] = {0}; /* treated as a page of one token */
    for (int64_t r0 = 0; r0 < rows; r0 += KVC_ROWS) {
        int64_t some = kvc_min(KVC_ROWS, rows - r0);
        for (int64_t r = 0; r < some; r++) {
            float part[KVC_TILE] = {0};
            for (int64_t t = 0; t < n; t += KVC_TILE)
                for (int64_t i = 0; i < KVC_TILE; i++) part[i] += p[(r0 + r) * ld + t + i];
            sum[r * KVC_TILE] = 0;
            for (int64_t i = 0; i < KVC_TILE; i++) sum[r * KVC_TILE] += part[i];
        }
        kernels->pv[KVC_RAW_F32](&(kvc_pv_args){(const uint8_t *)w->latent.mean, NULL, sum, KVC_TILE, some, D, KVC_TILE,
                                                1, KVC_P_EXACT, 0, o + r0 * D, NULL, false, false});
    }
}
