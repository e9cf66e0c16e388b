/* tile_map.h - multiplies rows by a matrix, 16 columns per vector. Each element is summed over the rows of the matrix
 * in order, with products rounded separately, as in scalar code, so all levels give the same bytes.
 *
 * Cost, instructions per 16 x 4 elements of the matrix: for 4 rows 4 loads, 16 broadcast operands, 32 arithmetic; for 1
 * row 4 loads and 8. A single row is bound by reading the matrix. */
#ifndef KVC_TILE_MAP_H
#define KVC_TILE_MAP_H

#define MAP_AHEAD 8 /* in rows */

/* nr rows, nc vectors of columns; compile-time constants once inlined. fetch: lines per matrix row to prefetch. */
INLINE void map_columns(int nr, int nc, const float *x, const float *by, int64_t dim, int64_t fetch, float *out)
{
    vf sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < nr * nc; i++) sum[i] = f_all(0);
    for (int64_t d = 0; d < dim; d++) {
        vf y[8];
        for (int64_t i = 0; i < fetch; i++) __builtin_prefetch(by + (d + MAP_AHEAD) * dim + 16 * i, 0, 2);
#pragma GCC unroll 8
        for (int c = 0; c < nc; c++) y[c] = f_load(by + d * dim + c * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < nr; r++) {
            vf a = f_all(x[r * dim + d]);
#pragma GCC unroll 8
            for (int c = 0; c < nc; c++) sum[r * nc + c] = f_add(sum[r * nc + c], f_mul(a, y[c]));
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < nr * nc; i++) f_store(out + i / nc * dim + i % nc * LANES, sum[i]);
}

/* Processes the leading full vectors of columns for `rows` (4 or 1) rows; returns the number of columns done. */
static int64_t map_rows(const float *x, int64_t rows, const float *by, int64_t dim, float *out)
{
    int64_t c = 0;
    if (rows == 4) {
        for (; c + 4 * LANES <= dim; c += 4 * LANES) map_columns(4, 4, x, by + c, dim, c ? 0 : dim / 16, out + c);
        for (; c + 2 * LANES <= dim; c += 2 * LANES) map_columns(4, 2, x, by + c, dim, c ? 0 : dim / 16, out + c);
        for (; c + LANES <= dim; c += LANES) map_columns(4, 1, x, by + c, dim, c ? 0 : dim / 16, out + c);
    } else {
        for (; c + 8 * LANES <= dim; c += 8 * LANES) map_columns(1, 8, x, by + c, dim, 0, out + c);
        for (; c + 2 * LANES <= dim; c += 2 * LANES) map_columns(1, 2, x, by + c, dim, 0, out + c);
        for (; c + LANES <= dim; c += LANES) map_columns(1, 1, x, by + c, dim, 0, out + c);
    }
    return c;
}

#endif
