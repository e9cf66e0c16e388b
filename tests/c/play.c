#include "play.h"

#include "attend/attend.h"

#include <math.h>
#include <pthread.h>

uint64_t stored_bytes = 14695981039346656037u;

void fold(const void *bytes, int64_t n)
{
    for (int64_t i = 0; i < n; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)bytes + i, (size_t)(n - i < 8 ? n - i : 8));
        word ^= stored_bytes;
        stored_bytes = (word << 31 | word >> 33) * 1099511628211u;
    }
}

bool is_scalar(void)
{
    const char *name;
    OK(kvc_isa(&name));
    return !strcmp(name, "scalar");
}

float random_number(kvc_dtype dtype)
{
    double grid = dtype == KVC_F32 ? 1 << 20 : dtype == KVC_F16 ? 128 : 16;
    int64_t sum = 0; /* sum of twelve uniform 16-bit numbers */
    for (int i = 0; i < 4; i++) {
        int64_t bits = random_below((int64_t)1 << 48);
        sum += (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32);
    }
    double x = ((double)sum / (1 << 16) - 6) * grid, far = 0x1.8p52; /* where the grid of doubles is 1 */
    return (float)copysign((fabs(x) + far - far) / grid, x);
}

/* ---------------------------------------------------------------- threads */

typedef struct half {
    int64_t n, first; /* runs the parts first and first + 2 of four */
    void (*body)(int64_t, int64_t, void *);
    void *context;
} half;

static void *work(void *argument)
{
    half *h = argument;
    for (int64_t i = h->first; i < 4; i += 2) h->body(h->n * i / 4, h->n * (i + 1) / 4, h->context);
    return NULL;
}

static void run(int64_t n, void (*body)(int64_t, int64_t, void *), void *context)
{
    pthread_t thread; /* a second thread: creating it takes a tenth of the harness's time */
    half here = {n, 0, body, context}, there = {n, 1, body, context};
    CHECK(!pthread_create(&thread, NULL, work, &there));
    work(&here);
    CHECK(!pthread_join(thread, NULL));
}

const kvc_exec in_threads = {run};

/* ---------------------------------------------------------------- a layer */

/* Bounds for outputs compared with float64 over the stored values, from the design. */
static double tolerance_of(const kvc_spec *s)
{
    double most = 1e-5;
    for (int i = 0; i < 2; i++) {
        int format = i ? s->key : s->value, bits = kvc_format_get(format)->bits;
        most = fmax(most, kvc_format_is_raw(format) ? 1e-5 : is_scalar() ? 2e-5 : bits == 8 ? 5e-3 : 2e-2);
    }
    return most;
}

void play_open(play *p, kvc_pool *pool, const kvc_spec *spec, int64_t batch, int64_t group, int64_t capacity)
{
    *p = (play){.pool = pool, .spec = *spec, .batch = batch, .group = group, .capacity = capacity};
    p->dtype = (kvc_dtype)(spec->raw - KVC_RAW_F32);
    p->tolerance = tolerance_of(spec);
    OK(kvc_table_new(pool, spec, batch, &p->t));
    p->live = play_room(batch * spec->heads * capacity, 1);
    for (int i = 0; i < 2; i++)
        p->given[i] = play_room(batch * spec->heads * capacity * (i ? spec->value_dim : spec->key_dim), sizeof(float));
}

void play_close(play *p)
{
    kvc_table_free(p->t);
    free(p->live);
    free(p->given[0]);
    free(p->given[1]);
    free(p->score);
}

/* ---------------------------------------------------------------- a call */

typedef struct call {
    play *p;
    const step *how;
    kvc_attend_args a;
    uint8_t *real;
    float *aux, *lse; /* lse: given, for accumulated attention */
    int64_t T, Tq;
} call;

static int64_t query_dim(const play *p) { return p->spec.key_dim + (p->latent ? p->spec.value_dim : 0); }

static int64_t out_dim(const play *p) { return p->latent ? p->spec.key_dim : p->spec.value_dim; }

static void fill(const play *p, const kvc_dense *x, int64_t heads, int64_t T, int64_t D, double loud)
{
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t t = 0; t < T; t++)
                for (int64_t d = 0; d < D; d++)
                    ref_put(x->dtype, x->data, play_at(x, b, h, t) + d,
                            random_number(x->dtype) * (float)(loud > 0 && d == 3 ? loud : 1));
}

/* Sets the first query of the first head and the last query of the last head to NaN or Inf, in the dtype's bits. */
static void set_nonfinite(const play *p, const kvc_attend_args *a)
{
    static const uint16_t bits[2][3] = {{0, 0x7e00, 0x7fc0}, {0, 0x7c00, 0x7f80}};
    for (int64_t b = 0; b < p->batch && a->Tq; b++)
        for (int i = 0; i < 2; i++) {
            int64_t at = play_at(&a->q, b, i ? a->query_heads - 1 : 0, i ? a->Tq - 1 : 0) + (i ? 0 : 5);
            if (a->q.dtype == KVC_F32)
                ((float *)a->q.data)[at] = i ? INFINITY : NAN;
            else
                ((uint16_t *)a->q.data)[at] = bits[i][a->q.dtype];
        }
}

static void begin(call *c, play *p, const step *how)
{
    const kvc_spec *s = &p->spec;
    bool transposed = p->t->seen % 2;
    *c = (call){.p = p, .how = how, .T = how->T};
    c->Tq = how->queries ? (how->queries < 0 ? 0 : how->queries) : how->T;
    int64_t Hq = s->heads * p->group, B = p->batch;
    CHECK(p->t->seen + c->T <= p->capacity);
    c->a = (kvc_attend_args){.query_heads = Hq, .Tq = c->Tq, .T = c->T, .window = how->window, .softcap = how->softcap};
    c->a.latent = p->latent;
    c->a.scale = 1 / sqrtf((float)query_dim(p));
    c->a.q = play_dense(B, Hq, c->Tq, query_dim(p), p->dtype, transposed);
    c->a.k = play_dense(B, s->heads, c->T, s->key_dim, p->dtype, transposed);
    c->a.v = play_dense(B, s->heads, c->T, s->value_dim, p->dtype, !transposed);
    c->a.out = play_dense(B, Hq, c->Tq, out_dim(p), how->out, transposed);
    c->a.lse = play_poison(B * Hq * c->Tq, sizeof(float));
    memset(c->a.out.data, 0xff, (size_t)(B * Hq * c->Tq * out_dim(p)) * 4);
    fill(p, &c->a.q, Hq, c->Tq, query_dim(p), 0);
    if (how->wild) set_nonfinite(p, &c->a);
    fill(p, &c->a.k, s->heads, c->T, s->key_dim, p->loud);
    fill(p, &c->a.v, s->heads, c->T, s->value_dim, 0);
    c->real = play_room(B * c->T, 1);
    for (int64_t i = 0; i < B * c->T; i++) c->real[i] = !how->pads || random_below(5) > 0;
    int64_t late = how->pads && p->t->seen == 0 ? 5 : how->late; /* on the left */
    for (int64_t i = 0; i < late; i++) c->real[(B - 1) * c->T + i] = 0;
    if (how->pads || how->late) c->a.real = c->real;
    c->aux = play_room(Hq, sizeof(float));
    for (int64_t i = 0; i < Hq; i++) c->aux[i] = random_number(KVC_F32);
    if (how->aux) c->a.s_aux = c->aux;
    c->a.accumulated_width = kvc_table_longest(p->t) + c->T + 3;
    if (how->accumulated) c->a.accumulated = play_poison(B * s->heads * c->a.accumulated_width, sizeof(float));
    c->lse = play_room(B * Hq * c->Tq, sizeof(float));
    for (int64_t i = 0; i < B * Hq * c->Tq; i++)
        /* a given lse is that of all tokens: larger than those of the visible ones */
        c->lse[i] = i % 7 == 4 ? -INFINITY : i % 11 == 6 ? NAN : 7 + fabsf(random_number(KVC_F32));
    if (how->given) c->a.given_lse = c->lse;
    if (how->exec) c->a.exec = *how->exec;
}

static void end(call *c)
{
    free(c->a.q.data);
    free(c->a.k.data);
    free(c->a.v.data);
    free(c->a.out.data);
    free(c->a.lse);
    free(c->a.accumulated);
    free(c->real);
    free(c->aux);
    free(c->lse);
}

/* The entry that attention reads token i from: a page that this call fills is still raw. */
static int64_t read_entry(const call *c, int64_t b, int64_t h, int64_t i)
{
    const play *p = c->p;
    const kvc_spec *s = &p->spec;
    int64_t entry = play_entry(p, b, h, i), column = kvc_column(i, s->sinks, s->page_size);
    int64_t last = kvc_column_first(column, s->sinks, s->page_size) + kvc_column_size(column, s->sinks, s->page_size);
    int64_t own = 0, stored = p->t->rows[2 * play_line(p->t, b, h)];
    for (int64_t t = 0; t < c->T; t++) own += c->real[b * c->T + t];
    for (int64_t k = 0; own && last > stored && k < c->a.n_seals; k++)
        if (c->a.seals[2 * k + 1] == entry) return c->a.seals[2 * k];
    return entry;
}

/* Everything that head h of sequence b holds for this call, in stored order, with its slots in `slots`. */
static ref_tokens tokens_of(const call *c, int64_t b, int64_t h, int64_t *slots)
{
    const play *p = c->p;
    const kvc_spec *s = &p->spec;
    int64_t line = play_line(p->t, b, h), stored = p->t->rows[2 * line], n = 0, Dk = query_dim(p), Dv = out_dim(p);
    double *k = play_room((stored + c->T) * Dk, sizeof *k), *v = play_room((stored + c->T) * Dv, sizeof *v);
    for (int64_t i = 0; i < stored + c->T; i++) {
        double *key = k + n * Dk, *value = p->latent ? key + s->key_dim : v + n * Dv;
        int64_t t = i - stored;
        if (t < 0) {
            slots[n] = play_slot(p->t, line, i);
            CHECK(slots[n] >= -1 && n == i);
            if (slots[n] >= 0) {
                play_row(p, read_entry(c, b, h, i), h, i, 1, key);
                play_row(p, read_entry(c, b, h, i), h, i, 0, value);
            }
        } else {
            if (!c->real[b * c->T + t]) continue;
            slots[n] = c->a.seen + t;
            for (int64_t d = 0; d < s->key_dim; d++)
                key[d] = ref_element(p->dtype, c->a.k.data, play_at(&c->a.k, b, h, t) + d);
            for (int64_t d = 0; d < s->value_dim; d++)
                value[d] = ref_element(p->dtype, c->a.v.data, play_at(&c->a.v, b, h, t) + d);
        }
        if (p->latent) memcpy(v + n * Dv, key, (size_t)Dv * sizeof *v);
        n++;
    }
    return (ref_tokens){n, Dk, Dv, k, v, NULL};
}

static bool sees(int64_t window, int64_t first, int64_t q, int64_t k)
{
    if (k < 0 || k > q) return false;
    if (window < 0) return (k - first) / -window == (q - first) / -window;
    return !window || k > q - window;
}

typedef struct sums {
    double off, all, accumulated_off, accumulated_all;
} sums;

static void check_head(const call *c, int64_t b, int64_t h, sums *sum)
{
    const play *p = c->p;
    const kvc_spec *s = &p->spec;
    int64_t line = play_line(p->t, b, h), stored = p->t->rows[2 * line];
    int64_t *slots = play_room(stored + c->T, sizeof *slots);
    ref_tokens x = tokens_of(c, b, h, slots);
    int64_t first = stored ? p->t->rows[2 * line + 1] : x.n ? slots[0] : 0;
    bool *seen = play_room(x.n, sizeof *seen);
    double *weights = play_room(x.n, sizeof *weights);
    double *accumulated = play_room(c->a.accumulated_width, sizeof *accumulated);
    double q[2 * KVC_MAX_DIM], out[KVC_MAX_DIM];
    x.sees = seen;
    for (int64_t t = 0; t < c->Tq; t++)
        for (int64_t g = 0; g < p->group; g++) {
            int64_t hq = h * p->group + g, slot = c->a.seen + c->T - c->Tq + t;
            for (int64_t d = 0; d < x.key_dim; d++)
                q[d] = ref_element(p->dtype, c->a.q.data, play_at(&c->a.q, b, hq, t) + d);
            bool any = false;
            for (int64_t i = 0; i < x.n; i++) any |= seen[i] = sees(c->a.window, first, slot, slots[i]);
            double lse = ref_attend(&x, q, c->a.scale, c->a.softcap, c->a.s_aux ? &c->aux[hq] : NULL, out, weights);
            double got = c->a.lse[(b * c->a.query_heads + hq) * c->Tq + t], whole = 0;
            for (int64_t d = 0; d < x.key_dim; d++) whole += q[d];
            bool wild = !isfinite(whole) && any; /* both are NaN; nothing else is compared */
            if (wild) {
                CHECK(isnan(got));
                for (int64_t d = 0; d < x.value_dim; d++)
                    CHECK(isnan(ref_element(c->a.out.dtype, c->a.out.data, play_at(&c->a.out, b, hq, t) + d)));
                continue;
            }
            CHECK(lse == -INFINITY ? got == lse : fabs(got - lse) <= 20 * p->tolerance);
            for (int64_t d = 0; d < x.value_dim; d++) {
                double value = ref_element(c->a.out.dtype, c->a.out.data, play_at(&c->a.out, b, hq, t) + d);
                CHECK(isfinite(value) && (lse > -INFINITY || value == 0));
                sum->off += (value - out[d]) * (value - out[d]);
                sum->all += out[d] * out[d];
            }
            bool pad = c->a.real && c->Tq == c->T && !c->real[b * c->T + t];
            double given = c->lse[(b * c->a.query_heads + hq) * c->Tq + t], share = pad ? 0 : 1;
            if (c->a.given_lse) share = isfinite(given) && lse > -INFINITY ? exp(lse - given) : 0;
            for (int64_t i = 0; i < x.n && share > 0; i++) accumulated[i] += share * weights[i];
        }
    for (int64_t i = 0; c->a.accumulated && i < c->a.accumulated_width; i++) {
        double got = c->a.accumulated[(b * s->heads + h) * c->a.accumulated_width + i];
        CHECK(i < x.n || got == 0);
        sum->accumulated_off += fabs(got - accumulated[i]);
        sum->accumulated_all += accumulated[i];
    }
    free((void *)(uintptr_t)x.k);
    free((void *)(uintptr_t)x.v);
    free(slots);
    free(seen);
    free(weights);
    free(accumulated);
}

static void check_call(const call *c)
{
    sums sum = {0};
    const play *p = c->p;
    for (int64_t b = 0; c->Tq && b < p->batch; b++)
        for (int64_t h = 0; h < p->spec.heads; h++) check_head(c, b, h, &sum);
    double rounding = c->a.out.dtype == KVC_F32 ? 0 : c->a.out.dtype == KVC_F16 ? 1e-3 : 5e-3;
    CHECK(sqrt(sum.off) <= (p->tolerance + rounding) * sqrt(sum.all));
    CHECK(sum.accumulated_off <=
          (2 * p->tolerance + (kvc_format_is_raw(p->spec.key) ? 0 : 1e-3)) * sum.accumulated_all);
}

static void remember(const call *c)
{
    play *p = c->p;
    const kvc_spec *s = &p->spec;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t h = 0; h < s->heads; h++)
            for (int64_t t = 0; t < c->T; t++) {
                int64_t to = (b * s->heads + h) * p->capacity + c->a.seen + t;
                p->live[to] = c->real[b * c->T + t];
                if (p->score) p->score[to] = 0;
                for (int64_t d = 0; d < s->key_dim; d++)
                    p->given[0][to * s->key_dim + d] =
                        (float)ref_element(p->dtype, c->a.k.data, play_at(&c->a.k, b, h, t) + d);
                for (int64_t d = 0; d < s->value_dim; d++)
                    p->given[1][to * s->value_dim + d] =
                        (float)ref_element(p->dtype, c->a.v.data, play_at(&c->a.v, b, h, t) + d);
            }
}

static kvc_status attempt(call *c, int64_t fail_at)
{
    kvc_table *t = c->p->t;
    int64_t live = kvc_alloc_live();
    OK(kvc_table_plan(t, c->T, c->a.real));
    int64_t planned = kvc_alloc_live();
    c->a.seals = kvc_table_seals(t, &c->a.n_seals);
    c->a.store = kvc_table_store(t);
    c->a.seen = t->seen;
    kvc_alloc_fail_at(fail_at);
    kvc_status status = kvc_attend(&c->a);
    kvc_alloc_fail_at(0);
    CHECK(kvc_alloc_live() == planned);
    if (status == KVC_OK) return status;
    CHECK(status == KVC_E_MEMORY && strstr(kvc_error(), "out of memory"));
    kvc_table_rollback(t);
    CHECK(kvc_alloc_live() <= live + 3); /* the table's own arrays may have grown */
    return status;
}

void play_step(play *p, const step *how)
{
    call c;
    begin(&c, p, how);
    int64_t n = how->failures ? 1 : 0;
    while (attempt(&c, n) != KVC_OK) CHECK(n++ < 40);
    CHECK(!how->failures || n > 1);
    check_call(&c);
    kvc_table_commit(p->t);
    remember(&c);
    if (p->score && how->accumulated) play_observe(p, c.a.accumulated, c.a.accumulated_width);
    end(&c);
    if (how->T > 1) play_check(p);
}

/* ---------------------------------------------------------------- a call made by hand */

kvc_attend_args play_plan_call(play *p, int64_t T, int64_t Tq, bool transposed)
{
    const kvc_spec *s = &p->spec;
    kvc_attend_args a = {.query_heads = s->heads, .Tq = Tq, .T = T, .seen = p->t->seen, .scale = .25f};
    OK(kvc_table_plan(p->t, T, NULL));
    a.store = kvc_table_store(p->t);
    a.q = play_dense(p->batch, s->heads, Tq, s->key_dim, p->dtype, false);
    a.k = play_dense(p->batch, s->heads, T, s->key_dim, p->dtype, transposed);
    a.v = play_dense(p->batch, s->heads, T, s->value_dim, p->dtype, transposed);
    a.out = play_dense(p->batch, s->heads, Tq, s->value_dim, p->dtype, false);
    a.lse = play_poison(p->batch * s->heads * Tq, sizeof *a.lse);
    a.seals = kvc_table_seals(p->t, &a.n_seals);
    return a;
}

void play_end_call(kvc_attend_args *a)
{
    free(a->q.data);
    free(a->k.data);
    free(a->v.data);
    free(a->out.data);
    free(a->lse);
}
