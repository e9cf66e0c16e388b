/* main.c - tests of the core without Python: pool, tables and evictions here; codecs, attention and invalid arguments
 * in a separate process for each kernel level that the CPU supports (the level is chosen once per process). The stored
 * bytes of all levels must agree. `harness scalar avx2 ..`: only these levels; `harness memory`: none. */
#include "harness.h"
#include "play.h"

#include <malloc.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* Hash of everything that the tests below store and read, equal on every level and machine. It changes with the tests;
 * if it changes without them, stored bytes have changed, and old files cannot be read. */
#define GOLDEN 0x87dcdb471ef34561ull

#ifdef KVC_VALGRIND /* whose fused multiply-adds are not bit-exact */
#define ROUGH true
#else
#define ROUGH false
#endif

static const char *const LEVELS[] = {"scalar", "avx2", "avxvnni", "avx512", "avx512bf16",
                                     "amx",    "neon", "dotprod", "i8mm",   "abacus"};
enum { N = sizeof LEVELS / sizeof *LEVELS };

static void run_level(const char *level, uint64_t *bytes)
{
    const char *name;
    setenv("KVCOMPRESS_ISA", level, 1);
    if (kvc_isa(&name) != KVC_OK) { /* not compiled in, or not supported by this CPU: ops must report it */
        FAILS(KVC_E_VALUE, "KVCOMPRESS_ISA", kvc_attend(&(kvc_attend_args){0}));
        FAILS(KVC_E_VALUE, "KVCOMPRESS_ISA", kvc_compact(&(kvc_store){0}, NULL, 0, NULL));
        return;
    }
    CHECK(!strcmp(name, level));
    int64_t live = kvc_alloc_live();
    kvc_alloc_poison(POISON); /* results must not depend on uninitialized memory */
    test_codecs();
    test_attention();
    test_arguments();
    test_driver();
    test_edges();
    test_rest();
    test_granular();
    test_latents();
    test_fed_back();
    CHECK(kvc_alloc_live() == live);
    *bytes = stored_bytes;
}

static void run_memory(void)
{
    int64_t live = kvc_alloc_live();
    test_pools();
    test_spaces();
    test_tables();
    test_restores();
    test_evictions();
    test_moves();
    test_keep();
    test_prefixes();
    CHECK(kvc_alloc_live() == live);
}

int main(int argc, char **argv)
{
    /* makes page faults take a tenth of the time */
    mallopt(M_MMAP_THRESHOLD, 1 << 30), mallopt(M_TRIM_THRESHOLD, 1 << 30);
    uint64_t *bytes = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pid[N] = {0};
    CHECK(bytes != MAP_FAILED);
    for (int i = 0; i < N; i++) {
        bool wanted = argc < 2;
        for (int k = 1; k < argc; k++) wanted |= !strcmp(argv[k], LEVELS[i]);
        if (!wanted) continue;
        fflush(NULL);
        if ((pid[i] = fork()) == 0) {
            run_level(LEVELS[i], &bytes[i]);
            exit(0);
        }
        CHECK(pid[i] > 0);
    }
    if (argc < 2 || !strcmp(argv[1], "memory")) run_memory();
    int status;
    for (pid_t done; (done = wait(&status)) > 0;)
        for (int i = 0; i < N && status; i++)
            if (pid[i] == done) {
                fprintf(stderr, "level %s failed\n", LEVELS[i]);
                return 1;
            }
    for (int i = 0; i < N; i++)
        if (bytes[i] && bytes[i] != GOLDEN && !(ROUGH && i > 0)) { /* valgrind: not for scalar */
            fprintf(stderr, "level %s: stored bytes %#llx, not those of this version\n", LEVELS[i],
                    (unsigned long long)bytes[i]);
            return 1;
        }
    fputs("levels:", stderr); /* levels that ran */
    for (int i = 0; i < N; i++)
        if (bytes[i]) fprintf(stderr, " %s", LEVELS[i]);
    fputs("\n", stderr);
    puts("ok");
    return 0;
}
