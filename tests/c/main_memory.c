/* main_memory.c - only pool, tables and evictions: a small program that every run of the tests builds
 * with sanitizers. */
#include "harness.h"

int main(void)
{
    int64_t live = kvc_alloc_live();
    test_pools();
    test_spaces();
    test_tables();
    test_restores();
    test_evictions();
    test_moves();
    CHECK(kvc_alloc_live() == live);
    puts("ok");
    return 0;
}
