/* varlen.h - attention for an engine that owns the memory: its blocks, block tables and batches. */
#ifndef KVC_VARLEN_H
#define KVC_VARLEN_H

#include "kvc.h"

#ifdef KVC_EXPORT
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* Blocks of an engine, and the block table. A block starts with `pages` consecutive pages, each with the H pages of its
 * heads in order. */
typedef struct kvc_blocks {
    uint8_t *data;                 /* block 0, aligned to KVC_ALIGN */
    int64_t blocks, bytes, stride; /* number of blocks, bytes per block, stride in bytes (a multiple of KVC_ALIGN) */
    int64_t pages;
    int key, value; /* formats */
    /* [batch, table_width] block indices, with `table_stride` elements per sequence. An index is read only if a query of the
     * call can see the block, or the call writes to it. */
    const int32_t *table;
    int64_t table_width, table_stride;
} kvc_blocks;

/* Appends and attends: sequences of different lengths and numbers of new tokens in one call, with the kernels and the
 * bytes of kvc_attend. The new tokens of sequence b are query_start[b] .. query_start[b+1] of q, k, v and out; seq_lens[b]
 * is its length including them. They attend causally to the whole sequence.
 *
 * Formats of 8 bits and more are appended to in place. Others are written as full pages only: the newest tokens are raw in
 * the residual pages of the sequence, page i in residual page i % (table_width * pages) of its row of residual.table, until
 * the page is full and this call seals it in its block. One residual page is enough unless drafts are rejected. A call
 * whose tokens fill the last residual page and start the next one is executed as two, so that later tokens see the page
 * sealed. */
typedef struct kvc_varlen_args {
    kvc_blocks cache, residual; /* residual.data: NULL if the formats are appended to in place */
    int64_t batch, tokens;      /* tokens of q, k, v and out; those from query_start[batch] on are ignored */
    int64_t heads, query_heads, key_dim, value_dim, page_size;
    const int32_t *query_start; /* [batch + 1], ascending */
    const int32_t *seq_lens;    /* [batch] */
    int64_t max_query;          /* maximum number of new tokens of a sequence; 0: unknown */
    /* [batch] or NULL, for formats with residual pages: number of tokens of the sequence in sealed pages before the call
     * (NULL: all full pages), and number of newest tokens that are drafts and may be rejected (NULL: 0): a page with one
     * of them is not sealed yet. kvc_varlen_sealed returns the number of sealed tokens after the call. */
    const int32_t *sealed_lens, *draft_lens;
    kvc_dense q, k, v, out; /* [1, heads, tokens, dim]; out in any dtype */
    bool stored;            /* k and v were stored by the call of another layer: only attend */
    float *lse;             /* [query_heads, tokens] natural log, without s_aux; or NULL */
    const float *s_aux;     /* [query_heads] attention-sink logits, or NULL */
    int64_t window;         /* as in kvc_attend_args */
    float scale, softcap;
    /* [batch] or NULL. NULL: NaN or Inf in k or v is KVC_E_VALUE, and stored tokens are unchanged. Else the flag of the
     * sequence is set to 1 (never to 0), such rows are stored as zeros, and its output is NaN while the flag is set;
     * other sequences are not affected. */
    int32_t *flags;
    kvc_exec exec;
} kvc_varlen_args;

/* Everything is checked before anything is written: KVC_E_VALUE or KVC_E_TYPE, with the reason. KVC_E_MEMORY may occur
 * later: stored tokens are unchanged then, and the same call may be repeated. */
kvc_status kvc_attend_varlen(const kvc_varlen_args *args);
/* The checks that do not read the arrays, for kvc_cuda_attend_varlen, whose arrays are on a GPU. */
kvc_status kvc_varlen_check(const kvc_varlen_args *args);

/* Tokens in sealed pages after a call with these lengths. */
static inline int64_t kvc_varlen_sealed(int64_t sealed, int64_t seq_len, int64_t drafts, int64_t page_size)
{
    int64_t full = (seq_len - drafts) / page_size * page_size;
    return sealed > full ? sealed : full;
}

/* Writes k and v, [1, heads, tokens, dim], to slots [tokens]: block index * tokens per block + offset; negative: skip. For
 * formats that are appended to in place (8 bits and more); the block table is not used. flag [1]: as above, for the
 * call. */
typedef struct kvc_store_args {
    kvc_blocks cache;
    int64_t tokens, heads, key_dim, value_dim, page_size;
    kvc_dense k, v;
    const int64_t *slots;
    int32_t *flag;
    kvc_exec exec;
} kvc_store_args;

kvc_status kvc_store_tokens(const kvc_store_args *args);
kvc_status kvc_store_tokens_check(const kvc_store_args *args);

/* Sizes in bytes for an engine's blocks. */
typedef struct kvc_geometry {
    int64_t head_bytes;     /* page of one head */
    int64_t page_bytes;     /* page of all heads */
    int64_t residual_bytes; /* raw page of all heads; 0 if the formats are appended to in place */
} kvc_geometry;

/* raw: the format of residual pages, for k's dtype. KVC_E_VALUE for unsupported formats, dims and page sizes. */
kvc_status kvc_page_geometry(int key, int value, int raw, int64_t heads, int64_t key_dim, int64_t value_dim,
                             int64_t page_size, kvc_geometry *geometry);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
