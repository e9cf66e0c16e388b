/* pool_check.c - checks the invariants of a pool, for tests. */
#include "pool.h"

/* Length of a free list; -1 if it contains a slot in use or a cycle. */
static int32_t list_length(const slab *s, int32_t head)
{
    int32_t n = 0;
    for (int32_t k = head; k != LIST_END; k = s->link[k])
        if (k < 0 || k >= s->bump || s->refs[k] || ++n > s->bump) return -1;
    return n;
}

static kvc_status check_slab(const kvc_pool *pool, int32_t index, kvc_pool_stats *sum, int64_t *hot)
{
    const slab *s = pool->slabs[index];
    int64_t bytes = pool->classes[s->class_index].slot_bytes;
    int32_t live = 0, n_hot = list_length(s, s->hot), n_cold = list_length(s, s->cold);
    bool listed = false;
    for (int32_t k = 0; k < s->slots; k++) live += s->refs[k] > 0; /* slots from bump on are unused */
    KVC_CHECK(n_hot >= 0 && n_cold >= 0, KVC_E_VALUE, "pool: slab %d: a free list holds a slot in use", index);
    KVC_CHECK(live == s->live && (live > 0 || pool->keep || !kvc_units_can_release(pool, s)) &&
                  live + n_hot + n_cold == s->bump && s->bump <= s->slots,
              KVC_E_VALUE, "pool: slab %d: its counts are wrong", index);
    for (int64_t u = 0; u < s->units; u++)
        KVC_CHECK(slab_over(pool, s->first_unit + u) == index, KVC_E_VALUE, "pool: slab %d: lost a unit", index);
    for (int32_t i = pool->classes[s->class_index].room; i != LIST_END; i = pool->slabs[i]->next) listed |= i == index;
    KVC_CHECK(listed == has_room(s), KVC_E_VALUE, "pool: slab %d: wrong about its room", index);
    sum->resident += touched(pool, s) - n_cold * bytes;
    sum->used += live * bytes;
    sum->slots += live;
    sum->slabs++;
    sum->reserved += s->units * pool->unit;
    *hot += n_hot;
    return KVC_OK;
}

static kvc_status check_all(const kvc_pool *pool)
{
    kvc_pool_stats sum = {0};                                             /* reserved: bytes covered by slabs */
    int64_t hot = 0, covered = pool->space ? pool->held / pool->unit : 0; /* in units */
    for (int32_t i = 0; i < pool->slab_capacity; i++)
        if (pool->slabs[i]) KVC_TRY(check_slab(pool, i, &sum, &hot));
    for (int64_t u = 0; !pool->space && u < pool->extent / UNIT; u++) covered += slab_over(pool, u) >= 0;
    for (int32_t i = 0; i < pool->n_classes; i++) hot -= pool->classes[i].hot;
    KVC_CHECK(sum.resident == pool->resident && sum.used == pool->used && sum.slots == pool->slots &&
                  sum.slabs == pool->n_slabs && sum.reserved == pool->held && covered == pool->held / pool->unit &&
                  hot == 0,
              KVC_E_VALUE, "pool: its totals are wrong");
    return KVC_OK;
}

kvc_status kvc_pool_check(const kvc_pool *pool)
{
    enter(pool);
    kvc_status status = check_all(pool);
    leave(pool);
    return status;
}
