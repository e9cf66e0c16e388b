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

/* Blocks of an engine, and which of them are a sequence's. A block begins with `pages` pages side by side, in order, each
 * the H pages of its heads, one behind the other. */
typedef struct kvc_blocks {
    uint8_t *data;                 /* of block 0, on KVC_ALIGN */
    int64_t blocks, bytes, stride; /* how many, of how many bytes; to the next one: a multiple of KVC_ALIGN */
    int64_t pages;
    int key, value; /* formats */
    /* [batch, table_width] block indices, `table_stride` elements from a sequence to the next. An index is looked at only
     * if a query of the call can see the block, or the call writes to it. */
    const int32_t *table;
    int64_t table_width, table_stride;
} kvc_blocks;

/* Appends and attends: sequences of any numbers of new tokens and of any lengths in one call, with the kernels and the
 * bytes of kvc_attend. Sequence b's new tokens are query_start[b] .. query_start[b+1] of q, k, v and out; seq_lens[b] is
 * its length with them. They attend causally to all of it.
 *
 * Formats of 8 bits and more are appended to in place. Others are only written as whole pages: the newest tokens lie raw in
 * the residual pages of the sequence, page i in place i % (table_width * pages) of what its row of residual.table names,
 * until the page is full and is sealed into its block, by this call. One residual page is enough unless drafts are taken
 * back. A call whose tokens fill the last residual page and begin the next one is done as two, so that what follows
 * sees the page sealed. */
typedef struct kvc_varlen_args {
    kvc_blocks cache, residual; /* residual.data NULL where the formats are appended to in place */
    int64_t batch, tokens;      /* of q, k, v and out; those from query_start[batch] on are left alone */
    int64_t heads, query_heads, key_dim, value_dim, page_size;
    const int32_t *query_start; /* [batch + 1], ascending */
    const int32_t *seq_lens;    /* [batch] */
    int64_t max_query;          /* new tokens of a sequence, at most; 0: not known */
    /* [batch] or NULL, for formats with residual pages: how many tokens of the sequence lie in sealed pages before the call
     * (NULL: all full pages), and how many of its newest are drafts that may be taken back (NULL: 0): a page with one of
     * them is not sealed yet. kvc_varlen_sealed says what is sealed after the call. */
    const int32_t *sealed_lens, *draft_lens;
    kvc_dense q, k, v, out; /* [1, heads, tokens, dim]; out in any dtype */
    bool stored;            /* k and v are in the pages already, another layer's call wrote them: only attend */
    float *lse;             /* [query_heads, tokens] natural log, without s_aux; or NULL */
    const float *s_aux;     /* [query_heads] attention-sink logits, or NULL */
    int64_t window;         /* as in kvc_attend_args */
    float scale, softcap;
    /* [batch] or NULL. NULL: NaN or Inf in k or v is KVC_E_VALUE, and nothing is lost of what was stored. Else the
     * sequence's flag is set to 1 (never to 0), such rows are stored as zeros, and its output is NaN while the flag is
     * set; the others are not affected. */
    int32_t *flags;
    kvc_exec exec;
} kvc_varlen_args;

/* Everything is checked before the first byte is written: KVC_E_VALUE or KVC_E_TYPE, with the reason. */
kvc_status kvc_attend_varlen(const kvc_varlen_args *args);
/* What of this does not want the arrays: for kvc_cuda_attend_varlen, whose are on a GPU. */
kvc_status kvc_varlen_check(const kvc_varlen_args *args);

/* Tokens in sealed pages after a call with these lengths. */
static inline int64_t kvc_varlen_sealed(int64_t sealed, int64_t seq_len, int64_t drafts, int64_t page_size)
{
    int64_t full = (seq_len - drafts) / page_size * page_size;
    return sealed > full ? sealed : full;
}

/* Writes k and v, [1, heads, tokens, dim], to where slots [tokens] say: block index * tokens of a block + place; below 0:
 * nowhere. For formats that take single tokens (8 bits and more); the blocks' table is not used. Flags [1]: as above, for
 * the call. */
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

/* What an engine has to know to give pages room. */
typedef struct kvc_geometry {
    int64_t head_bytes;     /* page of one head */
    int64_t page_bytes;     /* of all heads */
    int64_t residual_bytes; /* of all heads, raw; 0 where the formats are appended to in place */
} kvc_geometry;

/* raw: the format of residual pages, that of k's dtype. KVC_E_VALUE for formats, dims and page sizes that do not exist. */
kvc_status kvc_page_geometry(int key, int value, int raw, int64_t heads, int64_t key_dim, int64_t value_dim,
                             int64_t page_size, kvc_geometry *geometry);

#ifdef __cplusplus
}
#endif
#ifdef KVC_EXPORT
#pragma GCC visibility pop
#endif

#endif
