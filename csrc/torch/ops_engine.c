/* ops_engine.c - attend_varlen and store_tokens: ops on the blocks of an inference engine. */
#include "ops.h"
#include "base/status.h"

/* Argument i: uint8 [blocks, bytes] with any stride between blocks. May be empty. */
static kvc_status take_blocks(const kvc_frame *f, int i, const char *name, int64_t block_size, int64_t page_size,
                              kvc_blocks *b)
{
    const kvc_tensor *t = &f->tensor[i];
    if (t->numel == 0) return KVC_OK;
    KVC_TRY(kvc_op_expect(f, i, name, 1u << KVC_T_U8, 2));
    KVC_CHECK(t->size[1] == 1 || t->stride[1] == 1, KVC_E_VALUE,
              "%s: %s: expected [blocks, bytes] with bytes side by side, got stride %lld", f->op->name, name,
              (long long)t->stride[1]);
    KVC_CHECK(page_size > 0 && block_size > 0 && block_size % page_size == 0, KVC_E_VALUE,
              "%s: %s: expected blocks of whole pages, got %lld tokens with pages of %lld", f->op->name, name,
              (long long)block_size, (long long)page_size);
    b->data = t->data;
    b->blocks = t->size[0];
    b->bytes = t->size[1];
    b->stride = t->size[0] > 1 ? t->stride[0] : kvc_align(t->size[1]);
    b->pages = block_size / page_size;
    return KVC_OK;
}

static kvc_status take_table(const kvc_frame *f, int i, const char *name, int64_t batch, kvc_blocks *b)
{
    const kvc_tensor *t = &f->tensor[i];
    KVC_TRY(kvc_op_expect(f, i, name, 1u << KVC_T_I32, 2));
    KVC_CHECK(t->size[0] == batch && (t->size[1] <= 1 || t->stride[1] == 1), KVC_E_VALUE,
              "%s: %s: expected [%lld, width] with rows side by side, got %lld rows", f->op->name, name,
              (long long)batch, (long long)t->size[0]);
    b->table = t->data;
    b->table_width = t->size[1];
    b->table_stride = t->stride[0];
    return KVC_OK;
}

/* Argument i: [tokens, heads, dim], as [1, heads, tokens, dim]. */
static kvc_status take_tokens(const kvc_frame *f, int i, const char *name, kvc_dense *x)
{
    const kvc_tensor *t = &f->tensor[i];
    KVC_TRY(kvc_op_expect(f, i, name, KVC_T_FLOATS, 3));
    KVC_CHECK(t->numel == 0 || t->size[2] == 1 || t->stride[2] == 1, KVC_E_VALUE,
              "%s: %s: expected a last dimension with stride 1, got stride %lld; call .contiguous()", f->op->name, name,
              (long long)t->stride[2]);
    *x = (kvc_dense){t->data, {0, t->stride[1], t->stride[0]}, (kvc_dtype)t->type};
    return KVC_OK;
}

/* Argument i: contiguous and of this size, or empty (*data stays NULL). */
static kvc_status take_line(const kvc_frame *f, int i, const char *name, kvc_scalar type, int64_t numel, void *data)
{
    const kvc_tensor *t = &f->tensor[i];
    KVC_TRY(kvc_op_expect_contiguous(f, i, name, 1u << type, -1));
    KVC_CHECK(t->numel == numel || t->numel == 0, KVC_E_VALUE, "%s: %s: expected %lld elements or none, got %lld",
              f->op->name, name, (long long)numel, (long long)t->numel);
    if (t->numel) *(void **)data = t->data;
    return KVC_OK;
}

static kvc_status same_size(const kvc_frame *f, int i, int as, const char *name, const char *like)
{
    const int64_t *a = f->tensor[i].size, *b = f->tensor[as].size;
    KVC_CHECK(a[0] == b[0] && a[1] == b[1], KVC_E_VALUE,
              "%s: %s: expected the tokens and heads of %s, [%lld, %lld], got [%lld, %lld]", f->op->name, name, like,
              (long long)b[0], (long long)b[1], (long long)a[0], (long long)a[1]);
    return KVC_OK;
}

/* Splits key << 8 | value. */
static kvc_status take_formats(const kvc_frame *f, int64_t formats, kvc_blocks *b)
{
    KVC_CHECK(formats >= 0 && formats >> 8 < KVC_FORMATS && (formats & 255) < KVC_FORMATS, KVC_E_VALUE,
              "%s: formats: expected key << 8 | value, codes from 0 to %d, got %lld", f->op->name, KVC_FORMATS - 1,
              (long long)formats);
    b->key = (int)(formats >> 8);
    b->value = (int)(formats & 255);
    return KVC_OK;
}

enum {
    Q,
    K,
    V,
    CACHE,
    BLOCK_TABLE,
    RESIDUAL,
    RESIDUAL_TABLE,
    QUERY_START_LOC,
    SEQ_LENS,
    SEALED_LENS,
    DRAFT_LENS,
    S_AUX,
    OUT,
    LSE,
    FLAGS,
    FORMATS,
    BLOCK_SIZE,
    RESIDUAL_SIZE,
    PAGE_SIZE,
    WINDOW,
    SCALE,
    SOFTCAP,
    MAX_QUERY
};

kvc_status kvc_op_attend_varlen(kvc_frame *f)
{
    const kvc_tensor *q = &f->tensor[Q], *k = &f->tensor[K], *v = &f->tensor[V], *out = &f->tensor[OUT];
    kvc_varlen_args a = {.page_size = f->integer[PAGE_SIZE],
                         .window = f->integer[WINDOW],
                         .scale = (float)f->real[SCALE],
                         .softcap = (float)f->real[SOFTCAP],
                         .max_query = f->integer[MAX_QUERY],
                         .exec = kvc_op_exec};
    KVC_TRY(take_tokens(f, Q, "q", &a.q));
    KVC_TRY(take_tokens(f, K, "k", &a.k));
    KVC_TRY(take_tokens(f, V, "v", &a.v));
    KVC_TRY(take_tokens(f, OUT, "out", &a.out));
    a.tokens = q->size[0], a.query_heads = q->size[1], a.key_dim = q->size[2];
    a.heads = k->size[1], a.value_dim = out->size[2];
    a.stored = k->size[0] == 0 && a.tokens > 0;
    KVC_TRY(same_size(f, OUT, Q, "out", "q"));
    KVC_TRY(same_size(f, V, K, "v", "k"));
    KVC_CHECK(
        (a.stored || k->size[0] == a.tokens) && k->size[2] == a.key_dim && v->size[2] == a.value_dim, KVC_E_VALUE,
        "attend_varlen: k, v: expected %lld tokens (or 0: they are stored already) of head dims %lld and %lld as q "
        "and out have, got %lld of %lld and %lld",
        (long long)a.tokens, (long long)a.key_dim, (long long)a.value_dim, (long long)k->size[0], (long long)k->size[2],
        (long long)v->size[2]);
    KVC_TRY(kvc_op_expect_contiguous(f, SEQ_LENS, "seq_lens", 1u << KVC_T_I32, 1));
    KVC_TRY(kvc_op_expect_contiguous(f, QUERY_START_LOC, "query_start_loc", 1u << KVC_T_I32, 1));
    a.batch = f->tensor[SEQ_LENS].size[0];
    KVC_CHECK(f->tensor[QUERY_START_LOC].size[0] == a.batch + 1, KVC_E_VALUE,
              "attend_varlen: query_start_loc: expected [%lld], one more than seq_lens, got [%lld]",
              (long long)a.batch + 1, (long long)f->tensor[QUERY_START_LOC].size[0]);
    a.seq_lens = f->tensor[SEQ_LENS].data;
    a.query_start = f->tensor[QUERY_START_LOC].data;
    KVC_TRY(take_formats(f, f->integer[FORMATS], &a.cache));
    KVC_TRY(take_blocks(f, CACHE, "cache", f->integer[BLOCK_SIZE], a.page_size, &a.cache));
    KVC_CHECK(a.cache.data, KVC_E_VALUE, "attend_varlen: cache: expected [blocks, bytes], got an empty tensor");
    KVC_TRY(take_table(f, BLOCK_TABLE, "block_table", a.batch, &a.cache));
    KVC_TRY(take_blocks(f, RESIDUAL, "residual", f->integer[RESIDUAL_SIZE], a.page_size, &a.residual));
    if (a.residual.data) {
        a.residual.key = a.residual.value = KVC_RAW_F32 + (int)a.k.dtype;
        KVC_TRY(take_table(f, RESIDUAL_TABLE, "residual_table", a.batch, &a.residual));
    }
    KVC_TRY(take_line(f, SEALED_LENS, "sealed_lens", KVC_T_I32, a.batch, &a.sealed_lens));
    KVC_TRY(take_line(f, DRAFT_LENS, "draft_lens", KVC_T_I32, a.batch, &a.draft_lens));
    KVC_TRY(take_line(f, S_AUX, "s_aux", KVC_T_F32, a.query_heads, &a.s_aux));
    KVC_TRY(take_line(f, LSE, "lse", KVC_T_F32, a.query_heads * a.tokens, &a.lse));
    KVC_TRY(take_line(f, FLAGS, "flags", KVC_T_I32, a.batch, &a.flags));
    if (!f->cuda) return kvc_attend_varlen(&a);
    KVC_TRY(kvc_varlen_check(&a));
    return kvc_gpu_attend_varlen(f, &a);
}

/* k, v, cache, slot_mapping, flag, formats, block_size, page_size */
kvc_status kvc_op_store_tokens(kvc_frame *f)
{
    const kvc_tensor *k = &f->tensor[0], *v = &f->tensor[1];
    kvc_store_args a = {.page_size = f->integer[7], .exec = kvc_op_exec};
    KVC_TRY(take_tokens(f, 0, "k", &a.k));
    KVC_TRY(take_tokens(f, 1, "v", &a.v));
    KVC_TRY(same_size(f, 1, 0, "v", "k"));
    a.tokens = k->size[0], a.heads = k->size[1], a.key_dim = k->size[2], a.value_dim = v->size[2];
    KVC_TRY(take_formats(f, f->integer[5], &a.cache));
    KVC_TRY(take_blocks(f, 2, "cache", f->integer[6], a.page_size, &a.cache));
    KVC_CHECK(a.cache.data, KVC_E_VALUE, "store_tokens: cache: expected [blocks, bytes], got an empty tensor");
    KVC_TRY(kvc_op_expect_contiguous(f, 3, "slot_mapping", 1u << KVC_T_I64, 1));
    KVC_CHECK(f->tensor[3].size[0] == a.tokens, KVC_E_VALUE,
              "store_tokens: slot_mapping: expected [%lld] as k has tokens, got [%lld]", (long long)a.tokens,
              (long long)f->tensor[3].size[0]);
    a.slots = f->tensor[3].data;
    KVC_TRY(take_line(f, 4, "flag", KVC_T_I32, 1, &a.flag));
    if (!f->cuda) return kvc_store_tokens(&a);
    KVC_TRY(kvc_store_tokens_check(&a));
    return kvc_gpu_store_tokens(f, &a);
}
