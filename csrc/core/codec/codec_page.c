/* codec_page.c - converts pages to and from dense rows: 16 tokens at a time with the level's tile kernels, or row by
 * row (codec.c) if the level has none. */
#include "codec.h"

static const kvc_tile_kernels *tile_kernels(void) { return kvc_kernels_get()->tile; }

int64_t kvc_page_scratch(int64_t dim, int64_t page_size) { return page_size * dim + kvc_codec_scratch(dim, page_size); }

static void encode_by_rows(const kvc_room *side, const kvc_source *from, float *rows)
{
    int64_t D = side->dim;
    if (from->raw) kvc_decode(from->raw, 0, side->page_size, rows);
    for (int64_t t = 0; !from->raw && t < side->page_size; t++)
        kvc_load_rows(from->row[t], 0, from->dtype, 1, D, rows + t * D);
    kvc_encode(side, rows, rows + side->page_size * D);
}

void kvc_encode_page(const kvc_room *side, const kvc_source *from, float *scratch)
{
    const kvc_tile_kernels *kernels = tile_kernels();
    if (!kernels) {
        encode_by_rows(side, from, scratch);
        return;
    }
    /* format with statistics over tokens */
    bool whole = side->key && kvc_format_traits(side->format).keys != KVC_KEYS_TOKEN;
    uint32_t guard = kvc_fp_begin();
    float *x = scratch;
    for (int64_t tile = 0; tile < side->page_size / KVC_TILE; tile++) {
        if (from->raw)
            kernels->decode(from->raw, tile, x);
        else
            kernels->load(from->row + tile * KVC_TILE, from->dtype, side->dim, x);
        if (whole)
            x += KVC_TILE * side->dim;
        else
            kernels->encode(side, tile, x);
    }
    if (whole) kernels->encode_page(side, scratch);
    kvc_fp_end(guard);
}

bool kvc_all_finite(const void *src, kvc_dtype dtype, int64_t n)
{
    const kvc_tile_kernels *kernels = tile_kernels();
    int64_t each = dtype == KVC_F32 ? 1 : 2, words = kernels ? n / each / KVC_TILE * KVC_TILE : 0;
    return (words == 0 || kernels->finite(src, dtype, words)) &&
           kvc_row_finite((const uint8_t *)src + 4 * words, dtype, n - words * each);
}

/* Decoded values may exceed the range of the stored dtype; they are clamped to its largest number. */
static void put_row(const float *row, kvc_dtype dtype, int64_t dim, uint8_t *to)
{
    uint16_t *half = (uint16_t *)(void *)to;
    if (dtype == KVC_F32)
        memcpy(to, row, (size_t)dim * sizeof *row);
    else if (dtype == KVC_F16)
        for (int64_t d = 0; d < dim; d++) half[d] = kvc_f32_to_f16(kvc_saturate(row[d], 65504));
    else
        for (int64_t d = 0; d < dim; d++) half[d] = kvc_f32_to_bf16(kvc_saturate(row[d], 0x1.fep127f));
}

void kvc_decode_page(const kvc_side *side, int64_t n, kvc_dtype dtype, uint8_t *const *to, bool stream, float *scratch)
{
    const kvc_tile_kernels *kernels = tile_kernels();
    uint32_t guard = kvc_fp_begin();
    for (int64_t t0 = 0; t0 < n; t0 += KVC_TILE) {
        int64_t run = n - t0 < KVC_TILE ? n - t0 : KVC_TILE;
        if (kernels) {
            uint8_t *part[KVC_TILE] = {0};
            if (run < KVC_TILE) memcpy(part, to + t0, (size_t)run * sizeof *part);
            kernels->decode(side, t0 / KVC_TILE, scratch);
            kernels->store(scratch, dtype, side->dim, run < KVC_TILE ? part : to + t0, stream);
            continue;
        }
        kvc_decode(side, t0, run, scratch);
        for (int64_t i = 0; i < run; i++)
            if (to[t0 + i]) put_row(scratch + i * side->dim, dtype, side->dim, to[t0 + i]);
    }
    kvc_fp_end(guard);
}
