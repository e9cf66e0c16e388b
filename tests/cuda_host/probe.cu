/* probe.cu - kernels for tests of the header and of the twin itself: single MMAs, and faults that must be detected. */
#include "ptx.cuh"

typedef struct probe_call {
    int what;
    const uint32_t *a, *b; /* [32][4], [32][2] */
    uint32_t *d;           /* [32][4] */
} probe_call;

KVC_KERNEL(probe_kernel, probe_call, 64, 1)
{
    int lane = kvc_lane();
    uint32_t *d = a.d + 4 * lane;
    switch (a.what) {
    case 0: kvc_mma_f16((float *)d, a.a + 4 * lane, a.b + 2 * lane); break;
    case 1: kvc_mma_bf16((float *)d, a.a + 4 * lane, a.b + 2 * lane); break;
    case 2: /* bytes selected from two words; a difference of pairs; a half as a float */
        d[0] = kvc_bytes(a.a[4 * lane], a.a[4 * lane + 1], 0x7250);
        d[1] = kvc_less_pair(a.a[4 * lane], a.a[4 * lane + 1]);
        d[2] = kvc_f32_bits(kvc_widen(a.a[4 * lane], 0)), d[3] = kvc_f32_bits(kvc_widen(a.a[4 * lane], 1));
        break;
    case 4: /* conversions: pairs of e4m3, of e5m2, of floats */
        d[0] = kvc_e4m3_pair(a.a[4 * lane], 0), d[1] = kvc_e4m3_pair(a.a[4 * lane], 1);
        d[2] = kvc_e5m2_pair(a.a[4 * lane], 0), d[3] = kvc_e5m2_pair(a.a[4 * lane], 1);
        break;
    case 10: /* half of a warp shuffles */
        if (lane < 16) d[0] = kvc_shuffle_xor(d[0], 1);
        break;
    case 11: /* lanes meet in different places */
        d[0] = lane & 1 ? kvc_shuffle_xor(d[0], 1) : kvc_warp_any(d[0] != 0);
        break;
    case 12: /* a thread returns before the barrier */
        if (kvc_thread() == 40) return;
        kvc_barrier();
        break;
    case 13: /* shared memory is 256 bytes */ kvc_shared[256 + lane] = 1; break;
    case 14: /* unwritten memory is NaN */ d[0] = ((uint32_t *)kvc_shared)[lane]; break;
    }
}

extern "C" int probe(int what, const uint32_t *a, const uint32_t *b, uint32_t *d)
{
    probe_call call = {what, a, b, d};
    twin_set_stream(what == 15 ? d : NULL); /* 15: a launch on another stream */
    twin_set_launcher(NULL);                /* an earlier call's, which may be freed */
    return KVC_LAUNCH(probe_kernel, &call, 1, 1, 1, what < 10 ? 32 : 64, 256, NULL);
}
