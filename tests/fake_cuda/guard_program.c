/* A C program that writes where it should not, on a GPU that is host memory (FAKE_CUDA_BACKED), under guard mode.
 *
 *     guard_program KIND
 *
 * What it tells the stand-in (streams that are busy, captures) and asks of it (launches) goes through dlsym. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "strandline.h"

static void *fake;
#define ASK(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(fake, #name))
static void *const ONE = (void *)0x1000, *const TWO = (void *)0x2000;

static void queue(void *stream) { ASK(void, fake_cuda_queue, void *)(stream); }
static void complete(void *stream) { ASK(void, fake_cuda_complete, void *)(stream); }
static void capture(void *stream, int on) { ASK(void, fake_cuda_capture, void *, int)(stream, on); }
static int calls(const char *name) { return ASK(int, fake_cuda_calls, const char *)(name); }
static int retired(void) { return calls("strandline_guard_retire"); }

static char *make_on(size_t size, void *stream) {
    void *block = NULL;
    int code = strandline_malloc(0, size, stream, &block);
    if (code) {
        char why[500];
        strandline_error(why, sizeof why);
        printf("malloc %d %s\n", code, why);
        return NULL;
    }
    return (char *)block;
}
static char *make(size_t size) { return make_on(size, ONE); }
static void drop(void *block) {
    int code = strandline_free(block);
    if (code) printf("free %d\n", code);
}
static void churn(int n, size_t size) { for (int i = 0; i < n; i++) drop(make(size)); }
/* Blocks of every size, some of them used by another thread's stream and some freed late. */
static void *worker(void *number) {
    unsigned seed = (unsigned)(size_t)number;
    void *stream = (void *)(0x1000 * ((size_t)number + 1)), *other = (void *)(0x1000 * ((size_t)number % 4 + 2));
    char *kept[16] = {0};
    for (int i = 0; i < 400; i++) {
        size_t size = (size_t)1 << (rand_r(&seed) % 18);
        char **place = &kept[rand_r(&seed) % 16];
        if (*place) drop(*place);
        *place = make_on(size + i % 7, stream);
        if (!*place) continue;
        memset(*place, i, size + i % 7);
        if (i % 5 == 0) strandline_record_stream(*place, other);
        if (i % 90 == 0) strandline_trim(0);
    }
    for (int i = 0; i < 16; i++) if (kept[i]) drop(kept[i]);
    return NULL;
}

/* From the first last look on, while its stream is busy: gives all that is held back to others, who write there. */
static volatile int over;
static void *goes_on(void *unused) {
    (void)unused;
    while (!over && calls("strandline_guard_check") == 0) usleep(100);
    for (int i = 0; !over; i++) {
        if (i == 50) complete(ONE);
        char *c = make_on(3 << 20, TWO);
        if (c) memset(c, 5, 3 << 20), drop(c);
        churn(20, 5000);
        strandline_trim(0);
    }
    return NULL;
}

static int is(const char *kind, const char *name) { return strcmp(kind, name) == 0; }

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "clean";
    size_t requested = 0;
    fake = dlopen(getenv("STRANDLINE_LIBCUDA"), RTLD_NOW);
    if (!fake || strandline_open(0, NULL)) return 4;
    char *a = make(1000), *b = make(5000001);
    if (!a || !b || (size_t)a % 512 || (size_t)b % 512) return 5;
    if (strandline_block_size(a, &requested, NULL) || requested != 1000) return 6;
    memset(a, 1, 1000);
    memset(b, 2, 5000001);
    if (is(kind, "overflow")) memset(a + 1000, 0, 3), drop(a);
    else if (is(kind, "underflow")) memset(b - 16, 0, 16), drop(b);
    else if (is(kind, "both")) memset(b - 512, 0, 1), b[5000001 + 511] = 0, drop(b);
    else if (is(kind, "live")) memset(b + 5000001, 0, 1);
    else if (is(kind, "use")) drop(a), a[10] = 7, a[999] = 7;
    else if (is(kind, "early")) {
        /* Said while the program runs: the alarm has the findings read before the batch is full. */
        memset(a + 1000, 0, 3);
        drop(a);
        churn(3, 100);
        fprintf(stderr, "still running\n");
    } else if (is(kind, "busy")) {
        /* The stream has work left: nothing may be read before that is done. */
        queue(ONE);
        memset(a + 1000, 0, 3);
        drop(a);
        churn(3, 100);
        fprintf(stderr, "still running\n");
        complete(ONE);
    } else if (is(kind, "many")) drop(b), b[4000000] = 7, churn(100, 4000000);
    else if (is(kind, "twice")) drop(a), drop(a);
    else if (is(kind, "step")) {
        drop(a);
        a[10] = 7;
        churn(100, 1000000);
        strandline_step();
        fprintf(stderr, "still running\n");
    } else if (is(kind, "streams")) {
        strandline_record_stream(a, TWO);
        queue(TWO);
        int before = retired();
        drop(a);
        churn(100, 100);
        int during = retired() - before - 100;
        printf("looked at while in use: %d\n", during);
        memset(a + 1000, 0, 3); /* the other stream still may write */
        complete(TWO);
        churn(100, 100);
        printf("looked at after: %d\n", retired() - before - 200);
    } else if (is(kind, "capture")) {
        int before = calls("cuLaunchKernel");
        char *c;
        capture(ONE, 1);
        memset(a + 1000, 0, 3);
        drop(a);
        c = make(3000);
        if (strandline_block_size(c, &requested, NULL) || requested != 3000) return 6;
        memset(c, 3, 3000);
        drop(c);
        printf("launches during the capture: %d\n", calls("cuLaunchKernel") - before);
        capture(ONE, 0);
        churn(40, 100);
    } else if (is(kind, "pressure")) {
        /* What is held back is given up before a request is refused. */
        size_t part = (size_t)6 << 20;
        char *kept[64];
        int n = 0;
        drop(b);
        churn(2, part);
        while (n < 64 && (kept[n] = make(part))) n++;
        printf("blocks of 6 MiB: %d\n", n);
        while (n > 0) drop(kept[--n]);
        churn(40, part);
    } else if (is(kind, "trim")) {
        strandline_counters counters;
        drop(b);
        b[3] = 3;
        strandline_trim(0);
        strandline_get_counters(0, &counters, sizeof counters);
        printf("live %d\n", (int)counters.live_blocks);
    } else if (is(kind, "large")) drop(make((size_t)100 << 20));
    else if (is(kind, "threads")) {
        pthread_t threads[4];
        for (long i = 0; i < 4; i++) pthread_create(&threads[i], NULL, worker, (void *)i);
        for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    } else if (is(kind, "full") || is(kind, "stuck")) {
        /* The stream does not get on: nothing may be launched that the driver would hold up. */
        static char *kept[1200];
        for (int i = 0; i < 1200; i++) kept[i] = make(100 + i % 3);
        if (is(kind, "full")) {
            queue(ONE);
            churn(1200, 100);
            complete(ONE);
            memset(a + 1000, 0, 3);
            drop(a);
            churn(100, 100);
            for (int i = 0; i < 1200; i++) drop(kept[i]);
        } else {
            char *c = make_on(700, TWO);
            c[700] = 0;
            queue(ONE);
            strandline_finish();
        }
    } else if (is(kind, "destroyed")) {
        /* Once another stream is done with a block it may go, whatever becomes of the block. */
        strandline_record_stream(a, TWO);
        drop(a);
        churn(100, 100);
        ASK(int, cuStreamDestroy_v2, void *)(TWO);
        strandline_trim(0);
        churn(100, 1000);
    } else if (is(kind, "early exit")) {
        /* As the guard gives a block up that another stream still uses, the heap waits for that. */
        strandline_record_stream(b, TWO);
        queue(TWO);
        drop(b);
        char *c[40];
        for (int i = 0; i < 40; i++) c[i] = make_on((size_t)6 << 20, (void *)0x3000);
        for (int i = 0; i < 40; i++) if (c[i] && c[i] < b + 5000001 && c[i] + (6 << 20) > b) printf("handed out in use\n");
        complete(TWO);
    } else if (is(kind, "waiting")) {
        /* What waits for another stream counts as held back. */
        strandline_counters counters;
        queue(TWO);
        for (int i = 0; i < 200; i++) {
            char *c = make(1 << 20);
            if (!c) continue;
            strandline_record_stream(c, TWO);
            drop(c);
        }
        strandline_get_counters(0, &counters, sizeof counters);
        printf("reserved MiB: %d, used: %d\n", (int)(counters.reserved_bytes >> 20), counters.live_blocks == 2);
        complete(TWO);
    } else if (is(kind, "per thread")) {
        char *c = make_on(1000, (void *)2);
        int before = calls("cuLaunchKernel");
        memset(c, 1, 1000);
        drop(c);
        printf("launches: %d\n", calls("cuLaunchKernel") - before);
    } else if (is(kind, "gone")) {
        char *c = make_on(1000, TWO);
        ASK(void, fake_cuda_fault, const char *, int, int)("cuLaunchKernel", 1, 400);
        drop(c);
        memset(a + 1000, 0, 3);
        drop(a);
    } else if (is(kind, "finishing")) {
        /* While the end of the run looks at what is held back, others take and give back. */
        pthread_t thread;
        for (int i = 0; i < 9000; i++) drop(make(1000 + i % 5 * 1000));
        pthread_create(&thread, NULL, goes_on, NULL);
        queue(ONE);
        strandline_finish();
        over = 1;
        pthread_join(thread, NULL);
    } else if (is(kind, "clean")) {
        for (int i = 0; i < 300; i++) {
            char *c = make_on((size_t)1 << (i % 20), i % 3 ? ONE : TWO);
            if (c) memset(c, i, (size_t)1 << (i % 20)), drop(c);
        }
        drop(a);
        drop(b);
    }
    printf("misuses: %d\n", ASK(int, fake_cuda_misuses, void)());
    return 0;
}
