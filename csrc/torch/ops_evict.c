/* ops_evict.c - select and compact. */
#include "ops.h"
#include "status.h"

kvc_status kvc_op_select(kvc_frame *f)
{
    const kvc_tensor *scores = &f->tensor[0], *slots = scores + 1, *protect = scores + 2, *budget = scores + 3;
    KVC_TRY(kvc_op_expect_contiguous(f, 0, "scores", 1u << KVC_T_F32, 3));
    KVC_TRY(kvc_op_expect_contiguous(f, 1, "slots", 1u << KVC_T_I32, 3));
    KVC_TRY(kvc_op_expect_contiguous(f, 3, "budget", 1u << KVC_T_I64, 2));
    bool fits = protect->numel == 0;
    if (!fits) {
        KVC_TRY(kvc_op_expect_contiguous(f, 2, "protect", 1u << KVC_T_BOOL, 3));
        fits = protect->size[0] == scores->size[0] && protect->size[1] == scores->size[1] &&
               protect->size[2] == scores->size[2];
    }
    for (int d = 0; d < 3; d++) fits = fits && slots->size[d] == scores->size[d];
    for (int d = 0; d < 2; d++) fits = fits && budget->size[d] == scores->size[d];
    KVC_CHECK(fits, KVC_E_VALUE,
              "select: wanted slots (and protect, if any) as scores [%lld, %lld, %lld] and a budget of its first two "
              "dimensions, got other shapes",
              (long long)scores->size[0], (long long)scores->size[1], (long long)scores->size[2]);
    void *keep;
    KVC_TRY(kvc_op_output(f, KVC_T_BOOL, 3, scores->size, &keep));
    if (f->cuda)
        return kvc_gpu_choose(f, scores->data, slots->data, protect->numel ? protect->data : NULL, budget->data,
                              scores->size[0] * scores->size[1], scores->size[2], keep);
    return kvc_choose(scores->data, slots->data, protect->numel ? protect->data : NULL, budget->data,
                      scores->size[0] * scores->size[1], scores->size[2], keep);
}

kvc_status kvc_op_compact(kvc_frame *f)
{
    const kvc_tensor *arena = &f->tensor[0], *moves = arena + 1;
    KVC_TRY(kvc_op_expect_contiguous(f, 0, "arena", 1u << KVC_T_U8, 1));
    KVC_TRY(kvc_op_expect_contiguous(f, 1, "moves", 1u << KVC_T_I64, 2));
    KVC_CHECK(moves->size[1] == sizeof(kvc_move) / sizeof(int64_t), KVC_E_VALUE,
              "compact: moves: wanted [n, 6] (line, from, token, to, token, tokens of the page), got [%lld, %lld]",
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
