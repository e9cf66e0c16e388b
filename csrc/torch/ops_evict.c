/* ops_evict.c - select, share, score_tokens and compact. */
#include "ops.h"
#include "base/status.h"
#include "keep.h"

/* Checks arguments 0 to 2: scores, slots, protect (or empty), [B, H, N]. */
static kvc_status take_scores(const kvc_frame *f)
{
    const kvc_tensor *scores = &f->tensor[0], *slots = scores + 1, *protect = scores + 2;
    KVC_TRY(kvc_op_expect_contiguous(f, 0, "scores", 1u << KVC_T_F32, 3));
    KVC_TRY(kvc_op_expect_contiguous(f, 1, "slots", 1u << KVC_T_I32, 3));
    if (protect->numel) KVC_TRY(kvc_op_expect_contiguous(f, 2, "protect", 1u << KVC_T_BOOL, 3));
    bool fits = true;
    for (int d = 0; d < 3; d++)
        fits = fits && slots->size[d] == scores->size[d] && (!protect->numel || protect->size[d] == scores->size[d]);
    KVC_CHECK(fits, KVC_E_VALUE,
              "%s: expected slots (and protect, if any) as scores [%lld, %lld, %lld], got other shapes", f->op->name,
              (long long)scores->size[0], (long long)scores->size[1], (long long)scores->size[2]);
    return KVC_OK;
}

/* Checks argument i: int64 [B], or [B, H]. */
static kvc_status take_counts(const kvc_frame *f, int i, const char *name, int dim)
{
    const int64_t *size = f->tensor[0].size;
    const kvc_tensor *t = &f->tensor[i];
    KVC_TRY(kvc_op_expect_contiguous(f, i, name, 1u << KVC_T_I64, dim));
    KVC_CHECK(t->size[0] == size[0] && (dim == 1 || t->size[1] == size[1]), KVC_E_VALUE,
              "%s: %s: expected the first dimensions of scores [%lld, %lld], got other shapes", f->op->name, name,
              (long long)size[0], (long long)size[1]);
    return KVC_OK;
}

kvc_status kvc_op_select(kvc_frame *f)
{
    const kvc_tensor *t = f->tensor;
    KVC_TRY(take_scores(f));
    KVC_TRY(take_counts(f, 3, "budget", 2));
    void *keep;
    KVC_TRY(kvc_op_output(f, KVC_T_BOOL, 3, t->size, &keep));
    if (f->cuda)
        return kvc_gpu_choose(f, t[0].data, t[1].data, t[2].numel ? t[2].data : NULL, t[3].data,
                              t->size[0] * t->size[1], t->size[2], keep);
    return kvc_choose(t[0].data, t[1].data, t[2].numel ? t[2].data : NULL, t[3].data, t->size[0] * t->size[1],
                      t->size[2], keep);
}

kvc_status kvc_op_share(kvc_frame *f)
{
    const kvc_tensor *t = f->tensor;
    KVC_TRY(kvc_op_on_cpu(f));
    KVC_TRY(take_scores(f));
    KVC_TRY(take_counts(f, 3, "total", 1));
    KVC_TRY(take_counts(f, 4, "floor", 1));
    void *budgets;
    KVC_TRY(kvc_op_output(f, KVC_T_I64, 2, t->size, &budgets));
    return kvc_share(t[0].data, t[1].data, t[2].numel ? t[2].data : NULL, t[3].data, t[4].data, t->size[0], t->size[1],
                     t->size[2], budgets);
}

kvc_status kvc_op_compact(kvc_frame *f)
{
    const kvc_tensor *arena = &f->tensor[0], *moves = arena + 1;
    KVC_TRY(kvc_op_expect_contiguous(f, 0, "arena", 1u << KVC_T_U8, 1));
    KVC_TRY(kvc_op_expect_contiguous(f, 1, "moves", 1u << KVC_T_I64, 2));
    KVC_CHECK(moves->size[1] == sizeof(kvc_move) / sizeof(int64_t), KVC_E_VALUE,
              "compact: moves: expected [n, 6] (line, from, token, to, token, tokens of the page), got [%lld, %lld]",
              (long long)moves->size[0], (long long)moves->size[1]);
    kvc_store s = {.arena = arena->data,
                   .arena_bytes = arena->numel,
                   .heads = f->integer[2],
                   .table_heads = f->integer[3],
                   .key_dim = f->integer[4],
                   .value_dim = f->integer[5],
                   .page_size = f->integer[6],
                   .sinks = f->integer[7]};
    if (f->cuda) return kvc_gpu_compact(f, &s, moves->data, moves->size[0]);
    return kvc_compact(&s, moves->data, moves->size[0], &kvc_op_exec);
}
