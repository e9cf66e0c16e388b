/* codecs.c - arbitrary numbers through every encoder: NaN and Inf are rejected by all levels, everything else gives the
 * same bytes on each level, which decode to finite numbers. */
#include "input.h"

#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, data + size};
    int format = KVC_INT8 + (int)below(&in, KVC_FORMATS - KVC_INT8);
    int64_t D = a_dim(&in), P = 16 * (1 + below(&in, 3)), rows = P + below(&in, 5);
    kvc_traits f = kvc_format_traits(format);
    if (kvc_format_check(format, D) != KVC_OK) return 0;
    int64_t codes = rows * D * f.bits / 8, meta = rows * kvc_meta_planes(f, D) * kvc_meta_size(f);
    int64_t page = kvc_page_bytes(format, format, D, D, P);
    float *x = malloc((size_t)(rows * D) * 4), *y = malloc((size_t)(rows * D) * 4);
    bool finite = true;
    float last[16];
    for (int i = 0; i < 16; i++) last[i] = real_number(&in);
    for (int64_t i = 0; i < rows * D; i++) {
        x[i] = in.at < in.end ? real_number(&in) : last[i * 5 % 16] * (float)(i % 3 + 1);
        finite &= isfinite(x[i]) != 0;
    }
    uint8_t *first = NULL;
    for (int level = 0; use_level(level); level++) {
        uint8_t *all = calloc(1, (size_t)(codes + meta + page) + 64), *at = all + codes + meta;
        kvc_status status = kvc_quantize(format, KVC_F32, x, rows, D, all, all + codes, NULL);
        CHECK(status == (finite ? KVC_OK : KVC_E_VALUE));
        uint8_t *aligned = aligned_alloc(64, (size_t)kvc_align(page));
        memset(aligned, 0, (size_t)kvc_align(page));
        kvc_dense d = {x, {P * D, P * D, D}, KVC_F32};
        bool pageable = true;
        for (int64_t i = 0; i < P * D; i++) pageable &= isfinite(x[i]) != 0;
        CHECK(kvc_pack(format, format, &d, &d, 1, 1, P, D, D, P, aligned, NULL) == (pageable ? KVC_OK : KVC_E_VALUE));
        memcpy(at, aligned, (size_t)page);
        if (finite) {
            OK(kvc_dequantize(format, all, all + codes, rows, D, y, NULL));
            for (int64_t i = 0; i < rows * D; i++) CHECK(isfinite(y[i]));
            if (!first) first = memcpy(malloc((size_t)(codes + meta + page)), all, (size_t)(codes + meta + page));
            CHECK(!memcmp(first, all, (size_t)(codes + meta + page)));
        }
        free(all), free(aligned);
    }
    free(first), free(x), free(y);
    return 0;
}
