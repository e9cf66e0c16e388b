/* launch.cu - the host side of a call: how it is split, the layout of its workspace, and the choice of kernels. */
#include "attend.cuh"
#include "encode.cuh"
#include "accumulated.cuh"
#include "prefill.cuh"
#include "wide.h"

#include <stdlib.h>

#define DECLARE(name, per, kinds)                                                                                      \
    KVC_DECLARE_KERNEL(kvc_attend_##name##_64, kvc_call);                                                              \
    KVC_DECLARE_KERNEL(kvc_attend_##name##_128, kvc_call);                                                             \
    KVC_DECLARE_KERNEL(kvc_attend_##name##_256, kvc_call);
KVC_SETS(DECLARE)
KVC_DECLARE_KERNEL(kvc_prefill_64, kvc_call);
KVC_DECLARE_KERNEL(kvc_prefill_128, kvc_call);
KVC_DECLARE_KERNEL(kvc_accumulate_any_64, kvc_call);
KVC_DECLARE_KERNEL(kvc_accumulate_any_128, kvc_call);
KVC_DECLARE_KERNEL(kvc_accumulate_any_256, kvc_call);

#define MOST_RUNS 64
#define KVC_RESERVED 1024 /* bytes of shared memory reserved per block */
/* Blocks per multiprocessor needed to saturate memory with asynchronous copies. On an H200 a third block made int8 up
 * to 1.23 times slower; int4 with int8, which has more to unpack, was faster with it. */
#define KVC_PIPED_BLOCKS(kinds) ((kinds) & (1u << KVC_KIND_INT4 | 1u << KVC_KIND_INT2) ? 3 : 2)

KVC_KERNEL(kvc_kept_kernel, kvc_call, 32 * KVC_WARPS, 4) { kvc_kept_block(&a); }

/* Lists the real tokens of the call. One block per sequence. */
KVC_KERNEL(kvc_list_kernel, kvc_call, 32, 1)
{
    int64_t b = kvc_block_x(), T = a.a.T;
    const uint8_t *real = a.a.real + b * T;
    int32_t n = 0;
    int lane = kvc_lane();
    for (int64_t t0 = 0; t0 < T; t0 += 32) {
        int64_t t = t0 + lane;
        uint32_t is = t < T && real[t], before = is;
        for (int h = 1; h < 32; h *= 2) {
            uint32_t other = kvc_shuffle(before, lane >= h ? lane - h : lane);
            if (lane >= h) before += other;
        }
        if (is) a.own_list[b * T + n + (int32_t)before - 1] = (int32_t)t;
        n += (int32_t)kvc_shuffle(before, 31);
    }
    if (lane == 0) a.own_count[b] = n;
}

/* ---------------------------------------------------------------- splitting */

static int dims_of(const kvc_attend_args *a)
{
    int64_t dim = a->store.key_dim > a->store.value_dim ? a->store.key_dim : a->store.value_dim;
    return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

/* Cost of decode for a warp, in instructions: per page of 64 tokens and 128 dims, and before and after its pages.
 * Counted in sm_90 code, as is the extra cost of the last block for merging runs (`make gpu-budget` evaluates this
 * model for its choices). alone: cycles per instruction of a warp that runs alone and waits for its own latencies (from
 * replays of the code with its encoded stalls and documented latencies: tests/sass/replay.py). Of int2 it is 3.3; 3.6
 * keeps three blocks per multiprocessor, as they were timed (decision 190). */
typedef struct kvc_cost {
    /* The first entry that includes a kind of the call's pages is used; entries are sorted by cost per page. */
    uint32_t kinds;
    double page, ends, alone;
    int raw; /* pages that take as long as one of sinks, or an open one, whose code is not in caches: measured */
} kvc_cost;
static const kvc_cost costs[] = {
    {1u << KVC_KIND_INT2, 611, 2448, 3.6, 4},  {1u << KVC_KIND_INT4, 637, 2442, 3.6, 4},
    {1u << KVC_KIND_INT8, 1248, 1539, 3.1, 2}, {1u << KVC_KIND_E4M3 | 1u << KVC_KIND_E5M2, 1116, 1548, 3.5, 2},
    {KVC_RAW_KINDS, 968, 1888, 3.9, 2},
};
static const kvc_cost others = {0, 1000, 3000, 5, 2}; /* not counted: long calls, wide heads, staged pages */
/* For each row that a warp of the last block merges. */
#define JOIN 330.
#define JOIN_RUN 7.1
/* Cycles per instruction of a scheduler that always has a warp ready to issue. */
#define ISSUE (1 / .6)

static kvc_cost cost_of(const kvc_call *call)
{
    const kvc_store *s = &call->a.store;
    bool counted = !call->prefill && !kvc_is_wide(&call->a) && !(call->kinds >> KVC_KIND_STAGED & 1);
    kvc_cost of = others;
    for (size_t i = sizeof costs / sizeof *costs; i-- > 0 && counted;)
        if (call->kinds & costs[i].kinds) of = costs[i];
    of.page *= (double)(s->page_size * (s->key_dim + s->value_dim)) / (64 * 256);
    return of;
}

/* Cycles per instruction of a multiprocessor with this many blocks, which have one warp on every scheduler. */
static double issued(int64_t blocks, double alone) { return blocks == 0 ? 0 : fmax((double)blocks * ISSUE, alone); }

/* Number of runs per (sequence, head) that minimizes the estimated cycles. */
static int64_t runs_of(const kvc_call *call, kvc_cost of, int64_t columns, int64_t share, int64_t processors,
                       int64_t resident)
{
    int64_t best = 1, most = columns / share < MOST_RUNS ? columns / share : MOST_RUNS, wave = processors * resident;
    int64_t rows = call->a.Tq * call->group,
            merged = ((rows < call->rows ? rows : call->rows) + KVC_WARPS - 1) / KVC_WARPS;
    double least = INFINITY;
    for (int64_t runs = 1; runs <= (most > 1 ? most : 1); runs++) {
        int64_t blocks = call->lines * runs, left = (blocks % wave + processors - 1) / processors;
        int64_t parts = runs * share;
        int64_t all = columns + 2 * kvc_ends_of((uint32_t)columns, (uint32_t)parts, (int)call->raw_ends);
        double warp = (double)((all + parts - 1) / parts) * of.page + of.ends;
        double cost = warp * ((double)(blocks / wave) * issued(resident, of.alone) + issued(left, of.alone));
        if (runs > 1) cost += (JOIN + JOIN_RUN * (double)runs) * (double)merged * of.alone;
        if (cost < least) least = cost, best = runs;
    }
    return best;
}

/* Tests: fills unwritten tokens of pages with NaN. Attention reads and masks them; sanitizers then do not report these
 * reads, but still those of the rest of the workspace. */
static int poison(const kvc_call *call, void *stream)
{
    static int wanted = -1;
    if (wanted < 0) wanted = getenv("KVCOMPRESS_POISON") != NULL;
    int64_t page =
        kvc_page_layout(call->own_raw, call->own_raw, call->a.store.key_dim, call->a.store.value_dim, call->own_page)
            .bytes;
    return wanted ? kvc_fill(call->own_pages, 0xff, call->lists.own_most * call->a.store.heads * page, stream) : 0;
}

/* Whether the call has enough rows for the prefill kernels, and pages and heads that they support. */
static int prefills(const kvc_attend_args *a, uint32_t kinds, int64_t rows)
{
    int64_t dim = a->store.key_dim;
    return rows >= 64 && (dim == 64 || dim == 128) && dim == a->store.value_dim && !(kinds & ~KVC_PREFILL_KINDS) &&
           a->q.dtype == a->k.dtype && a->q.dtype != KVC_F32 && !a->given_lse;
}

/* 128 rows per block, or 64 if 128 do not fit or would leave multiprocessors idle. */
static int64_t prefill_rows(uint32_t kinds, int dims, int64_t heads, int64_t rows, int64_t processors)
{
    bool fits = kvc_prefill_bytes(KVC_PREFILL_ROWS, kinds, dims) <= KVC_ROOM;
    return fits && heads * (rows / KVC_PREFILL_ROWS) >= processors ? KVC_PREFILL_ROWS : 64;
}

static uint8_t *cut(uint8_t *room, int64_t *used, int64_t bytes)
{
    uint8_t *at = room ? room + *used : NULL;
    *used += (bytes + 255) / 256 * 256;
    return at;
}

static kvc_made_of made_of(uint32_t kinds, int format, int key, const kvc_store *s)
{
    int64_t dim = key ? s->key_dim : s->value_dim;
    kvc_traits f = kvc_format_traits(format);
    kvc_made_of none = {0, 0, 0, KVC_NONE_KIND, 0}, made = none;
    if ((f.group && dim % f.group) || (f.bits == 3 && dim % 32)) return none;
    made.codes = (uint16_t)(dim * f.bits / 8);
    made.meta = (uint16_t)kvc_token_meta_bytes(f, key, dim, 1);
    made.dims = (uint16_t)(kvc_meta_bytes(format, key, dim, 1) - made.meta);
    made.kind = (uint8_t)kvc_kind_in(kinds, format);
    made.rotated = f.rotated && made.kind != KVC_KIND_STAGED; /* staged pages are rotated back when decoded */
    return made;
}

/* Sets the pair of formats of the call's full pages if its pages, besides raw ones, have one format. formats: 0: any. */
static void expect(uint32_t formats, kvc_call *call)
{
    int f = call->own_raw;
    call->pair = -1;
    for (int i = KVC_RAW_BF16 + 1; i < KVC_FORMATS; i++)
        if (formats >> i == 1) f = i;
    if (!formats || formats & ~((2u << KVC_RAW_BF16) - 1) & ~(1u << f)) return;
    const kvc_made_of *k = &call->made_of[1][f], *v = &call->made_of[0][f];
    if (k->kind == KVC_NONE_KIND || v->kind == KVC_NONE_KIND || !(call->kinds >> k->kind & 1)) return;
    call->pair = f << 8 | f;
    call->sizes = kvc_page_sizes_of(k, v, (int)call->a.store.page_size);
}

/* Whether q has 16-bit elements and 16-byte aligned rows as wide as the kernel, and needs only forms of that type. */
static int eights(const kvc_attend_args *a, uint32_t forms, int dims)
{
    int64_t strides = a->q.stride[0] | a->q.stride[1] | a->q.stride[2];
    return a->q.dtype != KVC_F32 && a->store.key_dim == dims && (uintptr_t)a->q.data % 16 == 0 && strides % 8 == 0 &&
           (a->q.dtype == KVC_BF16 || !(forms >> KVC_FORM_BF16 & 1));
}

/* The kinds of the kernel that is used for a call's kinds. */
static uint32_t kernel_kinds(uint32_t kinds)
{
#define SET(name, per, kinds_)                                                                                         \
    if (!(kinds & ~(uint32_t)(kinds_))) return kinds_;
    KVC_SETS(SET)
#undef SET
    return 0;
}

/* Whether pages of the call can use pipeline.cuh, as far as the host knows; the device checks kvc_takes_piped. */
static bool pipes(const kvc_attend_args *a, int dims)
{
    const kvc_store *s = &a->store;
    return s->key_dim == dims && s->value_dim == dims && s->page_size % KVC_BLOCK == 0 && !(a->softcap > 0) &&
           !a->accumulated;
}

/* Upper bounds for the blocks of queries, for pages of own tokens and, for sequences of different lengths of at most
 * `longest` tokens, for items; lays out their lists. Returns the bytes of workspace used. */
static int64_t lists_of(const kvc_attend_args *a, int64_t longest, uint8_t *room, kvc_call *call)
{
    const kvc_store *s = &a->store;
    kvc_lists *l = &call->lists;
    int64_t used = 0, all = a->Tq * call->group / call->rows + s->batch, pages = a->T / call->own_page + s->batch;
    l->own_most = s->batch * call->own_columns;
    l->attend_most = s->batch * call->blocks;
    call->lines = l->attend_most * s->heads;
    if (longest == 0) return 0;
    if (l->own_most > pages) l->own_most = pages;
    if (l->attend_most > all) l->attend_most = all;
    l->write_most = a->T ? l->own_most + a->T / s->page_size + 2 * s->batch : 0;
    call->lines = l->attend_most * s->heads;
    call->a.store.table = (int64_t *)cut(room, &used, 8 * s->batch * s->columns);
    call->a.store.rows = (int64_t *)cut(room, &used, 16 * s->batch);
    call->a.seals = (int64_t *)cut(room, &used, 16 * a->n_seals);
    l->segments = (kvc_segment *)cut(room, &used, (int64_t)sizeof *l->segments * s->batch);
    l->attend = (kvc_item *)cut(room, &used, (int64_t)sizeof *l->attend * l->attend_most);
    l->write = (kvc_item *)cut(room, &used, (int64_t)sizeof *l->write * l->write_most);
    l->counts = (uint32_t *)cut(room, &used, 2 * sizeof *l->counts);
    return used;
}

int64_t kvc_call_plan(const kvc_attend_args *a, const kvc_cuda *on, int64_t longest, int64_t typical, kvc_call *call)
{
    const kvc_store *s = &a->store;
    int64_t used = 0, heads = s->batch * s->heads;
    int64_t T = longest && a->T ? longest : a->T, Tq = longest ? longest : a->Tq;
    kvc_call none = {*a};
    int dims = dims_of(a);
    bool wide = kvc_is_wide(a);
    *call = none;
    call->flags = on->flags;
    call->seen = on->seen;
    call->own_raw = KVC_RAW_F32 + (int)a->k.dtype;
    call->kinds = 1u << kvc_kind_of(call->own_raw); /* raw pages have the call's dtype */
    uint32_t formats = on->formats & ~KVC_OPEN_RAW;
    for (int f = KVC_RAW_BF16 + 1; f < KVC_FORMATS; f++)
        if (!formats || formats >> f & 1) call->kinds |= 1u << kvc_kind_of(f);
    uint32_t forms = kvc_forms_of(call->kinds);
    bool staged = call->kinds >> KVC_KIND_STAGED & 1;
    if (staged && kvc_attend_bytes(8, forms, staged, 0, dims) > KVC_ROOM) {
        call->kinds &= ~(1u << KVC_KIND_BF16);
        forms = kvc_forms_of(call->kinds);
    }
    call->forms = forms;
    call->eights = eights(a, forms, dims);
    for (int form = 0; form <= KVC_FORMS; form++) call->form_at[form] = kvc_form_at(forms, form, dims);
    for (int f = 0; f < KVC_FORMATS; f++)
        for (int key = 0; key < 2; key++) call->made_of[key][f] = made_of(call->kinds, f, key, s);
    expect(formats, call);
    call->own_page = (T + KVC_TILE - 1) / KVC_TILE * KVC_TILE;
    if (call->own_page > s->page_size || T == 0) call->own_page = s->page_size;
    call->own_columns = a->Tq ? (T + call->own_page - 1) / call->own_page : 0;
    call->write_columns = call->own_columns + (a->T > 1 ? (a->T - 2) / s->page_size + 3 : a->T);

    call->token = on->formats & KVC_OPEN_RAW && a->T == 1 && !a->real && !longest;

    call->group = a->query_heads / s->heads;
    int64_t rows = (longest ? typical : Tq) * call->group;
    call->prefill = !wide && prefills(a, call->kinds, rows);
    call->rows = rows <= 8 || wide ? KVC_WIDE_ROWS : rows <= 16 ? 16 : 32;
    while (call->rows > 8 && kvc_attend_bytes(call->rows, forms, staged, 0, dims) > KVC_ROOM) call->rows /= 2;
    if (call->prefill) call->rows = prefill_rows(call->kinds, dims, heads, rows, on->processors);
    call->blocks = (Tq * call->group + call->rows - 1) / call->rows;
    used = lists_of(a, longest, on->workspace, call);
    int64_t share = call->prefill || wide ? 1 : KVC_WARPS * 8 / call->rows;
    int64_t resident = call->prefill ? KVC_PREFILL_ROWS / call->rows : dims == 256 || staged ? 2 : 3;
    if (!call->prefill && !wide && pipes(a, dims)) {
        int64_t pipe = kvc_pipe_bytes(kernel_kinds(call->kinds), dims);
        int64_t block = kvc_attend_bytes(call->rows, forms, staged, pipe, dims);
        if (pipe && block <= KVC_ROOM && KVC_PIPED_BLOCKS(call->kinds) * (block + KVC_RESERVED) <= on->shared)
            call->pipe = pipe, resident = KVC_PIPED_BLOCKS(call->kinds);
    }
    kvc_cost cost = cost_of(call);
    call->raw_ends = call->prefill || wide ? 0 : cost.raw;
    call->runs = runs_of(call, cost, s->columns + call->own_columns, share, on->processors, resident);

    if (a->real) {
        call->own_list = (int32_t *)cut(on->workspace, &used, 4 * s->batch * a->T);
        call->own_count = (int32_t *)cut(on->workspace, &used, 4 * s->batch);
    }
    int64_t page = kvc_page_layout(call->own_raw, call->own_raw, s->key_dim, s->value_dim, call->own_page).bytes;
    call->own_pages = cut(on->workspace, &used, call->lists.own_most * s->heads * page);
    bool attends = a->Tq && !a->given_lse && !a->n_seals && !call->prefill && !wide;
    call->joined = call->token && attends && call->blocks == 1 && (call->runs == 1 || on->done_words >= call->lines);
    if (call->runs > 1) {
        call->partial =
            (float *)cut(on->workspace, &used, 4 * call->lines * call->runs * call->rows * (kvc_sum_dim(a) + 2));
        call->done = call->joined ? on->done : (uint32_t *)cut(on->workspace, &used, 4 * call->lines);
    }
    if (a->accumulated && !a->given_lse && call->blocks == 1 && !call->prefill && !wide) {
        int64_t most = s->page_size > s->sinks ? s->page_size : s->sinks;
        if (most < call->own_page) most = call->own_page;
        call->kept_blocks = (int)((most + KVC_BLOCK - 1) / KVC_BLOCK);
        call->kept_pairs = (int)(rows + 1) / 2;
        call->weights = (uint32_t *)cut(on->workspace, &used, 4 * kvc_kept_words(call));
        call->tops = (float *)cut(on->workspace, &used, 4 * kvc_kept_tops(call));
    }
    return used;
}

extern "C" int64_t kvc_cuda_workspace(const kvc_attend_args *args, const kvc_cuda *on)
{
    kvc_call call;
    kvc_cuda nowhere = *on;
    nowhere.workspace = NULL;
    return kvc_call_plan(args, &nowhere, 0, 0, &call);
}

extern "C" int kvc_cuda_attend(const kvc_attend_args *args, const kvc_cuda *on)
{
    kvc_call call;
    if (kvc_store_aligned(&args->store) || (uintptr_t)on->workspace % 256) return KVC_CUDA_ALIGNMENT;
    kvc_call_plan(args, on, 0, 0, &call);
    return kvc_call_run(&call, args->n_seals, on);
}

int kvc_call_run(const kvc_call *planned, int64_t seals, const kvc_cuda *on)
{
    const kvc_call call = *planned;
    const kvc_attend_args *args = &planned->a;
    const kvc_store *s = &args->store;
    int64_t heads = s->batch * s->heads, items = call.token ? 0 : heads * call.write_columns;
    if (call.lists.segments) items = s->heads * call.lists.write_most;
    items += seals * (s->table_heads == 1 ? s->heads : 1);
    int status = poison(&call, on->stream), dims = dims_of(args);
    bool staged = call.kinds >> KVC_KIND_STAGED & 1, taken = false;
    uint32_t forms = kvc_forms_of(call.kinds);
    if (!status && args->real && args->T)
        status = KVC_LAUNCH(kvc_list_kernel, &call, s->batch, 1, 1, 32, 0, on->stream);
    if (!status && call.token && !call.joined) status = kvc_token_launch(&call, on->stream);
    if (!status) status = kvc_write_launch(&call, items, on->stream);
    if (!status && call.runs > 1 && items == 0 && !call.token)
        status = kvc_fill(call.done, 0, 4 * call.lines, on->stream);
    if (!status && args->accumulated)
        status = kvc_fill(args->accumulated, 0, 4 * heads * args->accumulated_width, on->stream);
    if (status || heads * args->Tq == 0) return status;
    if (kvc_is_wide(args)) {
        if (!args->given_lse) status = kvc_attend_wide_launch(&call, true, on->stream);
        return status || !args->accumulated ? status : kvc_attend_wide_launch(&call, false, on->stream);
    }
    int64_t shared = kvc_attend_bytes(call.rows, forms, staged, call.pipe, dims), blocks = call.lines * call.runs;
    bool attends = !args->given_lse;
#define LAUNCH(kernel, x, threads, bytes) status = KVC_LAUNCH(kernel, &call, x, 1, 1, threads, bytes, on->stream)
#define BY_DIMS(kernel, x, threads, bytes)                                                                             \
    if (dims == 64) LAUNCH(kernel##_64, x, threads, bytes);                                                            \
    if (dims == 128) LAUNCH(kernel##_128, x, threads, bytes);                                                          \
    if (dims == 256) LAUNCH(kernel##_256, x, threads, bytes)
#define SET(name, per, kinds_)                                                                                         \
    if (attends && !taken && !(call.kinds & ~(uint32_t)(kinds_))) {                                                    \
        taken = true;                                                                                                  \
        BY_DIMS(kvc_attend_##name, blocks, 32 * KVC_WARPS, shared);                                                    \
    }
    if (attends && call.prefill) {
        int64_t bytes = kvc_prefill_bytes(call.rows, call.kinds, dims);
        taken = true;
        if (dims == 64) LAUNCH(kvc_prefill_64, blocks, 2 * (int)call.rows, bytes);
        if (dims == 128) LAUNCH(kvc_prefill_128, blocks, 2 * (int)call.rows, bytes);
    }
    KVC_SETS(SET)
    if (status || !args->accumulated) return status;
    if (call.weights) {
        LAUNCH(kvc_kept_kernel, heads * kvc_accumulated_parts(&call), 32 * KVC_WARPS, sizeof(kvc_attend_room));
        return status;
    }
    BY_DIMS(kvc_accumulate_any, heads * kvc_accumulated_parts(&call), 32 * KVC_WARPS,
            kvc_attend_bytes(8, forms, staged, 0, dims));
#undef SET
#undef BY_DIMS
#undef LAUNCH
    return status;
}
