/* ops_granular.c - quantize_by, dequantize_by, pack_codes. */
#include "ops.h"
#include "base/status.h"
#include "granular.h"

/* Reads scheme, granularity, group and packing from arguments i to i + 3. */
static kvc_status read_grain(const kvc_frame *f, int i, kvc_grain *grain)
{
    const int64_t *n = f->integer + i;
    KVC_CHECK(n[0] >= 0 && n[0] < KVC_SCHEMES && n[1] >= 0 && n[1] < KVC_BYS && n[3] >= 0 && n[3] < KVC_PACKINGS,
              KVC_E_VALUE, "%s: expected codes of a scheme, a granularity and a packing, got %lld, %lld, %lld",
              f->op->name, (long long)n[0], (long long)n[1], (long long)n[3]);
    grain->scheme = (int)n[0];
    grain->by = (int)n[1];
    grain->group = n[2];
    grain->packing = (int)n[3];
    return KVC_OK;
}

static void set_size(kvc_grain *grain, const int64_t *size)
{
    grain->B = size[0];
    grain->H = size[1];
    grain->T = size[2];
    grain->D = size[3];
}

/* Checks that argument i is a contiguous tensor of the scales' shape. */
static kvc_status expect_scales(const kvc_frame *f, int i, const char *name, kvc_scalar type,
                                const kvc_grain_sizes *sizes)
{
    KVC_TRY(kvc_op_expect_contiguous(f, i, name, 1u << type, 4));
    const int64_t *got = f->tensor[i].size, *want = sizes->scales;
    for (int d = 0; d < 4; d++)
        KVC_CHECK(got[d] == want[d], KVC_E_VALUE,
                  "%s: %s: expected shape [%lld, %lld, %lld, %lld], got [%lld, %lld, %lld, %lld]", f->op->name, name,
                  (long long)want[0], (long long)want[1], (long long)want[2], (long long)want[3], (long long)got[0],
                  (long long)got[1], (long long)got[2], (long long)got[3]);
    return KVC_OK;
}

/* Argument i: a single number; 1 if empty. */
static kvc_status read_factor(const kvc_frame *f, int i, float *factor)
{
    const kvc_tensor *t = &f->tensor[i];
    KVC_TRY(kvc_op_expect(f, i, "tensor_scale", 1u << KVC_T_F32, -1));
    KVC_CHECK(t->numel <= 1, KVC_E_VALUE, "%s: tensor_scale: expected one number or none, got %lld", f->op->name,
              (long long)t->numel);
    *factor = t->numel ? *(const float *)t->data : 1;
    return KVC_OK;
}

kvc_status kvc_op_quantize_by(kvc_frame *f)
{
    KVC_TRY(kvc_op_on_cpu(f));
    kvc_dense x;
    kvc_grain grain;
    kvc_grain_sizes sizes;
    float factor = 1;
    void *codes, *scales, *zeros;
    KVC_TRY(kvc_op_dense(f, 0, "x", &x));
    KVC_TRY(read_grain(f, 4, &grain));
    set_size(&grain, f->tensor[0].size);
    KVC_TRY(kvc_grain_check(&grain, &sizes));
    KVC_TRY(read_factor(f, 3, &factor));
    for (int i = 1; i < 3; i++)
        if (f->tensor[i].numel) KVC_TRY(expect_scales(f, i, i == 1 ? "scale" : "zero", KVC_T_F32, &sizes));
    /* NOLINTNEXTLINE: read_grain checked the scheme */
    bool asymmetric = kvc_scheme_get(grain.scheme)->coding == KVC_CODING_UINT;
    const int64_t code_size[4] = {grain.B, grain.H, grain.T, sizes.row_bytes}, none[1] = {0};
    KVC_TRY(kvc_op_output(f, KVC_T_U8, 4, code_size, &codes));
    KVC_TRY(kvc_op_output(f, sizes.scale_bytes == 2 ? KVC_T_F16 : KVC_T_U8, 4, sizes.scales, &scales));
    KVC_TRY(kvc_op_output(f, KVC_T_F16, asymmetric ? 4 : 1, asymmetric ? sizes.scales : none, &zeros));
    const float *scale = f->tensor[1].numel ? f->tensor[1].data : NULL;
    const float *zero = f->tensor[2].numel ? f->tensor[2].data : NULL;
    return kvc_quantize_by(&grain, &x, scale, zero, factor, codes, scales, zeros, &kvc_op_exec);
}

kvc_status kvc_op_dequantize_by(kvc_frame *f)
{
    KVC_TRY(kvc_op_on_cpu(f));
    kvc_grain grain;
    kvc_grain_sizes sizes;
    float factor = 1;
    void *x;
    KVC_TRY(kvc_op_expect_contiguous(f, 0, "codes", 1u << KVC_T_U8, 4));
    KVC_TRY(read_grain(f, 4, &grain));
    set_size(&grain, f->tensor[0].size);
    const kvc_scheme_info *scheme = kvc_scheme_get(grain.scheme); /* NOLINT: read_grain checked it */
    KVC_CHECK(grain.D * 8 % scheme->bits == 0, KVC_E_VALUE,
              "dequantize_by: codes: expected whole elements of %d bits a row, got %lld bytes", scheme->bits,
              (long long)grain.D);
    grain.D = grain.D * 8 / scheme->bits;
    KVC_TRY(kvc_grain_check(&grain, &sizes));
    KVC_TRY(expect_scales(f, 1, "scales", sizes.scale_bytes == 2 ? KVC_T_F16 : KVC_T_U8, &sizes));
    if (scheme->coding == KVC_CODING_UINT) KVC_TRY(expect_scales(f, 2, "zeros", KVC_T_F16, &sizes));
    KVC_TRY(read_factor(f, 3, &factor));
    const int64_t size[4] = {grain.B, grain.H, grain.T, grain.D};
    KVC_TRY(kvc_op_output(f, KVC_T_F32, 4, size, &x));
    return kvc_dequantize_by(&grain, f->tensor[0].data, f->tensor[1].data, f->tensor[2].data, factor, x, &kvc_op_exec);
}

/* Reads codes from argument i and their scales from argument i + 2. */
static kvc_status read_coded(const kvc_frame *f, int i, const char *name, kvc_coded *coded)
{
    const kvc_tensor *t = &f->tensor[i], *scales = &f->tensor[i + 2];
    KVC_TRY(kvc_op_expect(f, i, name, 1u << KVC_T_U8, 4));
    KVC_CHECK(t->numel > 0 && (t->size[3] == 1 || t->stride[3] == 1), KVC_E_VALUE,
              "pack_codes: %s: expected a last dimension with stride 1, not empty; call .contiguous()", name);
    KVC_TRY(kvc_op_expect_contiguous(f, i + 2, "scales", 1u << KVC_T_F16, 3));
    for (int d = 0; d < 3; d++)
        KVC_CHECK(t->size[d] == f->tensor[0].size[d] && t->size[d] == scales->size[d], KVC_E_VALUE,
                  "pack_codes: %s: expected one shape [B, H, T] of k, v and their scales, got %lld, %lld, %lld in "
                  "dimension %d of k, of %s and of its scales",
                  name, (long long)f->tensor[0].size[d], (long long)t->size[d], (long long)scales->size[d], d, name);
    *coded = (kvc_coded){t->data, {t->stride[0], t->stride[1], t->stride[2]}, scales->data};
    return KVC_OK;
}

kvc_status kvc_op_pack_codes(kvc_frame *f)
{
    KVC_TRY(kvc_op_on_cpu(f));
    kvc_coded k, v;
    void *pages;
    KVC_TRY(read_coded(f, 0, "k", &k));
    KVC_TRY(read_coded(f, 1, "v", &v));
    int64_t kf = f->integer[4], vf = f->integer[5], page_size = f->integer[6];
    const int64_t *size = f->tensor[0].size, key_dim = size[3], value_dim = f->tensor[1].size[3];
    KVC_CHECK(kf >= 0 && kf < KVC_FORMATS && vf >= 0 && vf < KVC_FORMATS, KVC_E_VALUE,
              "pack_codes: key, value: expected format codes below %d, got %lld and %lld", KVC_FORMATS, (long long)kf,
              (long long)vf);
    KVC_TRY(kvc_page_size_check(page_size, "pack_codes"));
    KVC_CHECK(size[2] % page_size == 0, KVC_E_VALUE, "pack_codes: page_size: expected a divisor of T=%lld, got %lld",
              (long long)size[2], (long long)page_size);
    KVC_TRY(kvc_format_check((int)kf, key_dim));
    KVC_TRY(kvc_format_check((int)vf, value_dim));
    const int64_t out[4] = {size[0], size[2] / page_size, size[1],
                            kvc_page_bytes((int)kf, (int)vf, key_dim, value_dim, page_size)};
    KVC_TRY(kvc_op_output(f, KVC_T_U8, 4, out, &pages));
    return kvc_pack_codes((int)kf, (int)vf, &k, &v, size[0], size[1], size[2], key_dim, value_dim, page_size, pages,
                          &kvc_op_exec);
}
