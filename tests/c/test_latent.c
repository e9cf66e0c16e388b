/* test_latent.c - calls on latents (MLA): a key is K's dims followed by V's, and its value is K's. */
#include "play.h"

/* group: query heads; few, or so many that a page's codes are packed for all of them. */
static void latents(kvc_pool *pool, int64_t latent, int64_t rotary, int raw, int key, int value, int64_t group)
{
    play p;
    play_open(&p, pool, &(kvc_spec){1, latent, rotary, 32, 4, 0, raw, key, value, false}, 2, group, 200);
    p.latent = true;
    play_step(&p, &(step){.T = 70, .queries = group > 8 ? 3 : 0});
    play_step(&p, &(step){.T = 1, .wild = value % 2, .out = KVC_BF16});
    play_step(&p, &(step){.T = 40, .queries = 5, .pads = true, .exec = &in_threads});
    play_step(&p, &(step){.T = 1, .failures = key == value, .aux = true});
    play_step(&p, &(step){.T = 3, .window = 60, .softcap = 20});
    play_crop(&p, 90);
    play_step(&p, &(step){.T = 1, .out = KVC_F16});
    play_close(&p);
}

/* cal2 has no rows that V's side could be scored with. */
static void refused(kvc_pool *pool)
{
    play p;
    play_open(&p, pool, &(kvc_spec){1, 64, 64, 16, 0, 0, KVC_RAW_F32, KVC_CAL2, KVC_CAL2, false}, 1, 1, 64);
    play_step(&p, &(step){.T = 40});
    kvc_attend_args a = play_plan_call(&p, 0, 1, false);
    static float wide[128];
    a.latent = true;
    void *narrow = a.q.data;
    a.q = (kvc_dense){wide, {128, 128, 128}, KVC_F32};
    FAILS(KVC_E_VALUE, "expected a format with a scale per row for latents, got cal2", kvc_attend(&a));
    a.q.data = narrow;
    kvc_table_rollback(p.t);
    play_end_call(&a);
    play_close(&p);
}

void test_latents(void)
{
    kvc_pool *pool;
    OK(kvc_pool_new(256 * MB, &pool));
    for (int format = 0; format < KVC_FORMATS; format++) {
        if (format == KVC_CAL2) continue;
        bool raw = kvc_format_is_raw(format);
        for (int64_t group = 2; group <= 16; group += 14)
            latents(pool, 128, 64, raw ? format : KVC_RAW_F32, format, format, group);
    }
    const int pairs[][2] = {{KVC_INT8, KVC_RAW_F32}, {KVC_INT4, KVC_RAW_F32}, {KVC_INT4, KVC_INT8},
                            {KVC_INT8, KVC_INT4},    {KVC_KIVI4, KVC_INT8},   {KVC_RAW_F32, KVC_INT4}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int64_t group = 3; group <= 16; group += 13)
            latents(pool, 96, 32, KVC_RAW_F32, pairs[i][0], pairs[i][1], group);
    latents(pool, 512, 64, KVC_RAW_BF16, KVC_INT8, KVC_INT8, 16);
    refused(pool);
    kvc_pool_stats left;
    kvc_pool_get_stats(pool, &left);
    CHECK(left.slots == 0);
    kvc_pool_release(pool);
}
