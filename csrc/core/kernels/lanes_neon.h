/* lanes_neon.h - 16 lanes of fp32 (vf) or 32-bit integers (vi) for tile.h and affine.h, as four NEON registers. */
#ifndef KVC_LANES_NEON_H
#define KVC_LANES_NEON_H

#include <arm_neon.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

typedef struct vf {
    float32x4_t x[4];
} vf;
typedef struct vi {
    uint32x4_t x[4];
} vi;
typedef vi vm; /* mask: all ones for true */

#define OF_FOUR(type, expression)                                                                                      \
    type to_;                                                                                                          \
    for (int i = 0; i < 4; i++) to_.x[i] = (expression);                                                               \
    return to_
#define FLOAT2(name, f)                                                                                                \
    INLINE vf name(vf a, vf b) { OF_FOUR(vf, f(a.x[i], b.x[i])); }
#define INT2(name, f)                                                                                                  \
    INLINE vi name(vi a, vi b) { OF_FOUR(vi, f(a.x[i], b.x[i])); }

INLINE vf f_load(const float *p) { OF_FOUR(vf, vld1q_f32(p + 4 * i)); }
INLINE void f_store(float *p, vf a)
{
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.x[i]);
}
INLINE vf f_all(float a) { OF_FOUR(vf, vdupq_n_f32(a)); }
FLOAT2(f_add, vaddq_f32)
FLOAT2(f_sub, vsubq_f32)
FLOAT2(f_minus, vsubq_f32)
FLOAT2(f_mul, vmulq_f32)
FLOAT2(f_div, vdivq_f32)
INLINE vf f_sqrt(vf a) { OF_FOUR(vf, vsqrtq_f32(a.x[i])); }
INLINE vf f_floor(vf a) { OF_FOUR(vf, vrndmq_f32(a.x[i])); }
/* a < b ? a : b, a > b ? a : b. The result is b if they are equal or one is NaN, unlike FMIN and FMAX. */
INLINE vf f_min(vf a, vf b) { OF_FOUR(vf, vbslq_f32(vcltq_f32(a.x[i], b.x[i]), a.x[i], b.x[i])); }
INLINE vf f_max(vf a, vf b) { OF_FOUR(vf, vbslq_f32(vcgtq_f32(a.x[i], b.x[i]), a.x[i], b.x[i])); }
INLINE vf f_fma(vf a, vf b, vf c) { OF_FOUR(vf, vfmaq_f32(c.x[i], a.x[i], b.x[i])); }
/* Clamps a to [-most, most]. */
INLINE vf f_within(vf a, float most) { return f_min(f_max(a, f_all(-most)), f_all(most)); }
INLINE vf f_abs(vf a) { OF_FOUR(vf, vabsq_f32(a.x[i])); }

INLINE vi f_bits(vf a) { OF_FOUR(vi, vreinterpretq_u32_f32(a.x[i])); }
INLINE vf i_bits(vi a) { OF_FOUR(vf, vreinterpretq_f32_u32(a.x[i])); }
INLINE vf f_of(vi a) { OF_FOUR(vf, vcvtq_f32_s32(vreinterpretq_s32_u32(a.x[i]))); }
INLINE vm f_less(vf a, vf b) { OF_FOUR(vi, vcltq_f32(a.x[i], b.x[i])); }

INLINE vi i_load(const void *p) { OF_FOUR(vi, vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)p + 16 * i))); }
INLINE vi i_load_half(const void *p)
{
    const uint8_t *from = p;
    vi a = {{vreinterpretq_u32_u8(vld1q_u8(from)), vreinterpretq_u32_u8(vld1q_u8(from + 16)), vdupq_n_u32(0),
             vdupq_n_u32(0)}};
    return a;
}
INLINE void i_store(void *p, vi a)
{
    for (int i = 0; i < 4; i++) vst1q_u8((uint8_t *)p + 16 * i, vreinterpretq_u8_u32(a.x[i]));
}
INLINE void i_stream(void *p, vi a) { i_store(p, a); } /* non-temporal stores do not pay off here */
INLINE void i_store_half(void *p, vi a)
{
    for (int i = 0; i < 2; i++) vst1q_u8((uint8_t *)p + 16 * i, vreinterpretq_u8_u32(a.x[i]));
}
INLINE vi i_all(uint32_t a) { OF_FOUR(vi, vdupq_n_u32(a)); }
INT2(i_add, vaddq_u32)
INT2(i_sub, vsubq_u32)
INT2(i_and, vandq_u32)
INT2(i_or, vorrq_u32)
INT2(i_is, vceqq_u32)
INLINE vi i_max(vi a, vi b)
{
    OF_FOUR(vi, vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(a.x[i]), vreinterpretq_s32_u32(b.x[i]))));
}
INLINE vi i_left(vi a, int64_t n) { OF_FOUR(vi, vshlq_u32(a.x[i], vdupq_n_s32((int32_t)n))); }
INLINE vi i_right(vi a, int64_t n) { OF_FOUR(vi, vshlq_u32(a.x[i], vdupq_n_s32((int32_t)-n))); }
INLINE vi i_keep(vm m, vi a) { return i_and(m, a); }
/* mask ? a : b, bitwise. */
INLINE vi i_mix(vi mask, vi a, vi b) { OF_FOUR(vi, vbslq_u32(mask.x[i], a.x[i], b.x[i])); }
INLINE vi i_pick(vm m, vi yes, vi no) { return i_mix(m, yes, no); }
INLINE vf f_pick(vm m, vf yes, vf no) { return i_bits(i_mix(m, f_bits(yes), f_bits(no))); }
INLINE int i_any(vi a) { return vmaxvq_u32(vorrq_u32(vorrq_u32(a.x[0], a.x[1]), vorrq_u32(a.x[2], a.x[3]))) != 0; }

/* t[a & 15], as four bytes of a 64-byte table. */
INLINE vf f_table(const float *t, vi a)
{
    const uint8_t *p = (const uint8_t *)t;
    uint8x16x4_t table = {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
    vf to;
    for (int i = 0; i < 4; i++) {
        uint32x4_t at = vmulq_u32(vandq_u32(a.x[i], vdupq_n_u32(15)), vdupq_n_u32(0x04040404));
        at = vaddq_u32(at, vdupq_n_u32(0x03020100));
        to.x[i] = vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(at)));
    }
    return to;
}

/* fp16 to fp32: 16 at p; the low or high halves of words. h_of: fp32 to fp16 in the low halves. */
INLINE float32x4_t h_wide(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
INLINE vf h_load(const void *p) { OF_FOUR(vf, h_wide(vreinterpret_u16_u8(vld1_u8((const uint8_t *)p + 8 * i)))); }
INLINE vf h_low(vi a) { OF_FOUR(vf, h_wide(vmovn_u32(a.x[i]))); }
INLINE vf h_high(vi a) { OF_FOUR(vf, h_wide(vshrn_n_u32(a.x[i], 16))); }
INLINE vi h_of(vf a) { OF_FOUR(vi, vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(a.x[i])))); }

/* Stores or loads the low 16 (8) bits of each lane. */
INLINE uint16x8_t words16(vi a, int i) { return vcombine_u16(vmovn_u32(a.x[i]), vmovn_u32(a.x[i + 1])); }
INLINE void i_store16(void *p, vi a)
{
    vst1q_u8(p, vreinterpretq_u8_u16(words16(a, 0)));
    vst1q_u8((uint8_t *)p + 16, vreinterpretq_u8_u16(words16(a, 2)));
}
INLINE void i_store8(void *p, vi a) { vst1q_u8(p, vcombine_u8(vmovn_u16(words16(a, 0)), vmovn_u16(words16(a, 2)))); }
INLINE vi i_load8(const void *p)
{
    uint8x16_t b = vld1q_u8(p);
    uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
    return (vi){{vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)), vmovl_u16(vget_low_u16(high)),
                 vmovl_u16(vget_high_u16(high))}};
}

/* t[byte] for each byte, all below 16. */
INLINE vi i_look_up(const uint8_t *t, vi a)
{
    OF_FOUR(vi, vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(t), vreinterpretq_u8_u32(a.x[i]))));
}

/* Transposes the bytes of each group of four lanes as a 4 x 4 matrix. */
INLINE vi i_turn(vi a)
{
    static const uint8_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    OF_FOUR(vi, vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(a.x[i]), vld1q_u8(order))));
}

/* Transposes v as a 4 x 4 matrix of groups of four lanes; this only renames registers. */
INLINE void i_quarters(vi *v)
{
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < i; k++) {
            uint32x4_t a = v[i].x[k];
            v[i].x[k] = v[k].x[i];
            v[k].x[i] = a;
        }
}

/* Transposes 16 x 16 lanes: first within 4 x 4 blocks, then the blocks. */
INLINE void i_transpose(vi *v)
{
    vi w[16];
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 4; k++) { /* rows i .., lanes 4k .. */
            uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(v[i].x[k], v[i + 1].x[k]));
            uint64x2_t b = vreinterpretq_u64_u32(vtrn2q_u32(v[i].x[k], v[i + 1].x[k]));
            uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(v[i + 2].x[k], v[i + 3].x[k]));
            uint64x2_t d = vreinterpretq_u64_u32(vtrn2q_u32(v[i + 2].x[k], v[i + 3].x[k]));
            w[4 * k].x[i / 4] = vreinterpretq_u32_u64(vtrn1q_u64(a, c));
            w[4 * k + 1].x[i / 4] = vreinterpretq_u32_u64(vtrn1q_u64(b, d));
            w[4 * k + 2].x[i / 4] = vreinterpretq_u32_u64(vtrn2q_u64(a, c));
            w[4 * k + 3].x[i / 4] = vreinterpretq_u32_u64(vtrn2q_u64(b, d));
        }
    for (int k = 0; k < 16; k++) v[k] = w[k];
}

#undef FLOAT2
#undef INT2

#endif
