/* map.c - multiplies rows by a matrix of their head. Calibrated caches transform K, V, q and the output this way. */
#include "codec.h"
#include "base/dtype.h"

typedef struct mapper {
    const kvc_dense *x;
    kvc_dense out;
    const float *by;
    int64_t B, G, T, D, blocks; /* G: heads per matrix; work is split into blocks of 4 rows */
} mapper;

/* Offset of row i among the rows that use matrix h. */
static int64_t row_at(const mapper *m, const int64_t *stride, int64_t h, int64_t i)
{
    int64_t t = i % m->T, g = i / m->T % m->G, b = i / m->T / m->G;
    return b * stride[0] + (h * m->G + g) * stride[1] + t * stride[2];
}

static void put_row(const float *row, const kvc_dense *to, int64_t at, int64_t D)
{
    float *whole = to->data;
    uint16_t *half = to->data;
    for (int64_t d = 0; d < D; d++)
        if (to->dtype == KVC_F32)
            whole[at + d] = row[d];
        else
            half[at + d] = to->dtype == KVC_F16 ? kvc_f32_to_f16(row[d]) : kvc_f32_to_bf16(row[d]);
}

static void map_blocks(int64_t begin, int64_t end, void *context)
{
    const mapper *m = context;
    const kvc_tile_kernels *kernels = kvc_kernels_get()->tile;
    int64_t D = m->D, rows = m->B * m->G * m->T, each = m->x->dtype == KVC_F32 ? 4 : 2;
    _Alignas(KVC_ALIGN) float in[4 * KVC_MAX_DIM], out[4 * KVC_MAX_DIM];
    uint32_t guard = kvc_fp_begin();
    for (int64_t i = begin; i < end; i++) {
        int64_t h = i / m->blocks, first = i % m->blocks * 4, n = rows - first < 4 ? rows - first : 4;
        const float *by = m->by + h * D * D;
        for (int64_t r = 0; r < n; r++)
            kvc_load_rows((const uint8_t *)m->x->data + each * row_at(m, m->x->stride, h, first + r), 0, m->x->dtype, 1,
                          D, in + r * D);
        int64_t together = n == 4 ? 4 : 1;
        for (int64_t r = 0; r < n; r += together) {
            int64_t done = kernels ? kernels->map(in + r * D, together, by, D, out + r * D) : 0;
            for (int64_t k = r; k < r + together; k++)
                for (int64_t c = done; c < D; c++) {
                    float sum = 0;
                    for (int64_t d = 0; d < D; d++) sum += in[k * D + d] * by[d * D + c];
                    out[k * D + c] = sum;
                }
        }
        for (int64_t r = 0; r < n; r++) put_row(out + r * D, &m->out, row_at(m, m->out.stride, h, first + r), D);
    }
    kvc_fp_end(guard);
}

kvc_status kvc_map_heads(const kvc_dense *x, int64_t B, int64_t query_heads, int64_t T, int64_t D, const float *by,
                         int64_t H, void *out, kvc_dtype dtype, const kvc_exec *exec)
{
    const char *isa;
    KVC_TRY(kvc_isa(&isa));
    KVC_CHECK(D > 0 && D <= KVC_MAX_DIM, KVC_E_VALUE, "map_heads: x: expected rows of 1 to %d dims, got %lld",
              KVC_MAX_DIM, (long long)D);
    KVC_CHECK(H > 0 && query_heads % H == 0, KVC_E_VALUE,
              "map_heads: by: expected a number of matrices that divides %lld heads, got %lld", (long long)query_heads,
              (long long)H);
    KVC_TRY(kvc_dtype_check(x->dtype, "map_heads: x"));
    KVC_TRY(kvc_dtype_check(dtype, "map_heads: out"));
    mapper m = {.x = x, .by = by, .B = B, .G = query_heads / H, .T = T, .D = D};
    m.out = (kvc_dense){out, {query_heads * T * D, T * D, D}, dtype};
    m.blocks = (B * m.G * T + 3) / 4;
    if (m.blocks == 0) return KVC_OK;
    if (exec && exec->run)
        exec->run(H * m.blocks, map_blocks, &m);
    else
        map_blocks(0, H * m.blocks, &m);
    return KVC_OK;
}
