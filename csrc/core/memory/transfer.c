/* transfer.c - copies with checksums, at memory speed. Cost per 16 bytes: a load, two additions, a store. */
#include "transfer.h"

#include "base/status.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define STREAM ((int64_t)32 << 20) /* larger transfers bypass the caches, because the data is not read again soon */

typedef struct sums {
    uint64_t plain[2], placed[2];
} sums;

/* Copies and sums up. to = NULL: sums only. bytes is a multiple of 16. */
static void copy(sums *s, uint8_t *to, const uint8_t *from, int64_t bytes, bool stream)
{
#if defined(__SSE2__)
    __m128i plain = _mm_loadu_si128((const __m128i *)(const void *)s->plain);
    __m128i placed = _mm_loadu_si128((const __m128i *)(const void *)s->placed);
    stream = stream && (uintptr_t)to % 16 == 0;
    for (int64_t i = 0; i < bytes; i += 16) {
        __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(from + i));
        plain = _mm_add_epi64(plain, x);
        placed = _mm_add_epi64(placed, plain);
        if (stream)
            _mm_stream_si128((__m128i *)(void *)(to + i), x);
        else if (to)
            _mm_storeu_si128((__m128i *)(void *)(to + i), x);
    }
    _mm_storeu_si128((__m128i *)(void *)s->plain, plain);
    _mm_storeu_si128((__m128i *)(void *)s->placed, placed);
    if (stream) _mm_sfence();
#else
    (void)stream;
    for (int64_t i = 0; i < bytes; i += 16) {
        uint64_t x[2];
        memcpy(x, from + i, sizeof x);
        for (int k = 0; k < 2; k++) {
            s->plain[k] += x[k];
            s->placed[k] += s->plain[k];
        }
        if (to) memcpy(to + i, x, sizeof x);
    }
#endif
}

/* Folds the four sums to one word. Includes the length, since trailing zeros affect only `placed`. */
static uint64_t finish(const sums *s, int64_t bytes)
{
    uint64_t h = (uint64_t)bytes;
    const uint64_t words[4] = {s->plain[0], s->plain[1], s->placed[0], s->placed[1]};
    for (int i = 0; i < 4; i++) {
        h = (h ^ words[i]) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    return h;
}

kvc_status kvc_pieces_check(const kvc_piece *pieces, int64_t n, int64_t arena_bytes, int64_t bytes)
{
    int64_t left = bytes;
    for (int64_t i = 0; i < n; i++) {
        const kvc_piece *p = &pieces[i];
        KVC_CHECK(p->offset >= 0 && p->bytes >= 0 && p->offset % KVC_ALIGN == 0 && p->bytes % KVC_ALIGN == 0 &&
                      p->offset <= arena_bytes && p->bytes <= arena_bytes - p->offset && p->bytes <= left,
                  KVC_E_VALUE, "transfer: expected pieces within %lld bytes, %lld in all, got %lld at %lld",
                  (long long)arena_bytes, (long long)bytes, (long long)p->bytes, (long long)p->offset);
        left -= p->bytes;
    }
    KVC_CHECK(left == 0, KVC_E_VALUE, "transfer: expected pieces of %lld bytes in all, got %lld", (long long)bytes,
              (long long)(bytes - left));
    return KVC_OK;
}

static int64_t total(const kvc_piece *pieces, int64_t n)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < n; i++) bytes += pieces[i].bytes;
    return bytes;
}

uint64_t kvc_gather(const uint8_t *arena, const kvc_piece *pieces, int64_t n, uint8_t *to)
{
    sums s = {0};
    int64_t bytes = total(pieces, n);
    for (int64_t i = 0; i < n; to += pieces[i++].bytes)
        copy(&s, to, arena + pieces[i].offset, pieces[i].bytes, bytes >= STREAM);
    return finish(&s, bytes);
}

uint64_t kvc_scatter(uint8_t *arena, const kvc_piece *pieces, int64_t n, const uint8_t *from)
{
    sums s = {0};
    int64_t bytes = total(pieces, n);
    for (int64_t i = 0; i < n; from += pieces[i++].bytes)
        copy(&s, arena + pieces[i].offset, from, pieces[i].bytes, bytes >= STREAM);
    return finish(&s, bytes);
}

uint64_t kvc_checksum(const uint8_t *data, int64_t bytes)
{
    sums s = {0};
    copy(&s, NULL, data, bytes, false);
    return finish(&s, bytes);
}
