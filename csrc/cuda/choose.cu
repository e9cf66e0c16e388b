/* choose.cu - selects the tokens to keep: the best of a line by score; of equal scores the younger. One block per line;
 * radix selection on 64-bit keys (score, slot), which are distinct, so the result does not depend on scheduling. Nine
 * passes over the scores. */
#include "device.cuh"

#define THREADS 256

typedef struct kvc_choose_call {
    const float *scores;
    const int32_t *slots;
    const uint8_t *protect; /* or NULL */
    const int64_t *budget;
    int64_t width;
    uint8_t *keep;
    uint32_t *flags;
} kvc_choose_call;

typedef struct kvc_choose_room {
    uint32_t count[256], sure, all;
    uint64_t prefix;
    int64_t left;
} kvc_choose_room;

/* Larger keys are better; -0 and 0 are equal scores. */
KVC_DEVICE uint64_t kvc_choose_key(float score, int32_t slot)
{
    uint32_t u = score == 0 ? 0 : kvc_f32_bits(score);
    u = u >> 31 ? ~u : u | 0x80000000;
    return (uint64_t)u << 32 | (uint32_t)slot;
}

KVC_KERNEL(kvc_choose_kernel, kvc_choose_call, THREADS, 4)
{
    kvc_choose_room *room = (kvc_choose_room *)kvc_shared;
    int64_t base = kvc_block_x() * a.width;
    const float *scores = a.scores + base;
    const int32_t *slots = a.slots + base;
    const uint8_t *protect = a.protect ? a.protect + base : NULL;
    if (kvc_thread() == 0) {
        room->sure = room->all = 0;
        room->prefix = 0;
    }
    kvc_barrier();
    for (int64_t i = kvc_thread(); i < a.width; i += THREADS) {
        if (slots[i] < 0) continue;
        if (scores[i] != scores[i]) kvc_flag(a.flags, KVC_FLAG_SCORE);
        kvc_atomic_add(protect && protect[i] ? &room->sure : &room->all, 1);
    }
    kvc_barrier();
    int64_t left = a.budget[kvc_block_x()] - (int64_t)room->sure;
    bool none = left <= 0, every = left >= (int64_t)room->all;
    if (kvc_thread() == 0) room->left = left;
    for (int shift = 56; shift >= 0 && !none && !every; shift -= 8) {
        for (int i = kvc_thread(); i < 256; i += THREADS) room->count[i] = 0;
        kvc_barrier();
        for (int64_t i = kvc_thread(); i < a.width; i += THREADS) {
            uint64_t key = kvc_choose_key(scores[i], slots[i]);
            if (slots[i] < 0 || (protect && protect[i])) continue;
            if (shift == 56 || key >> (shift + 8) == room->prefix >> (shift + 8))
                kvc_atomic_add(&room->count[key >> shift & 255], 1);
        }
        kvc_barrier();
        if (kvc_thread() == 0) { /* the digit of the last kept key */
            int digit = 255;
            while (digit > 0 && room->left > (int64_t)room->count[digit]) room->left -= room->count[digit--];
            room->prefix |= (uint64_t)digit << shift;
        }
        kvc_barrier();
    }
    for (int64_t i = kvc_thread(); i < a.width; i += THREADS) {
        bool sure = protect && protect[i];
        bool best = every || (!none && kvc_choose_key(scores[i], slots[i]) >= room->prefix);
        a.keep[base + i] = slots[i] >= 0 && (sure || best);
    }
}

extern "C" int kvc_cuda_choose(const float *scores, const int32_t *slots, const uint8_t *protect, const int64_t *budget,
                               int64_t lines, int64_t width, uint8_t *keep, const kvc_cuda *on)
{
    kvc_choose_call call = {scores, slots, protect, budget, width, keep, on->flags};
    return KVC_LAUNCH(kvc_choose_kernel, &call, lines, 1, 1, THREADS, sizeof(kvc_choose_room), on->stream);
}
