/* sha256.c - FIPS 180-4, section 6.2. Plain C is fast enough: a page of tokens is 512 bytes. */
#include "sha256.h"

#include <string.h>

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

/* Round i. Rotates the indices of the state words instead of moving the words. */
static inline void turn_round(uint32_t *s, const uint32_t *w, int i)
{
#define S(k) s[(k - i) & 7]
    uint32_t up =
        S(7) + (turn(S(4), 6) ^ turn(S(4), 11) ^ turn(S(4), 25)) + ((S(4) & S(5)) ^ (~S(4) & S(6))) + K[i] + w[i];
    S(3) += up;
    S(7) = up + (turn(S(0), 2) ^ turn(S(0), 13) ^ turn(S(0), 22)) + ((S(0) & S(1)) ^ (S(0) & S(2)) ^ (S(1) & S(2)));
#undef S
}

static void take_block(uint32_t *state, const uint8_t *block)
{
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i += 8) {
        turn_round(s, w, i);
        turn_round(s, w, i + 1);
        turn_round(s, w, i + 2);
        turn_round(s, w, i + 3);
        turn_round(s, w, i + 4);
        turn_round(s, w, i + 5);
        turn_round(s, w, i + 6);
        turn_round(s, w, i + 7);
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

void kvc_sha256_begin(kvc_sha256 *h)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, start, sizeof start);
    h->bytes = 0;
}

void kvc_sha256_add(kvc_sha256 *h, const void *data, int64_t bytes)
{
    const uint8_t *from = data;
    while (bytes > 0) {
        int64_t at = (int64_t)(h->bytes % 64), n = 64 - at < bytes ? 64 - at : bytes;
        memcpy(h->block + at, from, (size_t)n);
        h->bytes += (uint64_t)n;
        from += n;
        bytes -= n;
        if (h->bytes % 64 == 0) take_block(h->state, h->block);
    }
}

void kvc_sha256_end(kvc_sha256 *h, uint8_t digest[KVC_DIGEST])
{
    uint8_t length[8], zeros[64] = {0x80};
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(h->bytes * 8 >> (56 - 8 * i));
    kvc_sha256_add(h, zeros, 64 - (int64_t)((h->bytes + 8) % 64));
    kvc_sha256_add(h, length, 8);
    for (int i = 0; i < KVC_DIGEST; i++) digest[i] = (uint8_t)(h->state[i / 4] >> (24 - 8 * (i % 4)));
}
