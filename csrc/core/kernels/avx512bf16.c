/* avx512bf16.c - the avx512bf16 level: avx512 with BF16 and VBMI (Zen 4 and 5, Sapphire Rapids and later), used for
 * bf16 and fp8 pages. */
#if defined(__x86_64__)
#include "target.h"
KVC_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16,f16c,fma")
#include "avx512.h"
#include "levels.h"
#include "accumulated.h"

/* The first part is truncated, not rounded, so that it cannot overflow. */
bool kvc_avx512bf16_halves(const kvc_query_form *form, int64_t rows, int64_t dim)
{
    __m512i any = _mm512_setzero_si512();
    for (int64_t i = 0; i < rows * dim; i += 16) {
        __m512i x = _mm512_loadu_si512(form->q + i);
        __m512 half = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000u)));
        __m256i rest = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(_mm512_castsi512_ps(x), half));
        _mm256_storeu_si256((__m256i *)(form->half + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
        _mm256_storeu_si256((__m256i *)(form->rest + i), rest);
        any = _mm512_or_si512(any, _mm512_cvtepu16_epi32(rest));
    }
    return !(_mm512_reduce_or_epi32(any) & 0x7fff);
}

/* Raw pages of few rows wait for memory. Zen 5 then takes up to 21% less time with the fp32 products of avx512 than with
 * vdpbf16ps, although those take a third longer in cache: loads of this page from L2 seem to wait behind the next page's
 * prefetches if these are issued faster than memory answers. */
#define FEW_ROWS 8
static void qk_raw_bf16(const kvc_qk_args *args)
{
    args->all_rows <= FEW_ROWS ? kvc_avx512_qk_raw_bf16(args) : kvc_avx512bf16_qk_raw_bf16(args);
}
static void pv_raw_bf16(const kvc_pv_args *args)
{
    args->all_rows <= FEW_ROWS ? kvc_avx512_pv_raw_bf16(args) : kvc_avx512bf16_pv_raw_bf16(args);
}

const kvc_kernels kvc_kernels_avx512bf16 = {.name = "avx512bf16",
                                            .halves = kvc_avx512bf16_halves,
                                            KVC_AVX512_TABLE,
                                            .qk[KVC_RAW_BF16] = qk_raw_bf16,
                                            .pv[KVC_RAW_BF16] = pv_raw_bf16,
                                            KVC_COMMON_KERNELS(KVC_ENTRY, avx512)
                                                KVC_FP8_KERNELS(KVC_ENTRY, avx512bf16)};
KVC_TARGET_END
#endif
