/* attend_check.c - validates a call before anything is written. NaN and Inf in k and v are checked in attend_write.c,
 * which reads them anyway. */
#include "base/alloc.h"
#include "base/dtype.h"
#include "attend.h"

#include <math.h>
#include <string.h>

/* Number of real (unmasked) own tokens of sequence b. If some are masked, *at lists the real ones (in
 * call->own_list). */
static int64_t own_tokens(const kvc_call *call, int64_t b, const int32_t **at)
{
    const kvc_attend_args *a = call->a;
    *at = NULL;
    if (!a->real) return a->T;
    int32_t *list = call->own_list + b * a->T;
    int64_t n = 0;
    for (int64_t t = 0; t < a->T; t++)
        if (a->real[b * a->T + t]) list[n++] = (int32_t)t;
    if (n < a->T) *at = list;
    return n;
}

/* The raw page that this call seals into `entry`, or KVC_NONE. */
static int64_t sealed_from(const kvc_attend_args *a, int64_t entry)
{
    for (int64_t i = 0; i < a->n_seals; i++)
        if (a->seals[2 * i + 1] == entry) return a->seals[2 * i];
    return KVC_NONE;
}

/* Checks that column c can receive own tokens. whole: all its tokens are own tokens. */
static kvc_status check_target(kvc_call *call, int64_t c, int64_t entry, bool whole)
{
    int key = kvc_entry_key(entry), value = kvc_entry_value(entry);
    bool raw = kvc_format_is_raw(key) && kvc_format_is_raw(value);
    KVC_CHECK((!kvc_format_is_raw(key) || key == call->own_raw) &&
                  (!kvc_format_is_raw(value) || value == call->own_raw),
              KVC_E_TYPE, "attend: k, v: expected the dtype of the raw page at column %lld (%s), got %s", (long long)c,
              kvc_format_get(kvc_format_is_raw(key) ? key : value)->name, kvc_format_get(call->own_raw)->name);
    KVC_CHECK(
        whole || raw || (kvc_format_bits(key) >= 8 && kvc_format_bits(value) >= 8), KVC_E_VALUE,
        "attend: table: expected a page at column %lld that takes single tokens, got %s, %s, which are only written "
        "whole",
        (long long)c, kvc_format_get(key)->name, kvc_format_get(value)->name);
    call->own_in_pages &= raw;
    return KVC_OK;
}

/* Records which kernel inputs (query forms, unpacked codes) the page formats of the call require. */
static void will_read(kvc_call *call, int key, int value)
{
    bool latent = call->a->latent;
    call->key_spaces[kvc_format_rotated(key)] = true;
    if (latent) call->key_spaces[kvc_format_rotated(value)] = true;
    call->value_spaces[kvc_format_rotated(latent ? key : value)] = true;
    call->affine |= !call->kernels->qk[key] || !call->kernels->pv[value];
    for (int i = 0; i < 1 + latent; i++) { /* latents are used for scores on both sides */
        int f = i ? value : key;
        call->limbs |= kvc_format_is_integer(f);
        call->halves |= f == KVC_RAW_BF16 || (f == KVC_INT8 && call->kernels->wide) ||
                        (!kvc_format_is_raw(f) && !kvc_format_is_integer(f));
    }
}

static kvc_status begin_row(kvc_call *call, int64_t b, int64_t ht)
{
    const kvc_attend_args *a = call->a;
    const kvc_store *s = &a->store;
    int64_t r = b * s->table_heads + ht;
    kvc_row *row = &call->rows[r];
    row->stored = s->rows[2 * r];
    if (call->segments) {
        const kvc_segment *part = &call->segments[b];
        row->own = part->own, row->own_at = NULL, row->token = part->token, row->queries = part->queries;
        row->flag = part->flag;
        row->own_slot = row->stored, row->query_slot = row->stored + part->own - part->queries;
    } else {
        row->own = own_tokens(call, b, &row->own_at);
        row->flag = NULL;
        row->token = 0, row->queries = a->Tq, row->own_slot = a->seen, row->query_slot = a->seen + a->T - a->Tq;
    }
    row->own_columns = kvc_ceil_div(row->own, s->page_size);
    row->slots = s->slots ? s->slots + r * s->slot_capacity : NULL;
    row->filling = KVC_NONE;
    int64_t own_first = row->own_slot + (row->own_at && row->own ? row->own_at[0] : 0);
    bool own_run = row->own == 0 || !row->own_at || row->own_at[row->own - 1] - row->own_at[0] == row->own - 1;
    row->first = row->stored ? s->rows[2 * r + 1] : own_first;
    row->contiguous =
        own_run && !row->slots && (row->stored == 0 || row->own == 0 || own_first == row->first + row->stored);

    int64_t end = row->stored + row->own, used = kvc_columns_used(s, end);
    KVC_CHECK(used <= s->columns, KVC_E_VALUE,
              "attend: table: expected room for %lld tokens in sequence %lld, got %lld columns; plan the append first",
              (long long)end, (long long)b, (long long)s->columns);
    KVC_CHECK(!a->accumulated || end <= a->accumulated_width, KVC_E_VALUE,
              "attend: attention: expected a width of at least %lld tokens (sequence %lld), got %lld", (long long)end,
              (long long)b, (long long)a->accumulated_width);
    int64_t known = KVC_NONE; /* formats that have already passed */
    for (int64_t c = s->sinks ? 0 : 1; c < used; c++) {
        int64_t entry = s->table[r * s->columns + c], first = kvc_column_first(c, s->sinks, s->page_size);
        int64_t last = first + kvc_column_size(c, s->sinks, s->page_size);
        if (row->own && last > row->stored) { /* this call writes to the page */
            int64_t raw = first < row->stored && c > 0 && last <= end ? sealed_from(a, entry) : KVC_NONE;
            if (raw != KVC_NONE) {
                row->filling = entry = raw;
                row->filling_column = c;
                call->own_in_pages = false;
            }
            KVC_TRY(kvc_entry_check(s, entry, c, kvc_column_layout(c, s->sinks, s->page_size), "attend", "table"));
            KVC_TRY(check_target(call, c, entry, first >= row->stored && last <= end && c > 0));
        }
        if ((entry & 0xffff) == known) continue;
        known = entry & 0xffff;
        will_read(call, kvc_entry_key(entry), kvc_entry_value(entry));
    }
    return KVC_OK;
}

kvc_status kvc_scores_check(int64_t window, float scale, float softcap, const char *op)
{
    KVC_CHECK(window >= -INT32_MAX && softcap >= 0 && isfinite(softcap), KVC_E_VALUE,
              "%s: expected a window (or -chunk, to -2^31) and a softcap of at least 0, got %lld and %g", op,
              (long long)window, (double)softcap);
    KVC_CHECK(isfinite(scale), KVC_E_VALUE, "%s: scale: expected a finite float32, got %g; usual is head_dim^-0.5", op,
              (double)scale);
    return KVC_OK;
}

static kvc_status check_shapes(const kvc_attend_args *a)
{
    const kvc_store *s = &a->store;
    KVC_CHECK(a->T >= 0 && a->seen >= 0 && a->T <= INT32_MAX && a->seen <= INT32_MAX - a->T, KVC_E_VALUE,
              "attend: expected seen from 0 and at most 2^31 slots in all, got seen=%lld and T=%lld",
              (long long)a->seen, (long long)a->T);
    KVC_CHECK(a->Tq >= 0 && a->Tq <= a->seen + a->T, KVC_E_VALUE,
              "attend: expected no more queries than slots, got Tq=%lld with seen=%lld and T=%lld", (long long)a->Tq,
              (long long)a->seen, (long long)a->T);
    KVC_CHECK(a->query_heads > 0 && a->query_heads % s->heads == 0, KVC_E_VALUE,
              "attend: q: expected a multiple of %lld KV heads, got %lld query heads", (long long)s->heads,
              (long long)a->query_heads);
    if (a->T > 0) KVC_TRY(kvc_dtype_check(a->k.dtype, "attend: k"));
    KVC_CHECK(a->T == 0 || a->k.dtype == a->v.dtype, KVC_E_TYPE, "attend: k, v: expected one dtype for both");
    if (a->Tq > 0) {
        KVC_TRY(kvc_dtype_check(a->q.dtype, "attend: q"));
        KVC_TRY(kvc_dtype_check(a->out.dtype, "attend: out"));
    }
    return kvc_scores_check(a->window, a->scale, a->softcap, "attend");
}

/* Assigns item and own-page offsets to each sequence. */
static void number_items(kvc_call *call, int64_t *own_pages)
{
    const kvc_attend_args *a = call->a;
    const kvc_store *s = &a->store;
    bool beside = !call->own_in_pages; /* own tokens are also stored in temporary raw pages if there are queries */
    for (int64_t b = 0; b < s->batch; b++) {
        kvc_row *row = &call->rows[b * s->table_heads];
        int64_t T = call->segments ? row->own : a->T, own = beside && a->Tq > 0 ? row->own_columns : 0;
        /* columns per head that own tokens may occupy */
        int64_t columns = T ? own + 2 + kvc_ceil_div(T, s->page_size) + kvc_ceil_div(s->sinks, s->page_size) : 0;
        for (int64_t ht = 0; ht < s->table_heads; ht++) {
            row[ht].own_columns = own;
            row[ht].own_page = *own_pages;
            row[ht].write_item = call->write_items;
        }
        *own_pages += s->heads * own;
        call->write_items += s->heads * columns;
        call->own_bytes += s->heads * T * (s->key_dim + s->value_dim) * 4;
        call->most_queries = kvc_max(call->most_queries, row->queries);
    }
}

/* Copies and validates the call's seals. */
static kvc_status take_seals(kvc_call *call)
{
    kvc_attend_args *a = &call->args;
    const kvc_store *s = &a->store;
    if (!a->n_seals) return KVC_OK;
    KVC_TRY(kvc_scratch(2 * a->n_seals, sizeof *call->seals, &call->seals));
    memcpy(call->seals, a->seals, (size_t)(2 * a->n_seals) * sizeof *call->seals);
    a->seals = call->seals;
    for (int64_t i = 0; i < 2 * a->n_seals; i++)
        KVC_TRY(kvc_entry_check(s, a->seals[i], i / 2, s->page_size, "attend", "seals"));
    for (int64_t i = 0; i < a->n_seals; i++) {
        int64_t from = a->seals[2 * i], to = a->seals[2 * i + 1];
        int raw = kvc_entry_key(from), key = kvc_entry_key(to), value = kvc_entry_value(to);
        KVC_CHECK(kvc_format_is_raw(raw) && kvc_entry_value(from) == raw && (!kvc_format_is_raw(key) || key == raw) &&
                      (!kvc_format_is_raw(value) || value == raw),
                  KVC_E_VALUE, "attend: seals: expected a raw page and where to seal it, got entries %lld, %lld",
                  (long long)from, (long long)to);
        KVC_TRY(kvc_apart_check(s, from, to, s->page_size, "attend", "seals"));
    }
    return KVC_OK;
}

static kvc_status begin_rows(kvc_call *call)
{
    const kvc_attend_args *a = call->a;
    const kvc_store *s = &a->store;
    kvc_status status = kvc_scratch(s->batch * s->table_heads, sizeof *call->rows, &call->rows);
    if (status == KVC_OK && a->real) status = kvc_scratch(s->batch * a->T, sizeof *call->own_list, &call->own_list);
    int64_t own_pages = 0;
    for (int64_t b = 0; status == KVC_OK && b < s->batch; b++)
        for (int64_t ht = 0; status == KVC_OK && ht < s->table_heads; ht++) {
            status = begin_row(call, b, ht);
        }
    if (status == KVC_OK && a->latent && (call->key_spaces[KVC_DIGITS] || call->value_spaces[KVC_DIGITS]))
        status = kvc_fail(KVC_E_VALUE, "attend: table: expected a format with a scale per row for latents, got cal2");
    if (status == KVC_OK) number_items(call, &own_pages);
    if (status == KVC_OK && own_pages) {
        int64_t bytes = kvc_page_layout(call->own_raw, call->own_raw, s->key_dim, s->value_dim, s->page_size).bytes;
        will_read(call, call->own_raw, call->own_raw);
        status = kvc_scratch(own_pages, bytes, &call->own_pages);
    }
    return status;
}

kvc_status kvc_call_begin(kvc_call *call, const kvc_attend_args *a, const kvc_segment *segments)
{
    *call = (kvc_call){
        .args = *a,
        .segments = segments,
        .own_in_pages = true,
        .own_raw = KVC_RAW_F32 + (int)a->k.dtype,
        .lse_stride = {a->query_heads * a->Tq, a->Tq},
    };
    call->a = &call->args;
    call->kernels = kvc_kernels_get();
    if (!call->kernels) {
        const char *name;
        return kvc_isa(&name);
    }
    KVC_TRY(kvc_store_check(&a->store, "attend"));
    if (!segments) KVC_TRY(check_shapes(a));
    kvc_status status = kvc_store_take(&call->args.store, a->T, "attend", &call->indices);
    if (status == KVC_OK) status = take_seals(call);
    if (status == KVC_OK) status = begin_rows(call);
    if (status != KVC_OK) kvc_call_end(call);
    return status;
}

void kvc_call_end(kvc_call *call)
{
    kvc_scratch_free(call->indices);
    kvc_scratch_free(call->seals);
    kvc_scratch_free(call->rows);
    kvc_scratch_free(call->own_list);
    kvc_scratch_free(call->own_pages);
}
