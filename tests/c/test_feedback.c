/* test_feedback.c - codes that make up for each other's errors lose less in the metric that they are chosen by. */
#include "play.h"

#include <math.h>

enum { D = 64, H = 2, T = 100, ROWS = H * T * D };

/* A rotated row's error in the metric of a head's feedback. */
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

/* alone: rows' dims weigh nothing in each other, so that the nearest codes are best. */
static void fed_back(kvc_pool *pool, int format, bool alone, bool key_only)
{
    static float feedback[2][H][(D + 1) * D], given[2][ROWS];
    double cost[2][2] = {{0}}, row[D]; /* of K and V, without and with */
    play p;
    play_open(&p, pool, &(kvc_spec){H, D, D, 32, 4, 0, KVC_RAW_F32, format, format, false}, 1, 1, 128);
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
        kvc_attend_args a = play_plan_call(&p, T, 0, false);
        memcpy(a.k.data, given[0], sizeof given[0]);
        memcpy(a.v.data, given[1], sizeof given[1]);
        OK(kvc_append(&a, fed ? feedback[0][0] : NULL, fed && !key_only ? feedback[1][0] : NULL));
        kvc_table_commit(p.t);
        for (int i = 0; i < H * T * 2; i++) {
            int h = i / (T * 2), t = i / 2 % T, side = i % 2;
            play_row(&p, play_entry(&p, 0, h, t), h, t, !side, row);
            fold(row, sizeof row);
            for (int d = 0; d < D; d++) row[d] -= (double)given[side][(h * T + t) * D + d];
            cost[side][fed] += cost_of(row, feedback[side][h]);
        }
        play_end_call(&a);
        OK(kvc_table_reset(p.t, 0));
    }
    for (int side = 0; side < 2; side++) {
        double share = cost[side][1] / cost[side][0];
        if (side && key_only)
            CHECK(share == 1);
        else
            CHECK(alone ? fabs(share - 1) < .1 : share < .93); /* alone: only the gain is another one */
    }
    play_close(&p);
}

void test_fed_back(void)
{
    kvc_pool *pool;
    OK(kvc_pool_new(64 * MB, &pool));
    const int formats[] = {KVC_INT4, KVC_INT2, KVC_INT3, KVC_INT4_LLOYD};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        fed_back(pool, formats[i], false, i % 2);
        fed_back(pool, formats[i], true, false);
    }
    fed_back(pool, KVC_INT8, true, false); /* without rotation there is nothing to choose */
    kvc_pool_release(pool);
}
