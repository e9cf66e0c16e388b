#include "reference.h"

#include <math.h>
#include <string.h>

/* formats.def again; duplicated on purpose. */
enum coding { RAW, INT, MID, UINT, E4M3, E5M2, E2M1, LLOYD, SPREAD };
enum keys { TOKEN, CENTRED, CHANNEL };
typedef struct spec {
    int bits;
    enum coding coding;
    int group; /* 0: whole row */
    enum keys keys;
} spec;
static const spec SPEC[] = {
    {32, RAW, 0, TOKEN},  {16, RAW, 0, TOKEN},  {16, RAW, 0, TOKEN},    {8, INT, 0, TOKEN},      {8, E4M3, 0, TOKEN},
    {4, MID, 0, CENTRED}, {8, UINT, 0, TOKEN},  {8, E5M2, 0, TOKEN},    {2, MID, 0, CENTRED},    {4, INT, 0, TOKEN},
    {4, UINT, 32, TOKEN}, {4, UINT, 0, TOKEN},  {2, UINT, 0, TOKEN},    {4, UINT, 0, CHANNEL},   {2, UINT, 0, CHANNEL},
    {4, E2M1, 16, TOKEN}, {4, E2M1, 32, TOKEN}, {4, LLOYD, 0, CENTRED}, {2, SPREAD, 0, CENTRED}, {3, MID, 0, CENTRED},
};
_Static_assert(sizeof SPEC / sizeof *SPEC == KVC_FORMATS, "expected a row of SPEC for each row of formats.def");

/* ---------------------------------------------------------------- numbers */

static const int LLOYD4[8] = {6, 18, 31, 44, 58, 75, 96, 127};

static inline double level(spec f, unsigned code)
{
    switch (f.coding) {
    case INT: return (double)code - (1 << (f.bits - 1));
    case MID:
    case SPREAD: return (double)code - ((1 << f.bits) - 1) / 2.0;
    case E4M3: return ref_small_float(code, 4, 3, 7);
    case E5M2: return ref_small_float(code, 5, 2, 15);
    case E2M1: return ref_small_float(code, 2, 1, 1);
    case LLOYD: return code < 8 ? -LLOYD4[7 - code] : LLOYD4[code - 8];
    default: return code;
    }
}

/* Half the distance to the next level from this one; 0 beyond the last level (asymmetric grids saturate). */
static double half_gap(spec f, unsigned code)
{
    if (f.coding < E4M3 || f.coding == SPREAD) return .5;
    if (f.coding == LLOYD) return 15.5; /* the last two levels are 31 apart */
    unsigned top = f.coding == E4M3 ? 0x7e : f.coding == E5M2 ? 0x7b : 7, c = code & ((1u << (f.bits - 1)) - 1);
    double up = c < top ? level(f, c + 1) - level(f, c) : 0, down = c ? level(f, c) - level(f, c - 1) : 0;
    return (up > down ? up : down) / 2;
}

static void hadamard(double *row, int64_t dim)
{
    int64_t block = dim & -dim;
    for (int64_t step = 1; step < block; step *= 2)
        for (int64_t i = 0; i < dim; i++) {
            if (i & step) continue;
            double a = row[i], b = row[i + step];
            row[i] = a + b;
            row[i + step] = a - b;
        }
    for (int64_t i = 0; i < dim; i++) row[i] /= sqrt((double)block);
}

/* The codes of cal2: a quarter of the dims in two base-4 digits, half in one; the last quarter holds low digits, and is
 * 0. */
static void digits(double *row, int64_t dim)
{
    for (int64_t d = 0, low = dim - dim / 4; low < dim; d++, low++) {
        row[d] = 21 / 64. * (4 * row[d] + row[low]);
        row[low] = 0;
    }
}

static void undo(spec f, double *row, int64_t dim)
{
    if (f.coding == MID || f.coding == LLOYD) hadamard(row, dim);
    if (f.coding == SPREAD) digits(row, dim);
}

/* ---------------------------------------------------------------- pages */

static int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

static int64_t planes(spec f, int64_t dim)
{
    return f.coding == RAW ? 0 : (f.group ? dim / f.group : 1) * (f.coding == UINT ? 2 : 1);
}

static int meta_size(spec f) { return f.coding == E2M1 ? 1 : 2; }

static int64_t meta_bytes(spec f, int key_side, int64_t dim, int64_t page_size)
{
    int64_t by_token = planes(f, dim) * meta_size(f) * page_size;
    if (!key_side || f.keys == TOKEN) return by_token;
    return f.keys == CHANNEL ? 4 * dim : by_token + 2 * dim;
}

static unsigned cell(const uint8_t *tiles, spec f, int key_side, int dim, int t, int d)
{
    int run = key_side ? d : t % 16, lane = key_side ? t % 16 : d, lanes = key_side ? 16 : dim;
    int period = key_side ? dim : 16, word, shift;
    if (f.bits == 3) { /* a tile of 2 bits, then of 1; V has dims d and d + dim / 2 interleaved */
        const uint8_t *tile = tiles + t / 16 * 6 * dim;
        int plane = key_side ? d / (dim / 4) : t % 16 / 4, in = key_side ? d % (dim / 4) : 0;
        int byte = key_side ? 4 * (in / 4 * 16 + t % 16) + in % 4 : 4 * d + t % 4, late = byte / (2 * dim);
        return (tile[byte] >> 2 * plane & 3) | (tile[4 * dim + byte % (2 * dim)] >> (2 * plane + late) & 1) << 2;
    }
    if (f.bits < 8) { /* byte i, plane p = p * (period * bits / 8) + 4j + i */
        int each = period * f.bits / 8;
        word = run % each / 4, shift = 8 * (run % each % 4) + f.bits * (run / each);
    } else
        word = run * f.bits / 32, shift = run * f.bits % 32;
    const uint8_t *at = tiles + t / 16 * 16 * dim * f.bits / 8 + 4 * (word * lanes + lane);
    uint32_t w = at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
    return f.bits == 32 ? w : w >> shift & ((1u << f.bits) - 1);
}

static double half_at(const uint8_t *meta, int64_t i)
{
    return ref_half((uint16_t)(meta[2 * i] | meta[2 * i + 1] << 8));
}

static double scale_at(spec f, const uint8_t *meta, int64_t i)
{
    return f.coding != E2M1 ? half_at(meta, i)
           : f.group == 16  ? ref_small_float(meta[i], 4, 3, 7)
                            : ref_power_of_two(meta[i] - 127);
}

typedef struct side {
    spec f;
    int64_t dim;
    const uint8_t *tiles, *meta;
} side;

static side side_at(const uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                    int64_t size)
{
    int64_t v = align64(size * key_dim * SPEC[key].bits / 8),
            k_meta = v + align64(size * value_dim * SPEC[value].bits / 8);
    int64_t v_meta = k_meta + align64(meta_bytes(SPEC[key], 1, key_dim, size));
    return key_side ? (side){SPEC[key], key_dim, page, page + k_meta}
                    : (side){SPEC[value], value_dim, page + v, page + v_meta};
}

/* Scale and zero point of dim d of token t; those of the previous dim of the same token are given. */
static void stats_of(const side *s, int key_side, int64_t size, int64_t t, int64_t d, double *scale, double *zero)
{
    int64_t width = s->f.group ? s->f.group : s->dim, group = d / width, each = s->f.coding == UINT ? 2 : 1;
    if (key_side && s->f.keys == CHANNEL) {
        *scale = half_at(s->meta, d);
        *zero = half_at(s->meta, s->dim + d);
        return;
    }
    if (d % width) return;
    *scale = scale_at(s->f, s->meta, each * group * size + t);
    *zero = each == 2 ? half_at(s->meta, (each * group + 1) * size + t) : 0;
}

void ref_page_row(const uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                  int64_t size, int64_t t, double *row)
{
    side s = side_at(page, key_side, key, value, key_dim, value_dim, size);
    double scale = 0, zero = 0;
    int format = key_side ? key : value;
    for (int64_t d = 0; d < s.dim; d++) {
        unsigned code = cell(s.tiles, s.f, key_side, (int)s.dim, (int)t, (int)d);
        uint16_t h = (uint16_t)code;
        if (s.f.coding == RAW) {
            row[d] = ref_element((kvc_dtype)format, format ? (void *)&h : (void *)&code, 0);
            continue;
        }
        stats_of(&s, key_side, size, t, d, &scale, &zero);
        row[d] = level(s.f, code) * scale + zero;
    }
    undo(s.f, row, s.dim);
    const uint8_t *mean = s.meta + planes(s.f, s.dim) * meta_size(s.f) * size;
    for (int64_t d = 0; key_side && s.f.keys == CENTRED && d < s.dim; d++) row[d] += half_at(mean, d);
}

void ref_page_steps(const uint8_t *page, int key_side, int key, int value, int64_t key_dim, int64_t value_dim,
                    int64_t size, int64_t t, double *half_step)
{
    side s = side_at(page, key_side, key, value, key_dim, value_dim, size);
    double scale = 0, zero = 0;
    for (int64_t d = 0; d < s.dim; d++) {
        half_step[d] = 0;
        if (s.f.coding == RAW) continue;
        stats_of(&s, key_side, size, t, d, &scale, &zero);
        half_step[d] = scale * half_gap(s.f, cell(s.tiles, s.f, key_side, (int)s.dim, (int)t, (int)d));
    }
}

void ref_quantized_row(int format, const uint8_t *codes, const uint8_t *meta, int64_t dim, double *row)
{
    spec f = SPEC[format];
    int64_t bytes = dim * f.bits / 8;
    for (int64_t d = 0; d < dim; d++) {
        unsigned code = codes[d % bytes] >> f.bits * (d / bytes) & ((1u << f.bits) - 1);
        if (f.bits == 3)
            code = (codes[d % (dim / 4)] >> 2 * (d / (dim / 4)) & 3u) |
                   (codes[dim / 4 + d % (dim / 8)] >> d / (dim / 8) & 1u) << 2;
        int64_t group = d / (f.group ? f.group : dim), each = f.coding == UINT ? 2 : 1;
        row[d] = level(f, code) * scale_at(f, meta, each * group) + (each == 2 ? half_at(meta, each * group + 1) : 0);
    }
    undo(f, row, dim);
}

/* ---------------------------------------------------------------- attention */

double ref_attend(const ref_tokens *x, const double *q, double scale, double softcap, const float *aux, double *out,
                  double *weights)
{
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < x->n; i++) {
        weights[i] = -INFINITY;
        if (!x->sees[i]) continue;
        const double *k = x->k + i * x->key_dim;
        double part[4] = {0};
        int64_t d = 0;
        for (; d + 4 <= x->key_dim; d += 4)
            for (int j = 0; j < 4; j++) part[j] += q[d + j] * k[d + j];
        for (; d < x->key_dim; d++) part[0] += q[d] * k[d];
        double s = (part[0] + part[1] + part[2] + part[3]) * scale;
        weights[i] = softcap > 0 ? softcap * tanh(s / softcap) : s;
        if (!(weights[i] <= most)) most = weights[i];
    }
    memset(out, 0, (size_t)x->value_dim * sizeof *out);
    if (most == -INFINITY) {
        memset(weights, 0, (size_t)x->n * sizeof *weights);
        return most;
    }
    for (int64_t i = 0; i < x->n; i++) sum += weights[i] = x->sees[i] ? exp(weights[i] - most) : 0;
    double lse = most + log(sum), total = sum + (aux ? exp(*aux - most) : 0);
    for (int64_t i = 0; i < x->n; i++) {
        double w = weights[i] / total;
        const double *v = x->v + i * x->value_dim;
        weights[i] /= sum;
        if (!x->sees[i]) continue;
        for (int64_t d = 0; d < x->value_dim; d++) out[d] += w * v[d];
    }
    return lse;
}
