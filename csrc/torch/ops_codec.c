/* ops_codec.c - quantize, dequantize, map_heads, pack. */
#include "ops.h"
#include "base/status.h"

#include <string.h>

#define MAX_RANK 8

/* Checks that `code` is a quantized format that takes rows of `dim` (dim < 0: not known yet). */
static kvc_status check_format(const kvc_frame *f, int64_t code, int64_t dim)
{
    const kvc_format_info *info = code >= 0 && code < KVC_FORMATS ? kvc_format_get((int)code) : NULL;
    KVC_CHECK(info && !kvc_format_is_raw((int)code), KVC_E_VALUE,
              "%s: format: expected a quantized format's code, got %lld; see kvcompress.formats", f->op->name,
              (long long)code);
    return dim < 0 ? KVC_OK : kvc_format_check((int)code, dim);
}

kvc_status kvc_op_quantize(kvc_frame *f)
{
    const kvc_tensor *x = &f->tensor[0];
    void *codes, *scales;
    int64_t size[MAX_RANK];
    KVC_TRY(kvc_op_expect_contiguous(f, 0, "x", KVC_T_FLOATS, -1));
    KVC_CHECK(x->dim >= 1 && x->dim <= MAX_RANK && x->numel > 0, KVC_E_VALUE,
              "quantize: x: expected [..., D] with 1 to %d dimensions and at least one element, got %lld and %lld",
              MAX_RANK, (long long)x->dim, (long long)x->numel);
    int64_t D = x->size[x->dim - 1];
    KVC_TRY(check_format(f, f->integer[1], D));
    int format = (int)f->integer[1];
    memcpy(size, x->size, (size_t)x->dim * sizeof *size);
    size[x->dim - 1] = D * kvc_format_bits(format) / 8;
    KVC_TRY(kvc_op_output(f, KVC_T_U8, x->dim, size, &codes));
    kvc_traits traits = kvc_format_traits(format);
    int64_t planes = kvc_meta_planes(traits, D), rank = x->dim - (planes == 1);
    size[x->dim - 1] = planes;
    KVC_TRY(kvc_op_output(f, kvc_meta_size(traits) == 2 ? KVC_T_F16 : KVC_T_U8, rank, size, &scales));
    if (f->cuda) return kvc_gpu_quantize(f, format, (kvc_dtype)x->type, x->data, x->numel / D, D, codes, scales);
    return kvc_quantize(format, (kvc_dtype)x->type, x->data, x->numel / D, D, codes, scales, &kvc_op_exec);
}

kvc_status kvc_op_dequantize(kvc_frame *f)
{
    const kvc_tensor *codes = &f->tensor[0], *scales = &f->tensor[1];
    void *x;
    int64_t size[MAX_RANK];
    KVC_TRY(kvc_op_expect_contiguous(f, 0, "codes", 1u << KVC_T_U8, -1));
    KVC_CHECK(codes->dim >= 1 && codes->dim <= MAX_RANK && codes->numel > 0, KVC_E_VALUE,
              "dequantize: codes: expected [..., D * bits / 8], not empty, got %lld dimensions and %lld elements",
              (long long)codes->dim, (long long)codes->numel);
    KVC_TRY(check_format(f, f->integer[2], -1));
    int format = (int)f->integer[2];
    kvc_traits traits = kvc_format_traits(format);
    memcpy(size, codes->size, (size_t)codes->dim * sizeof *size);
    int64_t D = size[codes->dim - 1] * 8 / kvc_format_bits(format); /* NOLINT: check_format passed */
    KVC_TRY(check_format(f, format, D));
    int64_t planes = kvc_meta_planes(traits, D), rows = codes->numel / size[codes->dim - 1];
    kvc_scalar type = kvc_meta_size(traits) == 2 ? KVC_T_F16 : KVC_T_U8;
    KVC_TRY(kvc_op_expect_contiguous(f, 1, "scales", 1u << type, codes->dim - (planes == 1)));
    size[codes->dim - 1] = planes;
    for (int64_t i = 0; i < scales->dim; i++)
        KVC_CHECK(scales->size[i] == size[i], KVC_E_VALUE,
                  "dequantize: scales: expected one a row of codes (%lld in dimension %lld), got %lld",
                  (long long)size[i], (long long)i, (long long)scales->size[i]);
    size[codes->dim - 1] = D;
    KVC_TRY(kvc_op_output(f, KVC_T_F32, codes->dim, size, &x));
    if (f->cuda) return kvc_gpu_dequantize(f, format, codes->data, scales->data, rows, D, x);
    return kvc_dequantize(format, codes->data, scales->data, rows, D, x, &kvc_op_exec);
}

kvc_status kvc_op_map_heads(kvc_frame *f)
{
    const kvc_tensor *x = &f->tensor[0], *by = &f->tensor[1];
    kvc_dense rows;
    void *out;
    KVC_TRY(kvc_op_on_cpu(f));
    KVC_TRY(kvc_op_dense(f, 0, "x", &rows));
    KVC_TRY(kvc_op_expect_contiguous(f, 1, "by", 1u << KVC_T_F32, 3));
    KVC_TRY(kvc_op_expect(f, 2, "like", KVC_T_FLOATS, -1));
    KVC_CHECK(by->size[1] == x->size[3] && by->size[2] == x->size[3], KVC_E_VALUE,
              "map_heads: by: expected [H, D, D] of rows of %lld, got [%lld, %lld, %lld]", (long long)x->size[3],
              (long long)by->size[0], (long long)by->size[1], (long long)by->size[2]);
    KVC_TRY(kvc_op_output(f, f->tensor[2].type, 4, x->size, &out));
    return kvc_map_heads(&rows, x->size[0], x->size[1], x->size[2], x->size[3], by->data, by->size[0], out,
                         (kvc_dtype)f->tensor[2].type, &kvc_op_exec);
}

kvc_status kvc_op_pack(kvc_frame *f)
{
    const kvc_tensor *k = &f->tensor[0], *v = &f->tensor[1];
    kvc_dense key, value;
    void *pages;
    KVC_TRY(kvc_op_dense(f, 0, "k", &key));
    KVC_TRY(kvc_op_dense(f, 1, "v", &value));
    int64_t kf = f->integer[2], vf = f->integer[3], page_size = f->integer[4];
    KVC_CHECK(k->numel > 0 && v->numel > 0, KVC_E_VALUE, "pack: k, v: expected at least one page of tokens, got none");
    for (int d = 0; d < 3; d++)
        KVC_CHECK(k->size[d] == v->size[d], KVC_E_VALUE, "pack: v: expected %lld in dimension %d as k has, got %lld",
                  (long long)k->size[d], d, (long long)v->size[d]);
    KVC_CHECK(kf >= 0 && kf < KVC_FORMATS && vf >= 0 && vf < KVC_FORMATS, KVC_E_VALUE,
              "pack: key, value: expected format codes below %d, got %lld and %lld", KVC_FORMATS, (long long)kf,
              (long long)vf);
    KVC_TRY(kvc_page_size_check(page_size, "pack"));
    KVC_CHECK(k->size[2] % page_size == 0, KVC_E_VALUE, "pack: page_size: expected a divisor of T=%lld, got %lld",
              (long long)k->size[2], (long long)page_size);
    KVC_TRY(kvc_format_check((int)kf, k->size[3]));
    KVC_TRY(kvc_format_check((int)vf, v->size[3]));
    int64_t size[4] = {k->size[0], k->size[2] / page_size, k->size[1],
                       kvc_page_bytes((int)kf, (int)vf, k->size[3], v->size[3], page_size)};
    KVC_TRY(kvc_op_output(f, KVC_T_U8, 4, size, &pages));
    if (f->cuda) {
        int64_t shape[5] = {k->size[0], k->size[1], k->size[2], k->size[3], v->size[3]};
        return kvc_gpu_pack(f, (int)kf, (int)vf, &key, &value, shape, page_size, pages);
    }
    return kvc_pack((int)kf, (int)vf, &key, &value, k->size[0], k->size[1], k->size[2], k->size[3], v->size[3],
                    page_size, pages, &kvc_op_exec);
}
