/* attend_workspace.c - lays out the workspace of a worker. */
#include "attend_work.h"

float *kvc_cut(float *block, int64_t *used, int64_t floats)
{
    float *at = block ? block + *used : NULL;
    *used += (floats + 15) / 16 * 16;
    return at;
}

static void lay_out_query(const kvc_call *call, kvc_query *query, int64_t rows, float *block, int64_t *used)
{
    int64_t dim = query->dim;
    for (int space = KVC_PLAIN; space < KVC_SPACES; space++) {
        kvc_query_form *f = &query->forms[space];
        if (space && !call->key_spaces[space]) continue;
        f->q = kvc_cut(block, used, rows * dim);
        if (call->halves && call->kernels->halves && !space) {
            f->half = (uint16_t *)kvc_cut(block, used, rows * dim / 2);
            f->rest = (uint16_t *)kvc_cut(block, used, rows * dim / 2);
        }
        if (!call->limbs || !call->kernels->limbs) continue;
        f->hi = (int8_t *)kvc_cut(block, used, rows * dim / 2);
        f->lo = f->hi ? f->hi + rows * dim : NULL; /* NULL while the size is being computed */
        f->step = kvc_cut(block, used, rows);
        f->sum = (int32_t *)kvc_cut(block, used, rows);
        f->one = (int8_t *)kvc_cut(block, used, kvc_max(rows, KVC_WIDE) * dim / 4); /* a tile of rows is read */
        f->one_sum = (int32_t *)kvc_cut(block, used, rows);
        f->low_sum = (int32_t *)kvc_cut(block, used, rows);
    }
}

/* Buffers that each item needs for itself. */
static void lay_out_item(kvc_work *w, int64_t rows, float *block, int64_t *used)
{
    const kvc_call *call = w->at.job->call;
    int64_t padded = call->kernels->wide ? kvc_ceil_div(rows, KVC_WIDE) * KVC_WIDE : rows;
    for (int space = KVC_PLAIN; space < KVC_SPACES; space++)
        if (!space || call->value_spaces[space]) w->o[space] = kvc_cut(block, used, padded * kvc_out_dim(call));
    w->m = kvc_cut(block, used, rows);
    w->l = kvc_cut(block, used, rows);
    lay_out_query(call, &w->query, rows, block, used);
    if (call->a->latent) lay_out_query(call, &w->latent.query, rows, block, used);
}

int64_t kvc_work_lay_out(kvc_work *works, int64_t n, const kvc_job *job, float *block)
{
    const kvc_call *call = job->call;
    const kvc_store *s = &call->a->store;
    bool many = call->kernels->wide || (call->a->latent && call->kernels->panel);
    int64_t rows = job->block_tokens * job->group, Dk = s->key_dim, Dv = s->value_dim, used = 0;
    int64_t step = !many ? KVC_ROWS : call->kernels->wide && rows <= KVC_WIDE / 2 ? KVC_WIDE / 2 : KVC_WIDE;
    rows = kvc_ceil_div(rows, step) * step;
    kvc_work *w = works;
    *w = (kvc_work){.at = {.job = job, .item = -1}, .query = {.dim = Dk}, .latent = {.query = {.dim = Dv}}};
    int64_t page = kvc_max(s->page_size, kvc_sink_tokens(s->sinks));
    w->s = kvc_cut(block, &used, kvc_max(step * KVC_MAX_PAGE, rows * page));
    for (int i = 0; call->kernels->wide && i < (call->a->latent ? 3 : 2); i++)
        w->wide[i] = i && rows <= KVC_WIDE ? w->wide[0] : (uint8_t *)kvc_cut(block, &used, page * kvc_max(Dk, Dv) / 2);
    for (int side = 0; call->affine && side < 2; side++) {
        int64_t dim = side ? Dv : Dk;
        w->words[side] = (uint8_t *)kvc_cut(block, &used, page * dim / 4);
        w->affine[side].scale = kvc_cut(block, &used, page * dim / KVC_TILE); /* groups have at least 16 dims */
        w->affine[side].middle = kvc_cut(block, &used, page * dim / KVC_TILE);
    }
    if (call->a->latent) {
        w->latent.s = kvc_cut(block, &used, step * KVC_MAX_PAGE);
        kvc_latent_lay_out(w, block, &used);
    }
    for (int64_t i = 0; i < n; i++) {
        works[i] = works[0];
        lay_out_item(&works[i], rows, block, &used);
    }
    return used;
}
