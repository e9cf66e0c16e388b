/* varlen.cu - converts an engine's batch to a call of the kernels, on the device: block tables become entries, lengths
 * become rows, seals and work lists. The host knows only sizes, so a call can be captured and replayed with other
 * lengths and blocks.
 *
 * Cost: one block per sequence reads the lengths of the preceding sequences and writes 8 bytes per page (of all
 * heads). */
#include "device.cuh"
#include "engine/progress.h"

typedef struct kvc_varlen_call {
    kvc_varlen_args v;
    kvc_call call;
    int64_t *table, *rows, *seals; /* of the call */
    int64_t ring, seals_each;      /* residual pages per sequence; maximum number that a call seals */
    int64_t page_bytes, residual_bytes;
    bool in_place;
    int pass, passes;
} kvc_varlen_call;

/* What the current pass does for a sequence. */
typedef struct kvc_part {
    kvc_segment of;
    kvc_progress from, to;
    int64_t hidden; /* leading columns that the part neither sees nor writes */
    uint32_t items[3];
} kvc_part;
enum { KVC_ATTENDS, KVC_WRITES, KVC_OWNS, KVC_COUNTS };

/* The progress of sequence b and the target of the call; false if its lengths are inconsistent. */
KVC_DEVICE bool kvc_sequence_of(const kvc_varlen_call *c, int64_t b, kvc_progress *at, kvc_leads *to)
{
    const kvc_varlen_args *v = &c->v;
    int64_t P = v->page_size, start = v->query_start[b], n = v->query_start[b + 1] - start, end = v->seq_lens[b];
    int64_t before = end - n, drafts = v->draft_lens ? v->draft_lens[b] : 0, whole = (end - drafts) / P * P;
    int64_t sealed = v->sealed_lens ? v->sealed_lens[b] : before / P * P, last = kvc_max(sealed, whole);
    kvc_leads leads = {end, last, P, c->ring, c->in_place};
    *to = leads;
    at->stored = v->stored ? end : before;
    at->sealed = c->in_place ? 0 : v->stored ? last : sealed;
    if (n < 0 || start < 0 || start + n > v->tokens) return false;
    if (n == 0) return true;
    if (before < 0 || end > v->cache.table_width * v->cache.pages * P || (v->max_query && n > v->max_query))
        return false;
    return c->in_place || (drafts >= 0 && drafts <= n && sealed >= 0 && sealed % P == 0 && sealed <= before &&
                           end - last <= c->ring * P && before - sealed <= c->ring * P);
}

/* A sequence with a single part is processed in the last pass. */
KVC_DEVICE kvc_part kvc_part_of(const kvc_varlen_call *c, int64_t b, uint32_t *flags)
{
    const kvc_varlen_args *v = &c->v;
    int64_t P = v->page_size, start = v->query_start[b], n = v->query_start[b + 1] - start, own, queries = n;
    kvc_part part = {};
    kvc_leads to;
    kvc_progress is;
    bool good = kvc_sequence_of(c, b, &is, &to);
    if (!good) kvc_flag(flags, KVC_FLAG_ROWS);
    if (!good || n == 0) return part;
    part.from = part.to = is;
    if (!v->stored) {
        kvc_progress first = part.from;
        bool more = kvc_progress_on(&to, &first);
        if (c->pass + 1 < c->passes) {
            if (!more) return part;
        } else if (more) {
            part.from = first;
            kvc_progress_on(&to, &first);
        }
        part.to = first;
        queries = part.to.stored - part.from.stored;
    } else if (c->pass + 1 < c->passes) {
        return part;
    }
    own = part.to.stored - part.from.stored;
    int64_t slot = part.to.stored - queries, window = v->window < 0 ? 1 + slot % -v->window : v->window;
    part.hidden = window ? kvc_max(0, slot - window + 1) : 0;
    part.hidden = kvc_min(part.hidden, c->in_place ? part.from.stored : part.from.sealed) / P;
    part.of.token = (int32_t)(start + n - (to.end - slot));
    part.of.own = (int32_t)own, part.of.queries = (int32_t)queries;
    part.of.own_columns = (int32_t)((own + c->call.own_page - 1) / c->call.own_page);
    part.items[KVC_ATTENDS] = (uint32_t)((queries * c->call.group + c->call.rows - 1) / c->call.rows);
    part.items[KVC_OWNS] = (uint32_t)part.of.own_columns;
    part.items[KVC_WRITES] = part.items[KVC_OWNS];
    if (own) part.items[KVC_WRITES] += (uint32_t)((part.to.stored - 1) / P - part.from.stored / P + 1);
    return part;
}

/* The entry of page i of sequence b, in its cache or residual blocks. */
KVC_DEVICE int64_t kvc_block_entry(const kvc_varlen_call *c, bool residual, int64_t b, int64_t i)
{
    const kvc_blocks *of = residual ? &c->v.residual : &c->v.cache;
    if (residual) i %= c->ring;
    int64_t block = of->table[b * of->table_stride + i / of->pages];
    if (block < 0 || block >= of->blocks) {
        kvc_flag(c->call.flags, KVC_FLAG_ENTRY);
        return KVC_NONE;
    }
    int64_t in = i % of->pages * (residual ? c->residual_bytes : c->page_bytes);
    return kvc_entry(of->data - c->call.a.store.arena + block * of->stride + in, of->key, of->value);
}

/* Writes the sequence's entries and seals, with all threads. */
KVC_DEVICE void kvc_put_entries(const kvc_varlen_call *c, int64_t b, const kvc_part *part)
{
    int64_t P = c->v.page_size, used = (part->to.stored + P - 1) / P, first = part->from.sealed / P;
    int64_t *entries = c->table + b * c->call.a.store.columns;
    for (int64_t i = kvc_thread(); part->of.queries && i < used; i += kvc_threads())
        entries[1 + i] = i < part->hidden
                             ? kvc_entry(c->v.cache.data - c->call.a.store.arena, c->v.cache.key, c->v.cache.value)
                             : kvc_block_entry(c, !c->in_place && i * P >= part->to.sealed, b, i);
    for (int64_t i = kvc_thread(); i < c->seals_each; i += kvc_threads()) {
        bool seals = (first + i) * P < kvc_min(part->to.sealed, part->from.stored);
        int64_t *pair = c->seals + 2 * (b * c->seals_each + i);
        pair[0] = seals ? kvc_block_entry(c, true, b, first + i) : KVC_NONE;
        pair[1] = seals ? kvc_block_entry(c, false, b, first + i) : KVC_NONE;
    }
}

KVC_DEVICE void kvc_put_items(kvc_item *items, int64_t most, uint32_t at, uint32_t n, int64_t b)
{
    for (uint32_t i = (uint32_t)kvc_thread(); i < n && at + i < most; i += (uint32_t)kvc_threads()) {
        kvc_item item = {(int32_t)b, (int32_t)i};
        items[at + i] = item;
    }
}

#define KVC_VARLEN_THREADS 128

/* x: sequences. */
KVC_KERNEL(kvc_varlen_kernel, kvc_varlen_call, KVC_VARLEN_THREADS, 4)
{
    uint32_t *before = (uint32_t *)kvc_shared;
    int64_t b = kvc_block_x();
    const kvc_lists *l = &a.call.lists;
    if (kvc_thread() < KVC_COUNTS) before[kvc_thread()] = 0;
    kvc_barrier();
    for (int64_t i = kvc_thread(); i < b; i += kvc_threads()) {
        kvc_part other = kvc_part_of(&a, i, NULL);
        KVC_UNROLL for (int k = 0; k < KVC_COUNTS; k++) if (other.items[k]) kvc_atomic_add(&before[k], other.items[k]);
    }
    kvc_barrier();
    kvc_part part = kvc_part_of(&a, b, kvc_thread() ? NULL : a.call.flags);
    part.of.own_page = (int32_t)before[KVC_OWNS];
    if (before[KVC_OWNS] + part.items[KVC_OWNS] > l->own_most) { /* lengths that do not ascend */
        kvc_part none = {};
        part = none;
        kvc_flag(a.call.flags, KVC_FLAG_ROWS);
    }
    kvc_put_items(l->attend, l->attend_most, before[KVC_ATTENDS], part.items[KVC_ATTENDS], b);
    kvc_put_items(l->write, l->write_most, before[KVC_WRITES], part.items[KVC_WRITES], b);
    kvc_put_entries(&a, b, &part);
    if (kvc_thread()) return;
    l->segments[b] = part.of;
    a.rows[2 * b] = part.from.stored, a.rows[2 * b + 1] = 0;
    if (b + 1 < a.v.batch) return;
    l->counts[0] = (uint32_t)kvc_min(l->attend_most, before[KVC_ATTENDS] + part.items[KVC_ATTENDS]);
    l->counts[1] = (uint32_t)kvc_min(l->write_most, before[KVC_WRITES] + part.items[KVC_WRITES]);
}

/* ---------------------------------------------------------------- launchers */

static int64_t varlen_plan(const kvc_varlen_args *v, const kvc_cuda *on, kvc_varlen_call *c)
{
    const kvc_blocks *cache = &v->cache, *open = &v->residual;
    const uint8_t *end = cache->data + (cache->blocks ? (cache->blocks - 1) * cache->stride + cache->bytes : 0);
    kvc_varlen_call none = {*v};
    kvc_attend_args a = {};
    *c = none;
    c->in_place = kvc_format_bits(cache->key) >= 8 && kvc_format_bits(cache->value) >= 8;
    c->ring = c->in_place ? 0 : open->table_width * open->pages;
    c->page_bytes = v->heads * kvc_page_layout(cache->key, cache->value, v->key_dim, v->value_dim, v->page_size).bytes;
    c->residual_bytes =
        c->in_place ? 0
                    : v->heads * kvc_page_layout(open->key, open->key, v->key_dim, v->value_dim, v->page_size).bytes;
    a.store.arena = !c->in_place && open->data < cache->data ? open->data : cache->data;
    if (!c->in_place && open->blocks && open->data + (open->blocks - 1) * open->stride + open->bytes > end)
        end = open->data + (open->blocks - 1) * open->stride + open->bytes;
    a.store.arena_bytes = end - a.store.arena;
    a.store.batch = v->batch, a.store.heads = v->heads, a.store.table_heads = 1;
    a.store.columns = 1 + cache->table_width * cache->pages;
    a.store.key_dim = v->key_dim, a.store.value_dim = v->value_dim, a.store.page_size = v->page_size;
    a.q = v->q, a.k = v->k, a.v = v->v, a.out = v->out;
    a.q.stride[0] = a.q.stride[2], a.k.stride[0] = a.k.stride[2];
    a.v.stride[0] = a.v.stride[2], a.out.stride[0] = a.out.stride[2];
    if (v->stored) a.k.dtype = a.v.dtype = v->q.dtype;
    a.query_heads = v->query_heads, a.Tq = v->tokens, a.T = v->stored ? 0 : v->tokens;
    c->seals_each = c->ring < a.store.columns ? c->ring : a.store.columns;
    a.n_seals = v->stored ? 0 : v->batch * c->seals_each;
    if (v->stored) c->seals_each = 0;
    a.window = v->window, a.scale = v->scale, a.softcap = v->softcap, a.s_aux = v->s_aux, a.lse = v->lse;
    int64_t longest = v->max_query && v->max_query < v->tokens ? v->max_query : v->tokens;
    int64_t typical = v->max_query ? longest : (v->tokens + v->batch - 1) / v->batch;
    int64_t used = kvc_call_plan(&a, on, longest, typical, &c->call);
    c->call.lists.nonfinite = (uint32_t *)v->flags;
    c->table = (int64_t *)(uintptr_t)c->call.a.store.table;
    c->rows = (int64_t *)(uintptr_t)c->call.a.store.rows;
    c->seals = (int64_t *)(uintptr_t)c->call.a.seals;
    c->passes = c->in_place || v->stored || longest == 1 ? 1 : 2; /* a single token is one part */
    if (c->seals_each && (v->sealed_lens || v->draft_lens) && longest == 1) c->passes = 2;
    return used;
}

extern "C" int64_t kvc_cuda_varlen_workspace(const kvc_varlen_args *args, const kvc_cuda *on)
{
    kvc_varlen_call c;
    kvc_cuda nowhere = *on;
    nowhere.workspace = NULL;
    return args->batch && args->tokens ? varlen_plan(args, &nowhere, &c) : 0;
}

extern "C" int kvc_cuda_attend_varlen(const kvc_varlen_args *args, const kvc_cuda *on)
{
    kvc_varlen_call c;
    if (args->batch == 0 || args->tokens == 0) return 0;
    if ((uintptr_t)args->cache.data % 64 || (uintptr_t)args->residual.data % 64 || (uintptr_t)on->workspace % 256)
        return KVC_CUDA_ALIGNMENT;
    varlen_plan(args, on, &c);
    /* without these, all seals are of pages that rows fill */
    int64_t seals = args->sealed_lens || args->draft_lens ? c.call.a.n_seals : 0;
    int status = 0;
    for (c.pass = 0; c.pass < c.passes && !status; c.pass++) {
        status = KVC_LAUNCH(kvc_varlen_kernel, &c, args->batch, 1, 1, KVC_VARLEN_THREADS, 4 * KVC_COUNTS, on->stream);
        if (!status) status = kvc_call_run(&c.call, seals, on);
    }
    return status;
}
