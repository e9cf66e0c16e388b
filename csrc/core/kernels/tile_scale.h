/* tile_scale.h - converts 16 stored scales (enum kvc_scale) to floats, one per lane. Include after lanes_<isa>.h. */
#ifndef KVC_TILE_SCALE_H
#define KVC_TILE_SCALE_H

#include "codec/codec.h"

INLINE vf load_scale(int kind, const uint8_t *at)
{
    if (kind == KVC_SCALE_F16) return h_load(at);
    vi e = i_load8(at);
    if (kind == KVC_SCALE_E4M3) {
        vi h = i_or(i_left(i_and(e, i_all(0x80)), 8), i_left(i_and(e, i_all(0x7f)), 7));
        return f_mul(h_low(h), f_all(256));
    }
    return i_bits(i_pick(i_is(e, i_all(0)), i_all(1u << 22), i_left(e, 23)));
}

#endif
