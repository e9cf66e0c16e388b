/* quantize.c - codecs for dense arrays: rows in natural order, and whole pages. */
#include "base/alloc.h"
#include "base/dtype.h"
#include "codec.h"

#include <stdatomic.h>
#include <string.h>

static void run(const kvc_exec *exec, int64_t n, void (*body)(int64_t, int64_t, void *), void *context)
{
    if (n <= 0) return;
    if (exec && exec->run)
        exec->run(n, body, context);
    else
        body(0, n, context);
}

/* Checks that `format` quantizes rows of D, and loads the kernels. */
static kvc_status check_quantized(const char *what, int format, int64_t D)
{
    const char *isa;
    KVC_TRY(kvc_isa(&isa));
    KVC_TRY(kvc_format_check(format, D));
    KVC_CHECK(!kvc_format_is_raw(format), KVC_E_VALUE, "%s: expected a quantized format, got %s; use int8", what,
              kvc_format_get(format)->name);
    return KVC_OK;
}

/* ---------------------------------------------------------------- rows */

typedef struct quantizer {
    int format;
    kvc_dtype dtype;
    const uint8_t *x;
    int64_t D;
    uint8_t *codes, *scales;
    int64_t meta_bytes;                      /* per row */
    const uint8_t *from_codes, *from_scales; /* inputs of dequantize */
    float *out;
    atomic_llong bad; /* first row with NaN or Inf; n if there is none */
} quantizer;

static int64_t row_meta(int format, int64_t D)
{
    kvc_traits f = kvc_format_traits(format);
    return kvc_meta_planes(f, D) * kvc_meta_size(f);
}

/* Quantizes 16 rows with the tile kernel of K, as a page of 16 tokens; the transposed words of the tile are those of
 * the rows. */
static void quantize_tile(const quantizer *q, const kvc_tile_kernels *kernels, int64_t i)
{
    _Alignas(KVC_ALIGN) float x[KVC_TILE * KVC_MAX_DIM];
    _Alignas(KVC_ALIGN) uint8_t tile[KVC_TILE * KVC_MAX_DIM], meta[KVC_TILE * KVC_MAX_DIM];
    int64_t D = q->D, row_bytes = D * (q->dtype == KVC_F32 ? 4 : 2), words = D * kvc_format_bits(q->format) / 32;
    int64_t each = kvc_meta_size(kvc_format_traits(q->format));
    kvc_room side = {.format = q->format, .key = 1, .dim = D, .page_size = KVC_TILE, .tiles = tile, .meta = meta};
    const uint8_t *row[KVC_TILE];
    for (int64_t t = 0; t < KVC_TILE; t++) row[t] = q->x + (i + t) * row_bytes;
    uint32_t guard = kvc_fp_begin();
    kernels->load(row, q->dtype, D, x);
    kernels->encode(&side, 0, x);
    kvc_fp_end(guard);
    for (int64_t t = 0; t < KVC_TILE; t++) {
        uint8_t *codes = q->codes + (i + t) * 4 * words, *to = q->scales + (i + t) * q->meta_bytes;
        for (int64_t j = 0; j < words; j++) memcpy(codes + 4 * j, tile + (j * KVC_TILE + t) * 4, 4);
        for (int64_t at = 0; at < q->meta_bytes; at += each)
            memcpy(to + at, meta + at * KVC_TILE + t * each, (size_t)each);
    }
}

/* Packs bits [low, low + bits) of a row's codes into planes. */
static void pack(int bits, int low, int64_t D, const uint8_t *codes, uint8_t *to)
{
    int64_t period = D * bits / 8;
    for (int64_t j = 0; j < period; j++) {
        to[j] = 0;
        for (int p = 0; p < 8 / bits; p++)
            to[j] |= (uint8_t)((codes[p * period + j] >> low & ((1 << bits) - 1)) << bits * p);
    }
}

/* Unpacks planes to bits [low, low + bits) of the codes. Lower bits are kept. */
static void unpack(int bits, int low, int64_t D, const uint8_t *from, uint8_t *codes)
{
    int64_t period = D * bits / 8;
    for (int64_t d = 0; d < D; d++) { /* NOLINTNEXTLINE: bits is 1, 2 or 4, the format was checked */
        int code = (from[d % period] >> bits * (d / period) & ((1 << bits) - 1)) << low;
        codes[d] = (uint8_t)(low ? codes[d] | code : code);
    }
}

static void quantize_few(const quantizer *q, int64_t i, int64_t n)
{
    _Alignas(KVC_ALIGN) float rows[KVC_TILE * KVC_MAX_DIM];
    _Alignas(KVC_ALIGN) uint8_t codes[KVC_TILE * KVC_MAX_DIM];
    int64_t D = q->D, row_bytes = D * (q->dtype == KVC_F32 ? 4 : 2);
    int bits = kvc_format_bits(q->format);
    int64_t period = D * bits / 8; /* bytes of packed codes */
    kvc_load_rows(q->x + i * row_bytes, D, q->dtype, n, D, rows);
    kvc_kernels_get()->encode(q->format, rows, n, D, NULL, codes, q->scales + i * q->meta_bytes);
    for (int64_t r = 0; r < n; r++) {
        uint8_t *to = q->codes + (i + r) * period;
        pack(bits == 3 ? 2 : bits, 0, D, codes + r * D, to);
        if (bits == 3) pack(1, 2, D, codes + r * D, to + D / 4);
    }
}

static void quantize_rows(int64_t begin, int64_t end, void *context)
{
    quantizer *q = context;
    const kvc_tile_kernels *kernels = kvc_kernels_get()->tile;
    int64_t D = q->D, row_bytes = D * (q->dtype == KVC_F32 ? 4 : 2);
    for (int64_t i = begin; i < end; i += KVC_TILE) {
        int64_t n = end - i < KVC_TILE ? end - i : KVC_TILE;
        for (int64_t r = i; r < i + n; r++)
            if (!kvc_all_finite(q->x + r * row_bytes, q->dtype, D)) {
                long long first = atomic_load(&q->bad);
                while (r < first && !atomic_compare_exchange_weak(&q->bad, &first, r)) continue;
                return;
            }
        if (kernels && n == KVC_TILE)
            quantize_tile(q, kernels, i);
        else
            quantize_few(q, i, n);
    }
}

kvc_status kvc_quantize(int format, kvc_dtype dtype, const void *x, int64_t n, int64_t D, uint8_t *codes,
                        uint8_t *scales, const kvc_exec *exec)
{
    quantizer q = {.format = format, .dtype = dtype, .x = x, .D = D, .codes = codes, .scales = scales};
    KVC_TRY(check_quantized("quantize", format, D));
    KVC_TRY(kvc_dtype_check(dtype, "quantize: x"));
    q.meta_bytes = row_meta(format, D);
    atomic_init(&q.bad, n);
    run(exec, n, quantize_rows, &q);
    KVC_CHECK(atomic_load(&q.bad) == n, KVC_E_VALUE, "quantize: x: expected finite numbers, got NaN or Inf in row %lld",
              (long long)atomic_load(&q.bad));
    return KVC_OK;
}

static void dequantize_rows(int64_t begin, int64_t end, void *context)
{
    quantizer *q = context;
    _Alignas(KVC_ALIGN) uint8_t codes[KVC_MAX_DIM];
    int64_t D = q->D, m = q->meta_bytes;
    int bits = kvc_format_bits(q->format);
    if (bits == 8) {
        kvc_decode_codes(q->format, q->from_codes + begin * D, q->from_scales + begin * m, end - begin, D,
                         q->out + begin * D);
        return;
    }
    int64_t period = D * bits / 8;
    for (int64_t i = begin; i < end; i++) {
        unpack(bits == 3 ? 2 : bits, 0, D, q->from_codes + i * period, codes);
        if (bits == 3) unpack(1, 2, D, q->from_codes + i * period + D / 4, codes);
        kvc_decode_codes(q->format, codes, q->from_scales + i * m, 1, D, q->out + i * D);
    }
}

kvc_status kvc_dequantize(int format, const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t D, float *x,
                          const kvc_exec *exec)
{
    quantizer q = {.format = format, .D = D, .from_codes = codes, .from_scales = scales, .out = x};
    KVC_TRY(check_quantized("dequantize", format, D));
    q.meta_bytes = row_meta(format, D);
    run(exec, n, dequantize_rows, &q);
    return KVC_OK;
}

/* ---------------------------------------------------------------- pages */

typedef struct packer {
    int key, value;
    const kvc_dense *k, *v;
    int64_t H, per_row, key_dim, value_dim, page_size, page_bytes; /* per_row: pages per head */
    uint8_t *pages;
    atomic_bool failed;
} packer;

static void pack_side(const kvc_room *side, const kvc_dense *x, int64_t b, int64_t h, int64_t t, float *scratch)
{
    const uint8_t *src = x->data;
    src += (b * x->stride[0] + h * x->stride[1] + t * x->stride[2]) * (x->dtype == KVC_F32 ? 4 : 2);
    if (kvc_format_is_raw(side->format)) {
        kvc_store_rows(side, 0, side->page_size, src, x->stride[2], x->dtype, scratch);
        return;
    }
    const uint8_t *rows[KVC_MAX_PAGE];
    for (int64_t i = 0; i < side->page_size; i++) rows[i] = src + i * x->stride[2] * (x->dtype == KVC_F32 ? 4 : 2);
    kvc_encode_page(side, &(kvc_source){.row = rows, .dtype = x->dtype}, scratch);
}

static void pack_pages(int64_t begin, int64_t end, void *context)
{
    packer *p = context;
    int64_t dim = p->key_dim > p->value_dim ? p->key_dim : p->value_dim;
    float *scratch;
    if (kvc_scratch(kvc_page_scratch(dim, p->page_size), sizeof *scratch, &scratch) != KVC_OK) {
        atomic_store(&p->failed, true);
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        int64_t h = i % p->H, t = i / p->H % p->per_row * p->page_size, b = i / p->H / p->per_row;
        uint8_t *page = p->pages + i * p->page_bytes;
        memset(page, 0, (size_t)p->page_bytes); /* clears the gaps between sections, too */
        for (int key = 0; key < 2; key++) {
            kvc_room side = kvc_page_room(page, key, p->key, p->value, p->key_dim, p->value_dim, p->page_size);
            pack_side(&side, key ? p->k : p->v, b, h, t, scratch);
        }
    }
    kvc_scratch_free(scratch);
}

static const char *const dtype_names[] = {"float32", "float16", "bfloat16"};

static kvc_status check_dense(const char *name, int format, const kvc_dense *x, int64_t B, int64_t H, int64_t T,
                              int64_t dim)
{
    KVC_TRY(kvc_format_check(format, dim));
    KVC_TRY(kvc_dtype_check(x->dtype, *name == 'k' ? "pack: k" : "pack: v"));
    KVC_CHECK(!kvc_format_is_raw(format) || format - KVC_RAW_F32 == (int)x->dtype, KVC_E_TYPE,
              "pack: %s: expected %s for %s pages, got %s", name, dtype_names[format - KVC_RAW_F32],
              kvc_format_get(format)->name, dtype_names[x->dtype]);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t t = 0; t < T; t++) {
                const uint8_t *row = x->data;
                row += (b * x->stride[0] + h * x->stride[1] + t * x->stride[2]) * (x->dtype == KVC_F32 ? 4 : 2);
                KVC_CHECK(kvc_all_finite(row, x->dtype, dim), KVC_E_VALUE,
                          "pack: %s: expected finite numbers, got NaN or Inf at sequence %lld, head %lld, token %lld",
                          name, (long long)b, (long long)h, (long long)t);
            }
    return KVC_OK;
}

static kvc_status check_pages(const char *what, int64_t page_size, int64_t B, int64_t H, int64_t T)
{
    KVC_TRY(kvc_page_size_check(page_size, what));
    KVC_CHECK(B >= 0 && H >= 0 && T >= 0 && T % page_size == 0, KVC_E_VALUE,
              "%s: expected full pages (a multiple of %lld tokens), got T=%lld", what, (long long)page_size,
              (long long)T);
    return KVC_OK;
}

kvc_status kvc_pack(int key, int value, const kvc_dense *k, const kvc_dense *v, int64_t B, int64_t H, int64_t T,
                    int64_t key_dim, int64_t value_dim, int64_t page_size, uint8_t *pages, const kvc_exec *exec)
{
    const char *isa;
    KVC_TRY(kvc_isa(&isa));
    KVC_TRY(check_pages("pack", page_size, B, H, T));
    KVC_TRY(check_dense("k", key, k, B, H, T, key_dim));
    KVC_TRY(check_dense("v", value, v, B, H, T, value_dim));
    packer p = {key, value, k, v, H, T / page_size, key_dim, value_dim, page_size, 0, pages, false};
    p.page_bytes = kvc_page_bytes(key, value, key_dim, value_dim, page_size);
    run(exec, B * p.per_row * H, pack_pages, &p);
    KVC_CHECK(!atomic_load(&p.failed), KVC_E_MEMORY, "out of memory: pack found none for its workspace");
    return KVC_OK;
}

/* ---------------------------------------------------------------- pages from encoded rows */

typedef struct copier {
    int key, value;
    const kvc_coded *k, *v;
    int64_t H, T, key_dim, value_dim, page_size, page_bytes;
    uint8_t *pages;
} copier;

static void copy_pages(int64_t begin, int64_t end, void *context)
{
    copier *c = context;
    for (int64_t i = begin; i < end; i++) {
        int64_t per_row = c->T / c->page_size, h = i % c->H, b = i / c->H / per_row;
        int64_t t = i / c->H % per_row * c->page_size;
        uint8_t *page = c->pages + i * c->page_bytes;
        memset(page, 0, (size_t)c->page_bytes); /* clears the gaps between sections, too */
        for (int key = 0; key < 2; key++) {
            kvc_room side = kvc_page_room(page, key, c->key, c->value, c->key_dim, c->value_dim, c->page_size);
            const kvc_coded *x = key ? c->k : c->v;
            const uint8_t *codes = x->codes + b * x->stride[0] + h * x->stride[1] + t * x->stride[2];
            const uint16_t *scales = x->scales + (b * c->H + h) * c->T + t;
            kvc_store_codes(&side, 0, c->page_size, codes, x->stride[2], (const uint8_t *)scales);
        }
    }
}

static kvc_status check_coded(const char *name, int format, const kvc_coded *x, int64_t B, int64_t H, int64_t T,
                              int64_t dim)
{
    KVC_TRY(kvc_format_check(format, dim));
    kvc_traits f = kvc_format_traits(format);
    KVC_CHECK(f.bits == 8 && kvc_meta_planes(f, dim) == 1, KVC_E_VALUE,
              "pack_codes: %s: expected int8, fp8_e4m3 or fp8_e5m2, got %s", name, kvc_format_get(format)->name);
    uint8_t most = f.coding == KVC_CODING_E4M3 ? 0x7e : f.coding == KVC_CODING_E5M2 ? 0x7b : 0x7f;
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t t = 0; t < T; t++) {
                const uint8_t *row = x->codes + b * x->stride[0] + h * x->stride[1] + t * x->stride[2];
                bool fine = x->scales[(b * H + h) * T + t] < 0x7c00; /* finite and not negative */
                for (int64_t d = 0; d < dim; d++) fine &= (row[d] & 0x7f) <= most;
                KVC_CHECK(
                    fine, KVC_E_VALUE,
                    "pack_codes: %s: expected finite codes and scales of at least 0, got others at sequence %lld, "
                    "head %lld, token %lld",
                    name, (long long)b, (long long)h, (long long)t);
            }
    return KVC_OK;
}

kvc_status kvc_pack_codes(int key, int value, const kvc_coded *k, const kvc_coded *v, int64_t B, int64_t H, int64_t T,
                          int64_t key_dim, int64_t value_dim, int64_t page_size, uint8_t *pages, const kvc_exec *exec)
{
    KVC_TRY(check_pages("pack_codes", page_size, B, H, T));
    KVC_TRY(check_coded("k", key, k, B, H, T, key_dim));
    KVC_TRY(check_coded("v", value, v, B, H, T, value_dim));
    copier c = {key, value, k, v, H, T, key_dim, value_dim, page_size, 0, pages};
    c.page_bytes = kvc_page_bytes(key, value, key_dim, value_dim, page_size);
    run(exec, B * (T / page_size) * H, copy_pages, &c);
    return KVC_OK;
}
