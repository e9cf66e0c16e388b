/* kvc_cuda.h - the operations of kvc.h on a GPU: pointers are the device's, work is queued on a stream, nothing waits and
 * nothing allocates, so every call can be captured in a CUDA graph: what a later run may find otherwise (entries,
 * lengths, slots, seals, `seen`) is read on the device when it runs. No torch, no Python.
 *
 * The host cannot look into device memory: what kvc_attend checks there (entries, lengths, NaN) is checked by the kernels,
 * which then touch nothing out of bounds, take such a page for an empty one and such a number for 0, and set a bit of
 * `flags`. Shapes are the caller's to check. All functions return 0, the CUDA runtime's error or one of ours. */
#ifndef KVC_CUDA_H
#define KVC_CUDA_H

#include "keep.h"
#include "varlen.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bits of flags. */
enum kvc_cuda_flag {
    KVC_FLAG_ENTRY = 1,  /* a table entry, seal or move names no page inside the arena, or one that overlaps another */
    KVC_FLAG_ROWS = 2,   /* a length that the table or the slots do not hold */
    KVC_FLAG_FINITE = 4, /* NaN or Inf in k or v (stored as 0) */
    KVC_FLAG_PAGE =
        8, /* a page that does not take the tokens that fall on it: another dtype, or single tokens below 8 bits */
    KVC_FLAG_SCORE = 16, /* NaN among scores to select by */
    KVC_FLAG_STAGE = 32  /* a page of a format that `formats` left out */
};

/* Of kvc_cuda.formats: pages that are not full are raw, in the dtype of k and v. A call of one token a row then writes it by
 * little code; where a page is of another format it sets KVC_FLAG_PAGE and stores nothing. */
#define KVC_OPEN_RAW (1u << 31)

typedef struct kvc_cuda {
    void *stream;        /* cudaStream_t */
    uint32_t *flags;     /* one word on the device, only ever set */
    uint8_t *workspace;  /* kvc_cuda_workspace bytes, aligned to 256; not shared between streams */
    int processors;      /* multiprocessors of the device */
    uint32_t formats;    /* 1 << format for each that pages may have, 0: any. Saves shared memory. And KVC_OPEN_RAW */
    const int64_t *seen; /* kvc_attend: one word on the device in place of args->seen, or NULL */
    int shared;          /* bytes of shared memory of a multiprocessor */
    int32_t done_words;
    uint32_t *
        done; /* kvc_attend: NULL, or so many words that are 0, and are 0 again behind the call: no two calls at once have the
                     * same. A call of one token a row and KVC_OPEN_RAW without seals then is one launch */
} kvc_cuda;

/* Errors of ours; those of the runtime are positive. */
enum kvc_cuda_status {
    KVC_CUDA_ALIGNMENT = -1, /* an arena or a workspace that is not aligned */
    KVC_CUDA_CAPTURE = -2    /* the first use of a device, inside of a capture */
};

/* Fills flags, processors and shared for a device, which must be the current one, and prepares it at the first call, which must not be
 * one that `on->stream` captures; what kernels found there since the last time, after all work on it is done (the bits
 * are cleared, and none is lost that other streams set meanwhile); what an error means. */
int kvc_cuda_begin(int device, kvc_cuda *on);
int kvc_cuda_found(int device, uint32_t *flags);
const char *kvc_cuda_text(int status);
/* The number of this interface: one more whenever a function or a struct here, or what one means, changes. A library that says
 * another one is not called. */
#define KVC_CUDA_ABI 4
int kvc_cuda_abi(void);
/* Of the kvcompress that this library belongs to. */
const char *kvc_cuda_version(void);
/* Moves the bits of flags to *found, in one step. */
int kvc_cuda_take(uint32_t *flags, uint32_t *found, const kvc_cuda *on);

/* As kvc_attend; with args->mass_lse mass alone comes out. Entries, rows, slots, real, seals and s_aux are arrays on the device too. A pair of KVC_NONE among the seals
 * is none: a call that is captured has room for as many as a later run may need. */
int kvc_cuda_attend(const kvc_attend_args *args, const kvc_cuda *on);
int64_t kvc_cuda_workspace(const kvc_attend_args *args, const kvc_cuda *on);
/* As kvc_attend_varlen and kvc_store_tokens; shapes are checked by kvc_varlen_check and kvc_store_tokens_check. All arrays are on
 * the device: a sequence whose lengths cannot be has no tokens in the call. Two sequences that write the same page are the
 * caller's fault, and not looked for. Without `flags` NaN sets a bit of on->flags. */
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
