/* sha256.h - SHA-256 (FIPS 180-4) of a few kilobytes at a time. */
#ifndef KVC_SHA256_H
#define KVC_SHA256_H

#include <stdint.h>

#define KVC_DIGEST 32 /* bytes */

typedef struct kvc_sha256 {
    uint32_t state[8];
    uint8_t block[64];
    uint64_t bytes; /* added so far */
} kvc_sha256;

void kvc_sha256_begin(kvc_sha256 *h);
void kvc_sha256_add(kvc_sha256 *h, const void *data, int64_t bytes);
void kvc_sha256_end(kvc_sha256 *h, uint8_t digest[KVC_DIGEST]);

#endif
