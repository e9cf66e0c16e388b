/* format.c - access to the table in formats.def. */
#include "base/status.h"

static const kvc_format_info formats[KVC_FORMATS] = {
#define KVC_FORMAT(ID, name, bits, coding, scale, group, keys, rotated, dim_multiple, about)                           \
    {name, about, bits, group, KVC_KEYS_##keys, rotated, dim_multiple},
#include "formats.def"
#undef KVC_FORMAT
};

const kvc_format_info *kvc_format_get(int format)
{
    return format >= 0 && format < KVC_FORMATS ? &formats[format] : NULL;
}

kvc_status kvc_format_check(int format, int64_t dim)
{
    const kvc_format_info *f = kvc_format_get(format);
    KVC_CHECK(f, KVC_E_VALUE, "format: expected a code from 0 to %d, got %d; see formats()", KVC_FORMATS - 1, format);
    KVC_CHECK(dim >= f->dim_multiple && dim <= KVC_MAX_DIM && dim % f->dim_multiple == 0, KVC_E_VALUE,
              "format %s: expected a head dim that is a multiple of %d up to %d, got %lld", f->name, f->dim_multiple,
              KVC_MAX_DIM, (long long)dim);
    return KVC_OK;
}

kvc_status kvc_page_size_check(int64_t page_size, const char *op)
{
    KVC_CHECK(page_size >= KVC_TILE && page_size <= KVC_MAX_PAGE && page_size % KVC_TILE == 0, KVC_E_VALUE,
              "%s: page_size: expected a multiple of %d from %d to %d tokens, got %lld", op, KVC_TILE, KVC_TILE,
              KVC_MAX_PAGE, (long long)page_size);
    return KVC_OK;
}

int64_t kvc_page_bytes(int key, int value, int64_t key_dim, int64_t value_dim, int64_t page_size)
{
    if (kvc_format_check(key, key_dim) != KVC_OK || kvc_format_check(value, value_dim) != KVC_OK ||
        kvc_page_size_check(page_size, "page_bytes") != KVC_OK)
        return 0;
    return kvc_page_layout(key, value, key_dim, value_dim, page_size).bytes;
}
