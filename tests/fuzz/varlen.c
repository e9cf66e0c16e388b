/* varlen.c - an engine's batches through the C API, with arbitrary lengths, tables, ids, slots and geometry. The
 * caller's buffers have exact sizes, so ASan sees an overrun. Also: a rejected call has written nothing (except after
 * stored tokens, if one is NaN); blocks that no table names, and the gaps between blocks, are unchanged. */
#include "input.h"

#include "base/util.h"
#include "varlen.h"

enum { BATCH = 3, WIDTH = 4, BLOCKS = 6 };

typedef struct memory {
    uint8_t *data, *before;
    int64_t bytes;
} memory;

static void *room(int64_t bytes)
{
    void *p = calloc(1, (size_t)bytes + !bytes);
    CHECK(p);
    return p;
}

static void fill_table(input *in, kvc_blocks *b, int64_t batch)
{
    b->table_width = below(in, WIDTH + 1);
    b->table_stride = b->table_width + below(in, 2);
    int64_t cells = batch ? (batch - 1) * b->table_stride + b->table_width : 0;
    int32_t *table = room(cells * 4);
    for (int64_t i = 0, first = byte(in); i < cells; i++) /* mostly each block once */
        table[i] = below(in, 12) == 1 ? (int32_t)number(in) : (int32_t)((i + first) % b->blocks);
    b->table = table;
}

static memory new_blocks(input *in, kvc_blocks *b, int64_t page_bytes)
{
    b->blocks = 1 + below(in, BLOCKS);
    b->pages = 1 + below(in, 2);
    b->bytes = b->pages * page_bytes;
    b->stride = kvc_align(b->bytes) + KVC_ALIGN * below(in, 2);
    memory m = {.bytes = (b->blocks - 1) * b->stride + b->bytes};
    m.data = b->data = aligned_alloc(KVC_ALIGN, (size_t)kvc_align(m.bytes));
    CHECK(m.data);
    memset(m.data, 0, (size_t)m.bytes);
    m.before = room(m.bytes);
    return m;
}

/* Residual blocks in the cache's memory, as in one block pool: every few blocks of it. False if there is no room. */
static bool share_blocks(input *in, const kvc_varlen_args *a, kvc_blocks *r, int64_t residual_bytes)
{
    const kvc_blocks *c = &a->cache;
    int64_t off = below(in, 4) ? 0 : KVC_ALIGN, step = kvc_ceil_div(residual_bytes + off, c->stride);
    r->blocks = c->blocks / step - 1; /* the last one may be shorter */
    r->stride = step * c->stride;
    r->bytes = residual_bytes;
    r->pages = 1;
    r->data = c->data + off;
    return r->blocks > 0;
}

/* Describes less than there is, or something impossible. */
static void belittle(input *in, kvc_blocks *b)
{
    switch (byte(in)) {
    case 1: b->bytes -= 1 + below(in, 100); break;
    case 2: b->stride = number(in) % (b->stride + 1); break;
    case 3: b->pages = number(in); break;
    case 4: b->blocks = -below(in, 3); break;
    case 5: b->pages = INT64_MAX / (1 + below(in, 3)); break;
    case 6: b->table_width = below(in, 2) ? INT64_MIN : -below(in, 9); break;
    case 7: b->key = (int)number(in); break;
    case 8: b->value = (int)number(in); break;
    default: break;
    }
}

static void belittle_all(input *in, kvc_varlen_args *a)
{
    belittle(in, &a->cache);
    if (a->residual.data) belittle(in, &a->residual);
    switch (byte(in)) {
    case 1: a->page_size = number(in); break;
    case 2: a->heads = below(in, 2) ? -below(in, 9) : 65537 + below(in, 9); break;
    case 3: a->query_heads = number(in) % (a->query_heads + 1); break;
    case 4: a->batch = below(in, 2) ? INT64_MIN : -below(in, 9); break;
    case 5: a->tokens = below(in, 2) ? INT64_MIN : a->tokens - 1 - below(in, 9); break;
    case 6: a->key_dim = number(in) % (a->key_dim + 1); break;
    default: break;
    }
}

/* [1, heads, tokens, dim] with the layout of engines, tokens first; all numbers are finite unless the input says
 * otherwise. */
static kvc_dense dense(input *in, kvc_dtype dtype, int64_t tokens, int64_t heads, int64_t dim)
{
    int64_t n = tokens * heads * dim, size = dtype == KVC_F32 ? 4 : 2;
    uint8_t *data = room(n * size), seed = byte(in);
    for (int64_t i = 0; i < n; i++) {
        float x = (float)((i * 37 + seed) % 29 - 14) / 8;
        uint16_t half = dtype == KVC_BF16 ? kvc_f32_to_bf16(x) : kvc_f32_to_f16(x);
        memcpy(data + i * size, dtype == KVC_F32 ? (void *)&x : (void *)&half, (size_t)size);
    }
    if (n && below(in, 10) == 1) memset(data + byte(in) % n * size, 0xff, (size_t)size); /* NaN */
    return (kvc_dense){data, {0, dim, heads * dim}, dtype};
}

/* Consistent lengths; then some changed at random. */
static void fill_lengths(input *in, kvc_varlen_args *a, int32_t *starts, int32_t *ends, int32_t *sealed,
                         int32_t *drafts)
{
    int64_t most = a->cache.table_width * a->cache.pages * a->page_size;
    starts[0] = (int32_t)below(in, 2);
    for (int64_t b = 0; b < a->batch; b++) {
        int64_t before = byte(in) * most / 256, n = byte(in) % (most - before + 1);
        if (below(in, 3) == 1) n = kvc_min(n, 1);
        starts[b + 1] = starts[b] + (int32_t)n;
        ends[b] = (int32_t)(before + n);
        drafts[b] = (int32_t)(below(in, 3) ? 0 : byte(in) % (n + 1));
        sealed[b] = (int32_t)((before / a->page_size - (below(in, 4) == 1)) * a->page_size);
    }
    a->tokens = starts[a->batch] + below(in, 3);
    int32_t *all[] = {starts, ends, sealed, drafts};
    for (int i = 0; a->batch && i < 4; i++)
        if (below(in, 8) == 1) all[i][below(in, a->batch + !i)] = (int32_t)number(in);
    a->query_start = starts, a->seq_lens = ends;
    if (below(in, 2)) a->sealed_lens = sealed;
    if (below(in, 2)) a->draft_lens = drafts;
}

static void remember(memory *m)
{
    if (m->data) memcpy(m->before, m->data, (size_t)m->bytes);
}

static void check_same(const memory *m, int64_t from, int64_t end)
{
    if (m->data) CHECK(!memcmp(m->data + from, m->before + from, (size_t)(end - from)));
}

static void check_rest(const memory *m, const kvc_blocks *b, int64_t batch)
{
    for (int64_t i = 0; i < b->blocks; i++) {
        bool named = false;
        for (int64_t r = 0; r < batch; r++)
            for (int64_t c = 0; c < b->table_width; c++) named |= b->table[r * b->table_stride + c] == i;
        check_same(m, i * b->stride + (named ? b->bytes : 0), i + 1 < b->blocks ? (i + 1) * b->stride : m->bytes);
    }
}

static void attend(input *in, kvc_varlen_args *a, memory *cache, memory *residual, bool shared)
{
    remember(cache), remember(residual);
    kvc_alloc_fail_at(below(in, 10) == 1 ? 1 + below(in, 8) : 0);
    kvc_status status = kvc_attend_varlen(a);
    kvc_alloc_fail_at(0);
    CHECK(status == KVC_OK || *kvc_error());
    bool refused = status == KVC_E_VALUE || status == KVC_E_TYPE, late = refused && strstr(kvc_error(), "finite");
    if ((refused && !late) || a->stored) { /* late: memory after stored tokens may be written */
        check_same(cache, 0, cache->bytes);
        check_same(residual, 0, residual->bytes);
    } else if (!shared) {
        check_rest(cache, &a->cache, a->batch);
        check_rest(residual, &a->residual, a->batch);
    }
}

static void store(input *in, const kvc_varlen_args *a, memory *cache)
{
    int64_t n = kvc_max(a->tokens, 0), *slots = room(n * 8);
    for (int64_t t = 0; t < n; t++) slots[t] = below(in, 16) == 1 ? number(in) : (t * 7 + byte(in)) % 100;
    kvc_store_args s = {.cache = a->cache, .tokens = a->tokens, .heads = a->heads, .key_dim = a->key_dim};
    s.value_dim = a->value_dim, s.page_size = a->page_size, s.k = a->k, s.v = a->v, s.slots = slots;
    s.flag = a->batch > 0 ? a->flags : NULL;
    remember(cache);
    kvc_status status = kvc_store_tokens(&s);
    CHECK(status == KVC_OK || *kvc_error());
    if (status != KVC_OK) check_same(cache, 0, cache->bytes);
    free(slots);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    input in = {bytes, bytes + size};
    int level = (int)below(&in, 5);
    while (!use_level(level)) level--;
    kvc_dtype dtype = (kvc_dtype)below(&in, 3);
    int raw = KVC_RAW_F32 + (int)dtype, codes[2];
    for (int i = 0; i < 2; i++) codes[i] = below(&in, 8) ? KVC_INT8 + (int)below(&in, KVC_FORMATS - KVC_INT8) : raw;
    kvc_varlen_args a = {.batch = below(&in, BATCH + 1), .heads = 1 + below(&in, 2), .scale = .25f};
    a.query_heads = a.heads * (1 + below(&in, 3)), a.page_size = 16 * (1 + below(&in, 4));
    a.key_dim = 16 * (1 + below(&in, 4)), a.value_dim = below(&in, 4) ? a.key_dim : 16 * (1 + below(&in, 4));
    a.cache.key = codes[0], a.cache.value = below(&in, 3) ? codes[0] : codes[1];
    kvc_geometry g;
    if (kvc_page_geometry(a.cache.key, a.cache.value, raw, a.heads, a.key_dim, a.value_dim, a.page_size, &g) != KVC_OK)
        return 0;
    int64_t alive = kvc_alloc_live();
    memory cache = new_blocks(&in, &a.cache, g.page_bytes), residual = {0};
    fill_table(&in, &a.cache, a.batch);
    bool shared = g.residual_bytes && below(&in, 3) == 1 && share_blocks(&in, &a, &a.residual, g.residual_bytes);
    if (g.residual_bytes) {
        if (!shared) residual = new_blocks(&in, &a.residual, g.residual_bytes);
        a.residual.key = a.residual.value = raw;
        fill_table(&in, &a.residual, a.batch);
    }
    int32_t *lengths[4], *flags = room(a.batch * 4);
    for (int i = 0; i < 4; i++) lengths[i] = room((a.batch + !i) * 4);
    fill_lengths(&in, &a, lengths[0], lengths[1], lengths[2], lengths[3]);
    if (below(&in, 2)) a.flags = flags;
    a.window = below(&in, 4) == 1 ? number(&in) : 0, a.softcap = below(&in, 8) == 1 ? real_number(&in) : 0;
    a.stored = below(&in, 8) == 1;
    a.q = dense(&in, dtype, a.tokens, a.query_heads, a.key_dim);
    a.k = dense(&in, dtype, a.tokens, a.heads, a.key_dim);
    a.v = dense(&in, dtype, a.tokens, a.heads, a.value_dim);
    a.out = dense(&in, (kvc_dtype)below(&in, 3), a.tokens, a.query_heads, a.value_dim);
    float *lse = room(a.tokens * a.query_heads * 4), *aux = room(a.query_heads * 4);
    if (below(&in, 2)) a.lse = lse;
    if (below(&in, 4) == 1) a.s_aux = aux;
    kvc_varlen_args whole = a;
    belittle_all(&in, &a);
    attend(&in, &a, &cache, &residual, shared);
    store(&in, &a, &cache);
    for (int64_t b = 0; b < whole.batch; b++) { /* one step later */
        int32_t *starts = lengths[0], *ends = lengths[1];
        if (starts[b + 1] <= starts[b] || whole.batch != 1 || ends[b] == INT32_MAX) continue;
        starts[b] = starts[b + 1] - 1, ends[b]++;
    }
    attend(&in, &whole, &cache, &residual, shared);
    for (int i = 0; i < 4; i++) free(lengths[i]);
    free(flags), free(lse), free(aux), free(a.q.data), free(a.k.data), free(a.v.data), free(a.out.data);
    free((void *)whole.cache.table), free((void *)whole.residual.table);
    free(cache.data), free(cache.before), free(residual.data), free(residual.before);
    CHECK(kvc_alloc_live() == alive);
    return 0;
}
