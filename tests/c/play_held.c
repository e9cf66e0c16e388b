/* play_held.c - compares the contents of an emulated layer with what it was given, and with kvc_read. */
#include "play.h"

#include <math.h>

void *play_room(int64_t n, size_t size)
{
    void *p = calloc((size_t)(n ? n : 1), size);
    CHECK(p);
    return p;
}

void *play_poison(int64_t n, size_t size)
{
    void *p = play_room(n, size);
    return memset(p, 0xff, (size_t)n * size);
}

int64_t play_line(const kvc_table *t, int64_t b, int64_t h)
{
    return b * t->table_heads + (t->table_heads == 1 ? 0 : h);
}

int64_t play_slot(const kvc_table *t, int64_t line, int64_t i)
{
    return t->slots ? t->slots[line * t->slot_capacity + i] : t->rows[2 * line + 1] + i;
}

/* Token `i` of head h, from the page of `entry`. */
void play_row(const play *p, int64_t entry, int64_t h, int64_t i, int key_side, double *row)
{
    const kvc_table *t = p->t;
    const kvc_spec *s = &p->spec;
    int64_t c = kvc_column(i, s->sinks, s->page_size), size = kvc_column_layout(c, s->sinks, s->page_size);
    int key = kvc_entry_key(entry), value = kvc_entry_value(entry);
    CHECK(entry != KVC_NONE);
    int64_t page = t->table_heads == 1 ? h * kvc_page_bytes(key, value, s->key_dim, s->value_dim, size) : 0;
    ref_page_row(kvc_pool_base(t->pool) + kvc_entry_offset(entry) + page, key_side, key, value, s->key_dim,
                 s->value_dim, size, i - kvc_column_first(c, s->sinks, s->page_size), row);
}

int64_t play_entry(const play *p, int64_t b, int64_t h, int64_t i)
{
    const kvc_table *t = p->t;
    return t->entries[play_line(t, b, h) * t->columns + kvc_column(i, t->spec.sinks, t->spec.page_size)];
}

kvc_dense play_dense(int64_t B, int64_t H, int64_t T, int64_t D, kvc_dtype dtype, bool transposed)
{
    kvc_dense x = {play_room(B * H * T * D, 4), {H * T * D, T * D, D}, dtype};
    if (transposed) x.stride[1] = D, x.stride[2] = H * D;
    return x;
}

int64_t play_at(const kvc_dense *x, int64_t b, int64_t h, int64_t t)
{
    return b * x->stride[0] + h * x->stride[1] + t * x->stride[2];
}

/* ---------------------------------------------------------------- contents */

/* Relative error of a row in a format, including pages re-encoded from codes. */
static double format_error(int format)
{
    if (kvc_format_is_raw(format)) return 0;
    int bits = kvc_format_get(format)->bits;
    return bits == 8 ? .1 : bits == 4 ? .5 : 1.5;
}

static void check_read(const play *p, kvc_dtype dtype, const double *rows[2])
{
    const kvc_spec *s = &p->spec;
    int64_t width = p->t->seen;
    kvc_dense x[2] = {play_dense(p->batch, s->heads, width, s->key_dim, dtype, false),
                      play_dense(p->batch, s->heads, width, s->value_dim, dtype, true)};
    kvc_store store = kvc_table_store(p->t);
    double relative = dtype == KVC_F32 ? 2e-6 : dtype == KVC_F16 ? 0x1p-11 : 0x1p-8;
    for (int i = 0; i < 2; i++)
        memset(x[i].data, 0xff, (size_t)(p->batch * s->heads * width * (i ? s->value_dim : s->key_dim)) * 4);
    OK(kvc_read(&store, width, &x[0], &x[1], NULL));
    for (int i = 0; i < 2; i++) {
        int64_t dim = i ? s->value_dim : s->key_dim;
        for (int64_t bh = 0; bh < p->batch * s->heads; bh++)
            for (int64_t slot = 0; slot < width; slot++) {
                const double *want = rows[i] + (bh * p->capacity + slot) * dim;
                double most = 0; /* sums of a rotation are rounded relative to the row's size */
                for (int64_t d = 0; d < dim; d++) most = fabs(want[d]) > most ? fabs(want[d]) : most;
                for (int64_t d = 0; d < dim; d++) {
                    double got = ref_element(dtype, x[i].data, play_at(&x[i], bh / s->heads, bh % s->heads, slot) + d);
                    CHECK(fabs(got - want[d]) <=
                          relative * fabs(want[d]) + 2e-6 * most + (dtype == KVC_F16 ? 6e-8 : 0));
                }
            }
        free(x[i].data);
    }
}

void play_check(const play *p)
{
    const kvc_spec *s = &p->spec;
    const kvc_table *t = p->t;
    double *rows[2];
    CHECK(!p->score == !t->scores);
    uint8_t *found = play_room(p->batch * s->heads * p->capacity, 1);
    for (int i = 0; i < 2; i++)
        rows[i] = play_room(p->batch * s->heads * p->capacity * (i ? s->value_dim : s->key_dim), sizeof(double));
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < s->heads; h++) {
            int64_t line = play_line(t, b, h);
            for (int64_t k = 0; k < t->rows[2 * line]; k++) {
                int64_t slot = play_slot(t, line, k), bh = b * s->heads + h, to = bh * p->capacity + slot;
                if (slot < 0) continue;
                CHECK(slot < t->seen && p->live[to] && !found[to]++);
                if (p->score)
                    CHECK(fabsf(t->scores[bh * t->score_capacity + k] - p->score[to]) <= 1e-6f * p->score[to]);
                for (int i = 0; i < 2; i++) {
                    int64_t dim = i ? s->value_dim : s->key_dim, entry = play_entry(p, b, h, k);
                    double *row = rows[i] + to * dim, off = 0, all = 0;
                    play_row(p, entry, h, k, !i, row);
                    for (int64_t d = 0; d < dim; d++) {
                        double want = p->given[i][to * dim + d];
                        off += (row[d] - want) * (row[d] - want);
                        all += want * want;
                    }
                    fold(row, 8 * dim);
                    double error = format_error(i ? kvc_entry_value(entry) : kvc_entry_key(entry));
                    CHECK(sqrt(off) <= error * (sqrt(all) + p->loud));
                }
            }
        }
    for (int64_t i = 0; i < p->batch * s->heads * p->capacity; i++)
        CHECK(found[i] == (i % p->capacity < t->seen ? p->live[i] : 0));
    check_read(p, (kvc_dtype)(t->seen % 3), (const double *[2]){rows[0], rows[1]});
    OK(kvc_pool_check(p->pool));
    free(found);
    free(rows[0]);
    free(rows[1]);
}
