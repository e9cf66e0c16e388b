/* main_memory.c - pool, tables and evictions alone: a small program, to build under sanitizers with every run of the tests. */
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
