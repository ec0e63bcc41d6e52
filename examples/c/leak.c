/* A loop that leaks, with strandline as its allocator.
 *
 *     cc leak.c -o leak $(pkg-config --cflags --libs strandline)
 *     ./leak            host memory; no GPU is needed
 *     ./leak cuda       GPU 0
 *
 * Each step takes scratch memory and gives it back, and keeps one result. Nobody ever frees the results:
 * strandline says so while the loop runs, and its report names the function that allocates them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "strandline.h"

#define STEPS 60
#define SCRATCH ((size_t)4 << 20)
#define RESULT ((size_t)256 << 10)

/* Says what failed and ends the program. */
static void check(int code, const char *what) {
    char why[512];
    if (code >= 0) return;
    strandline_error(why, sizeof why);
    fprintf(stderr, "%s failed (%d): %s\n", what, code, why);
    exit(1);
}

static void *take(int device, size_t size) {
    void *block = NULL;
    check(strandline_malloc(device, size, NULL, &block), "strandline_malloc");
    return block;
}

/* The leak: whoever calls this is to free the result, and nobody does. */
static void *make_result(int device) { return take(device, RESULT); }

static void step(int device, void **results, int number) {
    void *scratch = take(device, SCRATCH);
    results[number] = make_result(device);
    check(strandline_free(scratch), "strandline_free");
    check(strandline_step(), "strandline_step");
}

int main(int argc, char **argv) {
    int device = argc > 1 && strcmp(argv[1], "cuda") == 0 ? 0 : STRANDLINE_HOST;
    void *results[STEPS];
    strandline_counters counters;
    size_t free_bytes = 0, total_bytes = 0;
    int i;

    if (strandline_abi_version() != STRANDLINE_ABI_VERSION) {
        fprintf(stderr, "libstrandline is of another ABI than strandline.h\n");
        return 1;
    }
    check(strandline_open(device, NULL), "strandline_open");
    for (i = 0; i < STEPS; i++) step(device, results, i);

    check(strandline_get_counters(device, &counters, sizeof counters), "strandline_get_counters");
    check(strandline_memory_info(device, &free_bytes, &total_bytes), "strandline_memory_info");
    printf("%llu live blocks, %llu bytes allocated, %llu reserved; the device has %llu of %llu bytes free\n",
           (unsigned long long)counters.live_blocks, (unsigned long long)counters.allocated_bytes,
           (unsigned long long)counters.reserved_bytes, (unsigned long long)free_bytes,
           (unsigned long long)total_bytes);
    /* The report is written at the exit by itself; this also tells whether it could be. */
    check(strandline_finish(), "strandline_finish");
    return 0;
}
