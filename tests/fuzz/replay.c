/* replay.c - main function for a fuzz target without a fuzzer: runs it on the given files. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) return perror(argv[i]), 1;
        uint8_t *data = malloc(1 << 20);
        size_t n = fread(data, 1, 1 << 20, file);
        fclose(file);
        fprintf(stderr, "%s\n", argv[i]);
        LLVMFuzzerTestOneInput(data, n);
        free(data);
    }
    puts("ok");
    return 0;
}
