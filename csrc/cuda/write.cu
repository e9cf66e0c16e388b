/* write.cu - the write phase of a call, in one launch: writes own tokens to the pages that the table names, seals full
 * pages, and copies own tokens to raw pages if this call's queries need them exactly. A block writes a side of a page.
 * After token.cu it only seals. */
#include "encode.cuh"
#include "wide.h"

/* The work of a block: own tokens to `side`, one by one; then `sealed` from them or from a raw page. Either may be
 * missing (tiles NULL). */
typedef struct kvc_task {
    kvc_side side, sealed, old;
    kvc_source rows;
    int64_t t0, n;
    bool from_old;
} kvc_task;

KVC_DEVICE kvc_side kvc_find_side(const kvc_call *call, int64_t entry, int64_t h, int64_t tokens, int key)
{
    const kvc_store *s = &call->a.store;
    if (entry >= 0 && (int)(entry & 0xffff) == (call->own_raw << 8 | call->own_raw))
        return kvc_open_side(call, entry, h, tokens, key);
    kvc_page page = kvc_page_of(s, entry, h, tokens, kvc_thread() ? NULL : call->flags);
    if (page.data) return kvc_page_side(&page, key, s->key_dim, s->value_dim);
    kvc_side none = {0, 0, 0, 0, NULL, NULL};
    return none;
}

/* Seals the raw page `from` to `to`. */
KVC_DEVICE void kvc_seal_sides(const kvc_call *call, int64_t from, int64_t to, int64_t h, int key, kvc_task *task)
{
    const kvc_store *s = &call->a.store;
    task->from_old = true;
    task->old = kvc_find_side(call, from, h, s->page_size, key);
    task->sealed = kvc_find_side(call, to, h, s->page_size, key);
    if (!task->old.tiles || !task->sealed.tiles || kvc_apart(s, from, to, s->page_size)) return;
    kvc_flag(call->flags, KVC_FLAG_ENTRY);
    task->sealed.tiles = NULL;
}

/* The own tokens of column c. */
KVC_DEVICE void kvc_column_task(const kvc_call *call, const kvc_row *row, int64_t h, int64_t c, int key, kvc_task *task)
{
    const kvc_store *s = &call->a.store;
    int64_t first = kvc_column_first(c, s->sinks, s->page_size), size = kvc_column_size(c, s->sinks, s->page_size);
    int64_t from = kvc_max(first, row->stored), n = kvc_min(first + size, row->stored + row->own) - from;
    if (n <= 0 || c >= s->columns) return;
    bool fills = row->filling != KVC_NONE && row->filling_column == c;
    int64_t entry = kvc_entry_at(s, row->at, c), tokens = kvc_column_layout(c, s->sinks, s->page_size);
    kvc_side side = kvc_find_side(call, fills ? row->filling : entry, h, tokens, key);
    if (!side.tiles) return;
    bool raw = kvc_format_is_raw(side.format), whole = from == first && n == side.tokens;
    if (raw ? side.format != call->own_raw : !whole && kvc_format_bits(side.format) < 8) {
        kvc_flag(call->flags, KVC_FLAG_PAGE);
        return;
    }
    task->rows.j0 = from - row->stored;
    task->t0 = from - first;
    task->n = n;
    if (!raw && whole)
        task->sealed = side;
    else
        task->side = side;
    if (fills) kvc_seal_sides(call, row->filling, entry, h, key, task);
}

/* A pair of `seals` that no row fills in this launch. */
KVC_DEVICE void kvc_seal_task(const kvc_call *call, int64_t pair, int64_t h, int key, uint32_t *shared, kvc_task *task)
{
    const kvc_attend_args *a = &call->a;
    const kvc_store *s = &a->store;
    if (a->seals[2 * pair] == KVC_NONE && a->seals[2 * pair + 1] == KVC_NONE) return;
    if (kvc_thread() == 0) shared[0] = 0;
    kvc_barrier();
    for (int64_t r = kvc_thread(); r < s->batch * s->table_heads && a->T && !call->token; r += kvc_threads()) {
        int64_t stored = kvc_row_stored(s, r, NULL), c = kvc_column(stored, s->sinks, s->page_size);
        int64_t first = kvc_column_first(c, s->sinks, s->page_size);
        int64_t own = call->own_list ? call->own_count[r / s->table_heads] : a->T;
        if (call->lists.segments) own = call->lists.segments[r].own;
        if (c > 0 && c < s->columns && first < stored && first + s->page_size <= stored + own &&
            kvc_entry_at(s, r, c) == a->seals[2 * pair + 1])
            kvc_atomic_or(shared, 1);
    }
    kvc_barrier();
    if (shared[0]) return;
    kvc_seal_sides(call, a->seals[2 * pair], a->seals[2 * pair + 1], h, key, task);
}

/* x: own pages, then table columns, of each (sequence, head), unless written by kvc_token_kernel; then seals. y: V, K. */
KVC_KERNEL(kvc_write_kernel, kvc_call, KVC_WRITE_THREADS, 1)
{
    const kvc_store *s = &a.a.store;
    kvc_encode_room *room = (kvc_encode_room *)kvc_shared;
    int64_t i = kvc_block_x(), lines = s->batch * s->heads, c, b, h, own_columns = a.own_columns;
    int64_t own_items = a.lists.segments ? s->heads * a.lists.write_most : a.token ? 0 : lines * a.write_columns;
    int key = (int)kvc_block_y();
    kvc_task task;
    task.side.tiles = task.sealed.tiles = NULL;
    task.from_old = false;
    if (a.done && i == 0 && key == 0)
        for (int n = kvc_thread(); n < a.lines; n += kvc_threads()) a.done[n] = 0;
    if (i >= own_items) {
        int64_t heads = s->table_heads == 1 ? s->heads : 1;
        kvc_seal_task(&a, (i - own_items) / heads, (i - own_items) % heads, key, room->words, &task);
    } else {
        b = i / a.write_columns / s->heads, h = i / a.write_columns % s->heads, c = i % a.write_columns;
        if (a.lists.segments) {
            if (i / s->heads >= a.lists.counts[1]) return;
            kvc_item item = a.lists.write[i / s->heads];
            b = item.b, c = item.at, h = i % s->heads, own_columns = a.lists.segments[b].own_columns;
        }
        kvc_row_shared(&a, b, h, &room->row);
        const kvc_row *row = &room->row;
        kvc_source rows = {NULL, key ? &a.a.k : &a.a.v, row->batch, h, c * a.own_page, row->own_at};
        rows.flags = a.lists.nonfinite ? a.lists.nonfinite + b : a.flags;
        rows.bit = a.lists.nonfinite ? 1 : 0;
        task.rows = rows;
        if (c >= own_columns) {
            c += kvc_column(row->stored, s->sinks, s->page_size) - own_columns;
            kvc_column_task(&a, row, h, c, key, &task);
        } else if (!row->own_in_pages && row->own > c * a.own_page) {
            int64_t bytes = kvc_page_layout(a.own_raw, a.own_raw, s->key_dim, s->value_dim, a.own_page).bytes;
            kvc_page page = {a.own_pages + (row->own_page + c) * bytes, a.own_raw, a.own_raw, a.own_page};
            task.side = kvc_page_side(&page, key, s->key_dim, s->value_dim);
            task.t0 = 0;
            task.n = kvc_min(row->own - c * a.own_page, a.own_page);
        }
    }
    if (task.side.tiles) kvc_store_rows(&task.side, &task.rows, (int)task.t0, (int)task.n, room);
    kvc_barrier();
    const kvc_side *to = &task.sealed, *old = &task.old;
    if (!to->tiles || (task.from_old && !old->tiles)) return;
    if (task.from_old &&
        (!kvc_format_is_raw(old->format) || (kvc_format_is_raw(to->format) && to->format != old->format))) {
        kvc_flag(a.flags, KVC_FLAG_ENTRY);
        return;
    }
    if (!kvc_format_is_raw(to->format)) {
        kvc_source page = task.rows;
        if (task.from_old) {
            page.x = NULL;
            page.raw = old;
        }
        kvc_encode_page(to, &page, room);
        return;
    }
    int64_t bytes = old->tokens / KVC_TILE * kvc_tile_bytes(old->format, old->dim);
    for (int64_t at = 16 * kvc_thread(); at < bytes; at += 16 * kvc_threads())
        kvc_store_quad(to->tiles + at, kvc_load_quad(old->tiles + at));
}

/* ---------------------------------------------------------------- whole pages and rows */

typedef struct kvc_pack_call {
    kvc_dense k, v;
    int key, value;
    int64_t heads, pages, key_dim, value_dim, page_size, bytes;
    uint8_t *out;
    uint32_t *flags;
} kvc_pack_call;

/* x: sequence, page, head. y: V, K. */
KVC_KERNEL(kvc_pack_kernel, kvc_pack_call, KVC_WRITE_THREADS, 2)
{
    int64_t i = kvc_block_x(), h = i % a.heads, p = i / a.heads % a.pages, b = i / a.heads / a.pages;
    int key = (int)kvc_block_y();
    kvc_encode_room *room = (kvc_encode_room *)kvc_shared;
    kvc_page page = {a.out + i * a.bytes, a.key, a.value, a.page_size};
    kvc_side side = kvc_page_side(&page, key, a.key_dim, a.value_dim);
    kvc_source rows = {NULL, key ? &a.k : &a.v, b, h, p * a.page_size, NULL};
    rows.flags = a.flags;
    /* Padding between sections is 0, as on the CPU. */
    kvc_layout l = kvc_page_layout(a.key, a.value, a.key_dim, a.value_dim, a.page_size);
    int64_t meta_end = (key ? l.k_meta : l.v_meta) + kvc_meta_bytes(side.format, key, side.dim, a.page_size);
    for (int64_t at = meta_end + kvc_thread(); at < (key ? l.v_meta : l.bytes); at += kvc_threads()) page.data[at] = 0;
    if (kvc_format_is_raw(side.format))
        kvc_store_rows(&side, &rows, 0, (int)a.page_size, room);
    else
        kvc_encode_page(&side, &rows, room);
}

typedef struct kvc_rows_call {
    int format;
    kvc_dtype dtype;
    const uint8_t *x;
    int64_t n, dim;
    uint8_t *codes, *meta;
    float *out;
    uint32_t *flags;
} kvc_rows_call;

/* The code of dim d in the planes of kvc_quantize; for 3 bits the low two bits, then the high one. */
KVC_DEVICE uint32_t kvc_plane_code(const uint8_t *row, int bits, int dim, int d)
{
    int b = bits == 3 ? 2 : bits, period = dim * b / 8, eighth = dim / 8;
    uint32_t code = (uint32_t)row[d % period] >> (b * (d / period)) & ((1u << b) - 1);
    return bits == 3 ? code | ((uint32_t)row[period + d % eighth] >> d / eighth & 1) << 2 : code;
}

/* 16 rows per block; codes in the layout of kvc_quantize: byte j of a row holds dims j, D * bits / 8 + j, .. */
KVC_KERNEL(kvc_quantize_kernel, kvc_rows_call, KVC_WRITE_THREADS, 2)
{
    kvc_encode_room *room = (kvc_encode_room *)kvc_shared;
    kvc_traits f = kvc_format_traits(a.format);
    int64_t planes = kvc_meta_planes(f, a.dim), r = kvc_block_x() * KVC_TILE + kvc_half();
    kvc_dense x = {(void *)a.x, {0, 0, a.dim}, a.dtype};
    kvc_source rows = {NULL, &x};
    rows.flags = a.flags;
    float row[KVC_PARTS];
    r = r < a.n ? r : a.n - 1;
    kvc_half_load(&rows, r, a.dim, row);
    kvc_half_encode(a.format, row, a.dim, room->codes + kvc_half() * a.dim, a.meta, r, 1, planes);
    kvc_barrier();
    int bytes = (int)(a.dim * f.bits / 8);
    for (int i = kvc_thread(); i < KVC_TILE * bytes; i += kvc_threads()) {
        int64_t at = kvc_block_x() * KVC_TILE + i / bytes;
        if (at >= a.n) break;
        int j = i % bytes, first = f.bits == 3 ? (int)a.dim / 4 : bytes; /* for 3 bits, the high bits follow */
        int b = j >= first ? 1 : f.bits == 3 ? 2 : f.bits, low = j >= first ? 2 : 0, in = j - (j >= first ? first : 0);
        uint32_t byte = 0;
        for (int p = 0; p < 8 / b; p++) {
            uint32_t code = room->codes[i / bytes * a.dim + p * (a.dim * b / 8) + in];
            byte |= (code >> low & ((1u << b) - 1)) << (b * p);
        }
        a.codes[at * bytes + i % bytes] = (uint8_t)byte;
    }
}

KVC_KERNEL(kvc_dequantize_kernel, kvc_rows_call, KVC_WRITE_THREADS, 2)
{
    kvc_traits f = kvc_format_traits(a.format);
    int64_t planes = kvc_meta_planes(f, a.dim), size = kvc_meta_size(f), each = f.coding == KVC_CODING_UINT ? 2 : 1;
    int64_t at = kvc_block_x() * KVC_TILE + kvc_half(), r = at < a.n ? at : a.n - 1;
    int bytes = (int)(a.dim * f.bits / 8), group = f.group ? f.group : (int)a.dim;
    float x[KVC_PARTS];
    EACH_PART(k, 0, a.dim / 16)
    {
        int d = 16 * k + kvc_half_lane(), low = (int)a.dim - (int)a.dim / 4 + d;
        const uint8_t *meta = a.meta + size * (r * planes + d / group * each);
        uint32_t code = kvc_plane_code(a.codes + r * bytes, f.bits, (int)a.dim, d);
        x[k] = kvc_level(f.coding, f.bits, code) * kvc_scale_value(f.scale, meta);
        if (each == 2) x[k] += kvc_scale_value(f.scale, meta + size);
        if (f.rotated != KVC_DIGITS) continue;
        code = low < a.dim ? kvc_plane_code(a.codes + r * bytes, f.bits, (int)a.dim, low) : 0;
        float level = kvc_level(f.coding, f.bits, code) * kvc_scale_value(f.scale, meta);
        x[k] = low < a.dim ? kvc_joined(x[k], level) : d < a.dim - a.dim / 4 ? x[k] : 0;
    }
    if (f.rotated == KVC_ROTATED) kvc_half_rotate(x, a.dim);
    EACH_PART(k, 0, a.dim / 16)
    if (at < a.n) a.out[at * a.dim + 16 * k + kvc_half_lane()] = x[k];
}

/* ---------------------------------------------------------------- single tokens */

typedef struct kvc_store_call {
    kvc_store_args a;
    int64_t bytes; /* of a page of one head */
    uint32_t *flags;
} kvc_store_call;

/* x: token, head. y: V, K. */
KVC_KERNEL(kvc_store_kernel, kvc_store_call, KVC_WRITE_THREADS, 2)
{
    const kvc_blocks *c = &a.a.cache;
    int64_t t = kvc_block_x() / a.a.heads, h = kvc_block_x() % a.a.heads, size = c->pages * a.a.page_size;
    int64_t slot = a.a.slots[t], block = slot / size, in = slot % size;
    int key = (int)kvc_block_y();
    if (slot < 0) return;
    if (block >= c->blocks) {
        if (kvc_thread() == 0) kvc_flag(a.flags, KVC_FLAG_ENTRY);
        return;
    }
    uint8_t *data = c->data + block * c->stride + (in / a.a.page_size * a.a.heads + h) * a.bytes;
    kvc_page page = {data, c->key, c->value, a.a.page_size};
    kvc_side side = kvc_page_side(&page, key, a.a.key_dim, a.a.value_dim);
    kvc_source rows = {NULL, key ? &a.a.k : &a.a.v, 0, h, t, NULL};
    rows.flags = a.a.flag ? (uint32_t *)a.a.flag : a.flags;
    rows.bit = a.a.flag ? 1 : 0;
    kvc_store_rows(&side, &rows, (int)(in % a.a.page_size), 1, (kvc_encode_room *)kvc_shared);
}

/* ---------------------------------------------------------------- launchers */

extern "C" int kvc_write_launch(const kvc_call *call, int64_t items, void *stream)
{
    if (kvc_widest(&call->a.store) > KVC_ROW_DIM) return kvc_write_launch_wide(call, items, stream);
    return KVC_LAUNCH(kvc_write_kernel, call, items, 2, 1, KVC_WRITE_THREADS, sizeof(kvc_encode_room), stream);
}

extern "C" int kvc_cuda_pack(int key, int value, const kvc_dense *k, const kvc_dense *v, int64_t B, int64_t H,
                             int64_t T, int64_t key_dim, int64_t value_dim, int64_t page_size, uint8_t *pages,
                             const kvc_cuda *on)
{
    if (key_dim > KVC_ROW_DIM || value_dim > KVC_ROW_DIM)
        return kvc_pack_wide(key, value, k, v, B, H, T, key_dim, value_dim, page_size, pages, on);
    kvc_pack_call call = {*k, *v, key, value, H, T / page_size, key_dim, value_dim, page_size};
    call.bytes = kvc_page_layout(key, value, key_dim, value_dim, page_size).bytes;
    call.out = pages;
    call.flags = on->flags;
    return KVC_LAUNCH(kvc_pack_kernel, &call, B * H * call.pages, 2, 1, KVC_WRITE_THREADS, sizeof(kvc_encode_room),
                      on->stream);
}

extern "C" int kvc_cuda_quantize(int format, kvc_dtype dtype, const void *x, int64_t n, int64_t D, uint8_t *codes,
                                 uint8_t *scales, const kvc_cuda *on)
{
    if (D > KVC_ROW_DIM) return kvc_quantize_wide(format, dtype, x, n, D, codes, scales, on);
    kvc_rows_call call = {format, dtype, (const uint8_t *)x, n, D, codes, scales, NULL, on->flags};
    return KVC_LAUNCH(kvc_quantize_kernel, &call, (n + KVC_TILE - 1) / KVC_TILE, 1, 1, KVC_WRITE_THREADS,
                      sizeof(kvc_encode_room), on->stream);
}

extern "C" int kvc_cuda_dequantize(int format, const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t D,
                                   float *x, const kvc_cuda *on)
{
    if (D > KVC_ROW_DIM) return kvc_dequantize_wide(format, codes, scales, n, D, x, on);
    kvc_rows_call call = {format, KVC_F32,  NULL, n, D, (uint8_t *)(uintptr_t)codes, (uint8_t *)(uintptr_t)scales,
                          x,      on->flags};
    return KVC_LAUNCH(kvc_dequantize_kernel, &call, (n + KVC_TILE - 1) / KVC_TILE, 1, 1, KVC_WRITE_THREADS, 0,
                      on->stream);
}

extern "C" int kvc_cuda_store_tokens(const kvc_store_args *args, const kvc_cuda *on)
{
    kvc_store_call call = {*args};
    if ((uintptr_t)args->cache.data % 64) return KVC_CUDA_ALIGNMENT;
    if (args->key_dim > KVC_ROW_DIM || args->value_dim > KVC_ROW_DIM) return kvc_store_tokens_wide(args, on);
    call.bytes =
        kvc_page_layout(args->cache.key, args->cache.value, args->key_dim, args->value_dim, args->page_size).bytes;
    call.flags = on->flags;
    return KVC_LAUNCH(kvc_store_kernel, &call, args->tokens * args->heads, 2, 1, KVC_WRITE_THREADS,
                      sizeof(kvc_encode_room), on->stream);
}
