/* test_feedback.c - codes with error feedback have a lower error in the metric that they are chosen by. */
#include "play.h"

#include <math.h>

enum { D = 64, H = 2, T = 100, ROWS = H * T * D };

/* Error of a rotated row in the metric of a head's feedback. */
static double cost_of(const double *error, const float *feedback)
{
    double turned[D], cost = 0;
    for (int i = 0; i < D; i++) {
        turned[i] = 0;
        for (int d = 0; d < D; d++) turned[i] += __builtin_parity((unsigned)(i & d)) ? -error[d] : error[d];
    }
    for (int d = 0; d < D; d++) {
        double sum = turned[d];
        for (int i = d + 1; i < D; i++) sum += (double)feedback[d * D + i] * turned[i];
        cost += (double)feedback[D * D + d] * sum * sum / D;
    }
    return cost;
}

/* alone: dims do not interact, so rounding to nearest is optimal. ragged: after an eviction, in a table with a row per
 * head, where each head has its own feedback. */
static void fed_back(kvc_pool *pool, int format, bool alone, const bool sides[2], bool ragged)
{
    static float feedback[2][H][(D + 1) * D], given[2][ROWS];
    double cost[2][2] = {{0}}, coded[2][2] = {{0}}, row[D]; /* of K and V, without and with; rows that are not raw */
    play p;
    play_open(&p, pool, &(kvc_spec){H, D, D, 32, 4, 0, KVC_RAW_F32, format, format, false}, 1, 1, 256);
    for (int side = 0; side < 2; side++) {
        for (int i = 0; i < ROWS; i++) given[side][i] = random_number(KVC_F32);
        for (int h = 0; h < H; h++)
            for (int d = 0; d <= D; d++)
                for (int i = 0; i < D; i++)
                    feedback[side][h][d * D + i] = d == D            ? .1f + fabsf(random_number(KVC_F32))
                                                   : alone || i <= d ? 0
                                                                     : .4f * random_number(KVC_F32) / (float)(i - d);
    }
    for (int fed = 0; fed < 2; fed++) {
        if (ragged) {
            play_step(&p, &(step){.T = 90, .queries = -1});
            play_evict(&p, 4, true, -1);
            CHECK(p.t->table_heads == H);
        }
        int64_t before[H];
        for (int h = 0; h < H; h++) before[h] = p.t->rows[2 * play_line(p.t, 0, h)];
        kvc_attend_args a = play_plan_call(&p, T, 0, false);
        memcpy(a.k.data, given[0], sizeof given[0]);
        memcpy(a.v.data, given[1], sizeof given[1]);
        OK(kvc_attend_feedback(&a, fed && sides[0] ? feedback[0][0] : NULL, fed && sides[1] ? feedback[1][0] : NULL));
        kvc_table_commit(p.t);
        for (int i = 0; i < H * T * 2; i++) {
            int h = i / (T * 2), t = i / 2 % T, side = i % 2;
            play_row(&p, play_entry(&p, 0, h, before[h] + t), h, before[h] + t, !side, row);
            fold(row, sizeof row);
            for (int d = 0; d < D; d++) row[d] -= (double)given[side][(h * T + t) * D + d];
            double more = cost_of(row, feedback[side][h]);
            cost[side][fed] += more;
            coded[side][fed] += more > 0;
        }
        play_end_call(&a);
        OK(kvc_table_reset(p.t, 0));
    }
    /* Three standard deviations or more from the means of 40 runs: any format may be added, which changes the numbers. */
    double gain = kvc_format_get(format)->bits == 2 ? .99 : .93;
    for (int side = 0; side < 2; side++) {
        double share = cost[side][1] / coded[side][1] / (cost[side][0] / coded[side][0]);
        if (!sides[side])
            CHECK(ragged ? fabs(share - 1) < .1 : share == 1); /* their pages contain other tokens */
        else
            CHECK(alone ? fabs(share - 1) < .12 : share < gain); /* alone: only the gain differs */
    }
    play_close(&p);
}

void test_fed_back(void)
{
    kvc_pool *pool;
    OK(kvc_pool_new(64 * MB, &pool));
    static const bool sides[][2] = {{true, true}, {true, false}, {false, true}}; /* K, V */
    const int formats[] = {KVC_INT4, KVC_INT2, KVC_INT3, KVC_INT4_LLOYD};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        fed_back(pool, formats[i], false, sides[i % 2], false);
        fed_back(pool, formats[i], false, sides[i % 3], true);
        fed_back(pool, formats[i], true, sides[0], false);
    }
    fed_back(pool, KVC_INT8, true, sides[0], false); /* without rotation, feedback has no effect */
    kvc_pool_release(pool);
}
