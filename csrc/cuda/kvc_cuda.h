/* kvc_cuda.h - the operations of kvc.h on a GPU. Pointers are device pointers, work is queued on a stream, and no
 * function waits or allocates, so every call can be captured in a CUDA graph: everything that may differ in a later run
 * (entries, lengths, slots, seals, `seen`) is read on the device when it runs. Depends on neither torch nor Python.
 *
 * The host cannot inspect device memory, so the kernels check what kvc_attend checks on the host (entries, lengths,
 * NaN). They then access nothing out of bounds, treat an invalid page as empty and a non-finite number as 0, and set a
 * bit of `flags`. Shapes must be checked by the caller. All functions return 0, an error of the CUDA runtime, or one of
 * ours. */
#ifndef KVC_CUDA_H
#define KVC_CUDA_H

#include "keep.h"
#include "varlen.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bits of flags. */
enum kvc_cuda_flag {
    /* a table entry, seal or move refers to no page inside the arena, or to one that overlaps another */
    KVC_FLAG_ENTRY = 1,
    KVC_FLAG_ROWS = 2,   /* a length that exceeds the table or the slots */
    KVC_FLAG_FINITE = 4, /* NaN or Inf in k or v (stored as 0) */
    KVC_FLAG_PAGE = 8,   /* a page that cannot take its tokens: another dtype, or single tokens below 8 bits */
    KVC_FLAG_SCORE = 16, /* NaN in scores to select by */
    KVC_FLAG_STAGE = 32  /* a page of a format that `formats` did not declare */
};

/* In kvc_cuda.formats: pages that are not full are raw, in the dtype of k and v. A call with one token per row then
 * uses a small kernel to write it; a page of another format sets KVC_FLAG_PAGE, and nothing is stored. */
#define KVC_OPEN_RAW (1u << 31)

typedef struct kvc_cuda {
    void *stream;       /* cudaStream_t */
    uint32_t *flags;    /* one word on the device; bits are only ever set */
    uint8_t *workspace; /* kvc_cuda_workspace bytes, aligned to 256; not shared between streams */
    int processors;     /* multiprocessors of the device */
    /* 1 << format for each format of the pages, 0: any; declaring them saves shared memory. Also KVC_OPEN_RAW */
    uint32_t formats;
    const int64_t *seen; /* kvc_attend: one word on the device that replaces args->seen, or NULL */
    int shared;          /* bytes of shared memory per multiprocessor */
    /* kvc_attend: done is NULL, or done_words words that are 0 before and after the call and not shared by concurrent
     * calls. With them, a call with one token per row, KVC_OPEN_RAW and no seals is a single launch. */
    int32_t done_words;
    uint32_t *done;
} kvc_cuda;

/* Our own errors; those of the runtime are positive. */
enum kvc_cuda_status {
    KVC_CUDA_ALIGNMENT = -1, /* an unaligned arena or workspace */
    KVC_CUDA_CAPTURE = -2    /* the first use of a device during a capture */
};

/* kvc_cuda_begin fills flags, processors and shared for a device, which must be current; its first call initializes the
 * device and must not happen during a capture of `on->stream`. kvc_cuda_found returns the flags that kernels set on a
 * device since its last call, after waiting for all work; bits that other streams set meanwhile are not lost.
 * kvc_cuda_text describes an error. */
int kvc_cuda_begin(int device, kvc_cuda *on);
int kvc_cuda_found(int device, uint32_t *flags);
const char *kvc_cuda_text(int status);
/* ABI version: incremented whenever a function or struct here changes, or its meaning does. A library with another
 * version is not used. */
#define KVC_CUDA_ABI 5
int kvc_cuda_abi(void);
/* Version of the kvcompress that this library belongs to. */
const char *kvc_cuda_version(void);
/* Atomically moves the bits of flags to *found. */
int kvc_cuda_take(uint32_t *flags, uint32_t *found, const kvc_cuda *on);

/* As kvc_attend; with args->given_lse, only accumulated attention is computed. Entries, rows, slots, real, seals and
 * s_aux are device arrays, too. Seals of KVC_NONE are ignored, so that a captured call can have room for as many seals
 * as later runs may need. */
int kvc_cuda_attend(const kvc_attend_args *args, const kvc_cuda *on);
int64_t kvc_cuda_workspace(const kvc_attend_args *args, const kvc_cuda *on);
/* As kvc_attend_varlen and kvc_store_tokens; check shapes by kvc_varlen_check and kvc_store_tokens_check. All arrays
 * are on the device. A sequence with invalid lengths has no tokens in the call. Two sequences that write the same page
 * are not detected. Without `flags`, NaN sets a bit of on->flags. */
int kvc_cuda_attend_varlen(const kvc_varlen_args *args, const kvc_cuda *on);
int64_t kvc_cuda_varlen_workspace(const kvc_varlen_args *args, const kvc_cuda *on);
int kvc_cuda_store_tokens(const kvc_store_args *args, const kvc_cuda *on);
/* As kvc_read, kvc_score_tokens, kvc_compact, kvc_pack, kvc_choose. */
int kvc_cuda_read(const kvc_store *store, int64_t width, const kvc_dense *k, const kvc_dense *v, const kvc_cuda *on);
int kvc_cuda_score_tokens(const kvc_store *store, int kind, int64_t width, float *out, const kvc_cuda *on);
int kvc_cuda_compact(const kvc_store *store, const kvc_move *moves, int64_t n, const kvc_cuda *on);
int kvc_cuda_pack(int key, int value, const kvc_dense *k, const kvc_dense *v, int64_t B, int64_t H, int64_t T,
                  int64_t key_dim, int64_t value_dim, int64_t page_size, uint8_t *pages, const kvc_cuda *on);
int kvc_cuda_choose(const float *scores, const int32_t *slots, const uint8_t *protect, const int64_t *budget,
                    int64_t lines, int64_t width, uint8_t *keep, const kvc_cuda *on);
/* As kvc_quantize and kvc_dequantize. */
int kvc_cuda_quantize(int format, kvc_dtype dtype, const void *x, int64_t n, int64_t D, uint8_t *codes, uint8_t *scales,
                      const kvc_cuda *on);
int kvc_cuda_dequantize(int format, const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t D, float *x,
                        const kvc_cuda *on);

#ifdef __cplusplus
}
#endif
#endif
