/* blocks.c - blocks owned by the caller: validation, and writing single tokens. */
#include "base/alloc.h"
#include "base/dtype.h"
#include "blocks.h"

#include <stdatomic.h>
#include <string.h>

int64_t kvc_all_heads_bytes(int key, int value, int64_t heads, int64_t key_dim, int64_t value_dim, int64_t page_size)
{
    return heads * kvc_page_layout(key, value, key_dim, value_dim, page_size).bytes;
}

kvc_status kvc_geometry_check(int64_t heads, int64_t key_dim, int64_t value_dim, int64_t page_size, const char *op)
{
    KVC_CHECK(heads > 0 && heads <= 65536, KVC_E_VALUE, "%s: expected 1 to 65536 heads, got %lld", op,
              (long long)heads);
    KVC_CHECK(key_dim > 0 && key_dim <= KVC_MAX_DIM && value_dim > 0 && value_dim <= KVC_MAX_DIM, KVC_E_VALUE,
              "%s: expected head dims from 1 to %d, got Dk=%lld Dv=%lld", op, KVC_MAX_DIM, (long long)key_dim,
              (long long)value_dim);
    return kvc_page_size_check(page_size, op);
}

kvc_status kvc_blocks_check(const kvc_blocks *b, int64_t page_bytes, const char *op, const char *what)
{
    KVC_CHECK(b->blocks >= 0 && b->blocks <= INT32_MAX && b->pages > 0 && b->pages <= INT32_MAX, KVC_E_VALUE,
              "%s: %s: expected 0 to 2^31 blocks of at least 1 page, got %lld of %lld", op, what, (long long)b->blocks,
              (long long)b->pages);
    KVC_CHECK(b->bytes > 0 && b->bytes / page_bytes >= b->pages, KVC_E_VALUE,
              "%s: %s: expected blocks of at least %lld pages of %lld bytes (all heads), got %lld bytes", op, what,
              (long long)b->pages, (long long)page_bytes, (long long)b->bytes);
    KVC_CHECK((uintptr_t)b->data % KVC_ALIGN == 0 && b->stride % KVC_ALIGN == 0 && b->stride >= b->bytes &&
                  b->stride <= ((int64_t)1 << 50) / kvc_max(1, b->blocks),
              KVC_E_VALUE, "%s: %s: expected blocks that begin on %d bytes and do not overlap, got a stride of %lld",
              op, what, KVC_ALIGN, (long long)b->stride);
    return KVC_OK;
}

kvc_status kvc_page_geometry(int key, int value, int raw, int64_t heads, int64_t key_dim, int64_t value_dim,
                             int64_t page_size, kvc_geometry *g)
{
    KVC_TRY(kvc_geometry_check(heads, key_dim, value_dim, page_size, "page_geometry"));
    KVC_TRY(kvc_format_check(key, key_dim));
    KVC_TRY(kvc_format_check(value, value_dim));
    KVC_CHECK(raw >= 0 && kvc_format_is_raw(raw), KVC_E_VALUE, "page_geometry: raw: expected a raw format, got %d",
              raw);
    KVC_TRY(kvc_format_check(raw, key_dim));
    KVC_TRY(kvc_format_check(raw, value_dim));
    g->page_bytes = kvc_all_heads_bytes(key, value, heads, key_dim, value_dim, page_size);
    g->head_bytes = g->page_bytes / heads;
    g->residual_bytes = 0;
    if (!kvc_in_place(key, value))
        g->residual_bytes = kvc_all_heads_bytes(raw, raw, heads, key_dim, value_dim, page_size);
    return KVC_OK;
}

/* ---------------------------------------------------------------- single tokens */

typedef struct storing {
    const kvc_store_args *a;
    int64_t *slots;     /* copied, because another thread may change the caller's between check and use */
    int64_t page_bytes; /* per head */
    atomic_bool failed;
} storing;

static const uint8_t *token_row(const kvc_dense *x, int64_t h, int64_t t)
{
    return (const uint8_t *)x->data + (h * x->stride[1] + t * x->stride[2]) * (x->dtype == KVC_F32 ? 4 : 2);
}

/* Processes heads [begin, end): each page of a head has a single writer. */
static void store_heads(int64_t begin, int64_t end, void *context)
{
    static const float zeros[KVC_MAX_DIM];
    storing *s = context;
    const kvc_store_args *a = s->a;
    const kvc_blocks *c = &a->cache;
    float *scratch;
    if (kvc_scratch(kvc_page_scratch(kvc_max(a->key_dim, a->value_dim), a->page_size), sizeof *scratch, &scratch) !=
        KVC_OK) {
        atomic_store(&s->failed, true);
        return;
    }
    int64_t block_tokens = c->pages * a->page_size;
    for (int64_t h = begin; h < end; h++)
        for (int64_t t = 0; t < a->tokens; t++) {
            if (s->slots[t] < 0) continue;
            int64_t block = s->slots[t] / block_tokens, in = s->slots[t] % block_tokens;
            uint8_t *page = c->data + block * c->stride + (in / a->page_size * a->heads + h) * s->page_bytes;
            for (int i = 0; i < 2; i++) {
                const kvc_dense *x = i ? &a->v : &a->k;
                kvc_room side = kvc_page_room(page, !i, c->key, c->value, a->key_dim, a->value_dim, a->page_size);
                const void *row = token_row(x, h, t);
                if (a->flag && !kvc_all_finite(row, x->dtype, side.dim)) {
                    __atomic_store_n(a->flag, 1, __ATOMIC_RELAXED);
                    row = zeros;
                }
                kvc_store_rows(&side, in % a->page_size, 1, row, 0, x->dtype, scratch);
            }
        }
    kvc_scratch_free(scratch);
}

/* Checks slots and values, then writes the tokens. */
static kvc_status store(storing *s)
{
    const kvc_store_args *a = s->a;
    const kvc_blocks *c = &a->cache;
    /* cannot overflow: the stride check bounds it by 2^31 * 2^31 * 2^8 */
    int64_t slots = c->blocks * c->pages * a->page_size;
    for (int64_t t = 0; t < a->tokens; t++)
        KVC_CHECK(s->slots[t] < slots, KVC_E_VALUE,
                  "store_tokens: slots: expected less than %lld, got %lld at token %lld", (long long)slots,
                  (long long)s->slots[t], (long long)t);
    for (int64_t i = 0; !a->flag && i < 2 * a->tokens * a->heads; i++) {
        const kvc_dense *x = i % 2 ? &a->v : &a->k;
        int64_t t = i / 2 / a->heads, h = i / 2 % a->heads;
        KVC_CHECK(s->slots[t] < 0 || kvc_all_finite(token_row(x, h, t), x->dtype, i % 2 ? a->value_dim : a->key_dim),
                  KVC_E_VALUE, "store_tokens: %s: expected finite numbers, got NaN or Inf at head %lld, token %lld",
                  i % 2 ? "v" : "k", (long long)h, (long long)t);
    }
    kvc_run(&a->exec, a->heads, a->tokens * a->heads * (a->key_dim + a->value_dim) * 4, store_heads, s);
    return atomic_load(&s->failed) ? kvc_no_workspace("store_tokens") : KVC_OK;
}

kvc_status kvc_store_tokens_check(const kvc_store_args *a)
{
    const kvc_blocks *c = &a->cache;
    KVC_TRY(kvc_geometry_check(a->heads, a->key_dim, a->value_dim, a->page_size, "store_tokens"));
    KVC_TRY(kvc_format_check(c->key, a->key_dim));
    KVC_TRY(kvc_format_check(c->value, a->value_dim));
    KVC_CHECK(kvc_in_place(c->key, c->value), KVC_E_VALUE,
              "store_tokens: expected formats that take single tokens (8 bits and more), got %s, %s; use attend_varlen",
              kvc_format_get(c->key)->name, kvc_format_get(c->value)->name);
    int64_t bytes = kvc_all_heads_bytes(c->key, c->value, a->heads, a->key_dim, a->value_dim, a->page_size);
    KVC_TRY(kvc_blocks_check(c, bytes, "store_tokens", "cache"));
    KVC_TRY(kvc_dtype_check(a->k.dtype, "store_tokens: k"));
    int raw = KVC_RAW_F32 + (int)a->k.dtype;
    KVC_CHECK(a->k.dtype == a->v.dtype && (!kvc_format_is_raw(c->key) || c->key == raw) &&
                  (!kvc_format_is_raw(c->value) || c->value == raw),
              KVC_E_TYPE, "store_tokens: k, v: expected one dtype for both, that of raw pages");
    return KVC_OK;
}

kvc_status kvc_store_tokens(const kvc_store_args *a)
{
    storing s = {.a = a};
    if (!kvc_kernels_get()) {
        const char *name;
        return kvc_isa(&name);
    }
    KVC_TRY(kvc_store_tokens_check(a));
    s.page_bytes = kvc_page_layout(a->cache.key, a->cache.value, a->key_dim, a->value_dim, a->page_size).bytes;
    KVC_TRY(kvc_scratch(a->tokens, sizeof *s.slots, &s.slots));
    if (a->tokens) memcpy(s.slots, a->slots, (size_t)a->tokens * sizeof *s.slots);
    kvc_status status = store(&s);
    kvc_scratch_free(s.slots);
    return status;
}
