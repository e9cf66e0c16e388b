/* ops_attend.c - read, score_tokens and attend. Shapes are checked here, page contents in the core. */
#include "base/alloc.h"
#include "ops.h"
#include "base/status.h"

/* Fills the store from arguments at, at + 1, ...: arena, table, rows, slots. Dims and page geometry are set later. */
static kvc_status take_store(const kvc_frame *f, int at, kvc_store *s)
{
    const kvc_tensor *arena = &f->tensor[at], *table = arena + 1, *rows = arena + 2, *slots = arena + 3;
    KVC_TRY(kvc_op_expect_contiguous(f, at, "arena", 1u << KVC_T_U8, 1));
    KVC_TRY(kvc_op_expect_contiguous(f, at + 1, "table", 1u << KVC_T_I64, 3));
    KVC_TRY(kvc_op_expect_contiguous(f, at + 2, "rows", 1u << KVC_T_I64, 3));
    KVC_TRY(kvc_op_expect_contiguous(f, at + 3, "slots", 1u << KVC_T_I32, -1));
    KVC_CHECK(rows->size[0] == table->size[0] && rows->size[1] == table->size[1] && rows->size[2] == 2, KVC_E_VALUE,
              "%s: rows: expected [%lld, %lld, 2] as the table has, got [%lld, %lld, %lld]", f->op->name,
              (long long)table->size[0], (long long)table->size[1], (long long)rows->size[0], (long long)rows->size[1],
              (long long)rows->size[2]);
    KVC_CHECK(slots->numel == 0 ||
                  (slots->dim == 3 && slots->size[0] == table->size[0] && slots->size[1] == table->size[1]),
              KVC_E_VALUE, "%s: slots: expected [%lld, %lld, capacity] or an empty tensor, got another shape",
              f->op->name, (long long)table->size[0], (long long)table->size[1]);
    s->arena = arena->data;
    s->arena_bytes = arena->numel;
    s->table = table->data;
    s->rows = rows->data;
    s->slots = slots->numel ? slots->data : NULL;
    s->slot_capacity = slots->numel ? slots->size[2] : 0;
    s->batch = table->size[0];
    s->table_heads = table->size[1];
    s->columns = table->size[2];
    return KVC_OK;
}

/* The complete store: take_store, then heads, dims, width and the page geometry. */
static kvc_status take_all(const kvc_frame *f, int at, kvc_store *s, int64_t *width)
{
    const int64_t *i = f->integer + at + 4;
    *s = (kvc_store){.heads = i[0], .key_dim = i[1], .value_dim = i[2], .page_size = i[4], .sinks = i[5]};
    *width = i[3];
    KVC_TRY(take_store(f, at, s));
    KVC_CHECK(s->heads > 0 && s->heads <= 65536 && s->key_dim > 0 && s->key_dim <= KVC_MAX_DIM && s->value_dim > 0 &&
                  s->value_dim <= KVC_MAX_DIM && *width >= 0 && *width <= INT32_MAX,
              KVC_E_VALUE,
              "%s: expected heads from 1, head dims from 1 to %d and a width from 0 to 2^31, got H=%lld Dk=%lld "
              "Dv=%lld width=%lld",
              f->op->name, KVC_MAX_DIM, (long long)s->heads, (long long)s->key_dim, (long long)s->value_dim,
              (long long)*width);
    return KVC_OK;
}

kvc_status kvc_op_score_tokens(kvc_frame *f)
{
    kvc_store s;
    int64_t width;
    KVC_TRY(take_all(f, 0, &s, &width));
    int64_t size[3] = {s.batch, s.heads, width};
    void *out;
    KVC_TRY(kvc_op_output(f, KVC_T_F32, 3, size, &out));
    if (f->cuda) {
        int64_t kind = f->integer[10];
        KVC_CHECK(kind >= 0 && kind <= KVC_KEY_COSINE, KVC_E_VALUE, "%s: kind: expected 0 to 2, got %lld", f->op->name,
                  (long long)kind);
        return kvc_gpu_score_tokens(f, &s, (int)kind, width, out);
    }
    return kvc_score_tokens(&s, (int)f->integer[10], width, out, &kvc_op_exec);
}

kvc_status kvc_op_read(kvc_frame *f)
{
    kvc_store s;
    int64_t width;
    KVC_TRY(kvc_op_expect(f, 0, "like", KVC_T_FLOATS, -1));
    KVC_TRY(take_all(f, 1, &s, &width));
    kvc_dense out[2];
    for (int i = 0; i < 2; i++) {
        int64_t size[4] = {s.batch, s.heads, width, i ? s.value_dim : s.key_dim};
        out[i] = (kvc_dense){NULL, {s.heads * width * size[3], width * size[3], size[3]}, (kvc_dtype)f->tensor[0].type};
        KVC_TRY(kvc_op_output(f, f->tensor[0].type, 4, size, &out[i].data));
    }
    if (f->cuda) return kvc_gpu_read(f, &s, width, &out[0], &out[1]);
    return kvc_read(&s, width, &out[0], &out[1], &kvc_op_exec);
}

static kvc_status expect_size(const kvc_frame *f, int i, const char *name, int dim, int64_t wanted, const char *what)
{
    KVC_CHECK(f->tensor[i].size[dim] == wanted, KVC_E_VALUE, "%s: %s: expected %lld in dimension %d (%s), got %lld",
              f->op->name, name, (long long)wanted, dim, what, (long long)f->tensor[i].size[dim]);
    return KVC_OK;
}

enum {
    Q,
    K,
    V,
    ARENA,
    TABLE,
    ROWS,
    SLOTS,
    MASK,
    S_AUX, /* in accumulate_attention: lse */
    SEALS,
    SEEN, /* in attend_step: a tensor */
    PAGE_SIZE,
    SINKS,
    WINDOW,
    SCALE,
    SOFTCAP,
    ATTENTION_WIDTH,
    FORMATS,
    KEY_FEEDBACK, /* KEY_FEEDBACK and VALUE_FEEDBACK: in attend_feedback */
    VALUE_FEEDBACK,
    COUNTERS = KEY_FEEDBACK /* in attend_step */
};

/* Checks k and v (arguments k, k + 1) against the table, the mask of real tokens, and the seals. */
static kvc_status check_own(const kvc_frame *f, int k, int table, int mask, int seals)
{
    const int64_t *size = f->tensor[k].size;
    for (int d = 0; d < 3; d++) KVC_TRY(expect_size(f, k + 1, "v", d, size[d], "as k has"));
    KVC_TRY(expect_size(f, k, "k", 0, f->tensor[table].size[0], "sequences of the table"));
    KVC_CHECK(size[1] > 0, KVC_E_VALUE, "%s: expected at least one head, got none", f->op->name);
    KVC_TRY(kvc_op_expect_contiguous(f, seals, "seals", 1u << KVC_T_I64, 2));
    KVC_TRY(expect_size(f, seals, "seals", 1, 2, "raw entry, sealed entry"));
    if (!f->tensor[mask].numel) return KVC_OK;
    KVC_TRY(kvc_op_expect_contiguous(f, mask, "mask", 1u << KVC_T_BOOL, 2));
    KVC_TRY(expect_size(f, mask, "mask", 0, size[0], "sequences"));
    return expect_size(f, mask, "mask", 1, size[2], "the call's own tokens");
}

static kvc_status check_attend(const kvc_frame *f)
{
    const kvc_tensor *q = &f->tensor[Q], *k = &f->tensor[K];
    KVC_TRY(expect_size(f, Q, "q", 0, k->size[0], "sequences of k"));
    if (q->size[3] != k->size[3] + f->tensor[V].size[3]) /* latents: q has both parts of a key */
        KVC_TRY(expect_size(f, Q, "q", 3, k->size[3], "head dim of k"));
    KVC_CHECK(q->size[1] > 0, KVC_E_VALUE, "%s: expected at least one head, got none", f->op->name);
    return check_own(f, K, TABLE, MASK, SEALS);
}

/* Fills everything that is common to the attention ops; out and lse are set by the caller. */
static kvc_status take_attend(kvc_frame *f, kvc_attend_args *a)
{
    const kvc_tensor *t = f->tensor;
    *a = (kvc_attend_args){.seen = f->integer[SEEN],
                           .window = f->integer[WINDOW],
                           .scale = (float)f->real[SCALE],
                           .softcap = (float)f->real[SOFTCAP],
                           .exec = kvc_op_exec};
    a->store.page_size = f->integer[PAGE_SIZE];
    a->store.sinks = f->integer[SINKS];
    KVC_TRY(kvc_op_dense(f, Q, "q", &a->q));
    KVC_TRY(kvc_op_dense(f, K, "k", &a->k));
    KVC_TRY(kvc_op_dense(f, V, "v", &a->v));
    KVC_TRY(take_store(f, ARENA, &a->store));
    KVC_TRY(check_attend(f));
    a->store.heads = t[K].size[1];
    a->store.key_dim = t[K].size[3];
    a->store.value_dim = t[V].size[3];
    a->latent = t[Q].size[3] != t[K].size[3];
    int64_t out_dim = a->latent ? a->store.key_dim : a->store.value_dim;
    a->query_heads = t[Q].size[1];
    a->Tq = t[Q].size[2];
    a->T = t[K].size[2];
    a->real = t[MASK].numel ? t[MASK].data : NULL;
    a->seals = t[SEALS].data;
    a->n_seals = t[SEALS].size[0];
    a->out = (kvc_dense){NULL, {a->Tq * a->query_heads * out_dim, out_dim, a->query_heads * out_dim}, a->q.dtype};
    a->accumulated_width = f->integer[ATTENTION_WIDTH];
    KVC_CHECK(a->accumulated_width >= 0 && a->accumulated_width <= INT32_MAX, KVC_E_VALUE,
              "%s: attention_width: expected 0 (none) to 2^31 tokens, got %lld", f->op->name,
              (long long)a->accumulated_width);
    return KVC_OK;
}

static kvc_status accumulated_output(kvc_frame *f, kvc_attend_args *a)
{
    int64_t size[3] = {a->store.batch, a->store.heads, a->accumulated_width};
    void *accumulated;
    KVC_TRY(kvc_op_output(f, KVC_T_F32, 3, size, &accumulated));
    a->accumulated = a->accumulated_width ? accumulated : NULL;
    return KVC_OK;
}

/* Feedback matrices of K or V: [H, dim + 1, dim], or empty. */
static kvc_status take_feedback(const kvc_frame *f, int i, const char *name, int64_t heads, int64_t dim,
                                const float **to)
{
    const kvc_tensor *x = &f->tensor[i];
    *to = NULL;
    if (!x->numel) return KVC_OK;
    KVC_TRY(kvc_op_expect_contiguous(f, i, name, 1u << KVC_T_F32, 3));
    const int64_t size[3] = {heads, dim + 1, dim};
    for (int d = 0; d < 3; d++) KVC_TRY(expect_size(f, i, name, d, size[d], "[H, dim + 1, dim] of its rows"));
    *to = x->data;
    return KVC_OK;
}

/* seen: a word on the tensors' device that replaces the argument, or NULL. feedback: whether the op has these
 * arguments. */
static kvc_status attend(kvc_frame *f, const int64_t *seen, bool feedback)
{
    kvc_attend_args a;
    const kvc_tensor *s_aux = &f->tensor[S_AUX];
    const float *fed[2] = {NULL, NULL};
    KVC_TRY(take_attend(f, &a));
    if (seen && !f->cuda) {
        a.seen = *seen;
        while (a.n_seals && a.seals[2 * a.n_seals - 2] == KVC_NONE && a.seals[2 * a.n_seals - 1] == KVC_NONE)
            a.n_seals--;
    }
    if (s_aux->numel) {
        KVC_TRY(kvc_op_expect_contiguous(f, S_AUX, "s_aux", 1u << KVC_T_F32, 1));
        KVC_TRY(expect_size(f, S_AUX, "s_aux", 0, a.query_heads, "query heads"));
        a.s_aux = s_aux->data;
    }
    if (feedback) {
        KVC_TRY(take_feedback(f, KEY_FEEDBACK, "key_feedback", a.store.heads, a.store.key_dim, &fed[0]));
        KVC_TRY(take_feedback(f, VALUE_FEEDBACK, "value_feedback", a.store.heads, a.store.value_dim, &fed[1]));
    }
    int64_t out_size[4] = {a.store.batch, a.Tq, a.query_heads, a.out.stride[1]};
    int64_t lse_size[3] = {a.store.batch, a.query_heads, a.Tq};
    void *lse;
    KVC_TRY(kvc_op_output(f, f->tensor[Q].type, 4, out_size, &a.out.data));
    KVC_TRY(kvc_op_output(f, KVC_T_F32, 3, lse_size, &lse));
    a.lse = lse;
    KVC_TRY(accumulated_output(f, &a));
    if (f->cuda) return kvc_gpu_attend(f, &a, seen, seen ? &f->tensor[COUNTERS] : NULL, f->integer[FORMATS]);
    return kvc_attend_feedback(&a, fed[0], fed[1]);
}

kvc_status kvc_op_attend(kvc_frame *f) { return attend(f, NULL, false); }

kvc_status kvc_op_attend_feedback(kvc_frame *f)
{
    KVC_TRY(kvc_op_on_cpu(f));
    return attend(f, NULL, true);
}

/* Like attend, but everything that changes from step to step is in tensors, so a recorded call can be replayed. */
kvc_status kvc_op_attend_step(kvc_frame *f)
{
    KVC_TRY(kvc_op_expect_contiguous(f, SEEN, "seen", 1u << KVC_T_I64, 1));
    KVC_TRY(expect_size(f, SEEN, "seen", 0, 1, "the slot of the first own token"));
    KVC_TRY(kvc_op_expect_contiguous(f, COUNTERS, "counters", 1u << KVC_T_I32, 1));
    return attend(f, f->tensor[SEEN].data, false);
}

/* Runs attention again for accumulated attention only; out and lse are discarded. */
kvc_status kvc_op_accumulate_attention(kvc_frame *f)
{
    kvc_attend_args a;
    KVC_TRY(take_attend(f, &a));
    KVC_TRY(kvc_op_expect_contiguous(f, S_AUX, "lse", 1u << KVC_T_F32, 3));
    const int64_t size[3] = {a.store.batch, a.query_heads, a.Tq};
    for (int d = 0; d < 3; d++) KVC_TRY(expect_size(f, S_AUX, "lse", d, size[d], "[B, Hq, Tq] as q has"));
    a.given_lse = f->tensor[S_AUX].data;
    KVC_TRY(accumulated_output(f, &a));
    if (f->cuda) return kvc_gpu_attend(f, &a, NULL, NULL, 0);
    int64_t rows = size[0] * size[1] * size[2];
    float *out = NULL;
    KVC_TRY(kvc_alloc(rows, sizeof *a.lse, &a.lse));
    kvc_status status = kvc_alloc(rows * a.out.stride[1], sizeof *out, &out);
    a.out.data = out; /* large enough for any dtype */
    if (status == KVC_OK) status = kvc_attend(&a);
    kvc_free(out);
    kvc_free(a.lse);
    return status;
}
