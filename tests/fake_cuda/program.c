/* A CUDA program that knows nothing of strandline: each round it makes and frees working memory, and keeps one
 * block that it never frees.
 *
 *     program KIND [ROUNDS] [fault]
 *
 * KIND: device, pitch, async, pinned, managed (the runtime), driver (the driver's own functions, linked or, with
 * -DOPENED, by dlopen and dlsym), two (two devices), threads, fork, empty (touches no CUDA), errors.
 * Prints what CUDA answered and ends with code 7, so that a change of its output or code is seen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "small_cudart.h"

enum { KEPT = 1 << 20, WORK = 4 << 20 };
static const char *kind;
static _Atomic int sum; // counted by several threads

#ifdef OPENED
static int (*drv_malloc)(uint64_t *, size_t), (*drv_free)(uint64_t);
#else
#define drv_malloc cuMemAlloc_v2
#define drv_free cuMemFree_v2
#endif

static void check(int code, const char *what) {
    if (code) {
        printf("%s: %d\n", what, code);
        exit(9);
    }
}

static int is(const char *name) { return strcmp(kind, name) == 0; }

__attribute__((noinline)) void *take(size_t size) {
    void *at = NULL;
    size_t pitch = 0;
    if (is("pitch")) check(cudaMallocPitch(&at, &pitch, 1000, size / 1024), "cudaMallocPitch");
    else if (is("async")) check(cudaMallocAsync(&at, size, NULL), "cudaMallocAsync");
    else if (is("pinned")) check(cudaHostAlloc(&at, size, 0), "cudaHostAlloc");
    else if (is("managed")) check(cudaMallocManaged(&at, size, 1), "cudaMallocManaged");
    else if (is("driver")) check(drv_malloc((uint64_t *)&at, size), "cuMemAlloc");
    else check(cudaMalloc(&at, size), "cudaMalloc");
    return at;
}

__attribute__((noinline)) void give(void *at) {
    if (is("async")) check(cudaFreeAsync(at, NULL), "cudaFreeAsync");
    else if (is("pinned")) check(cudaFreeHost(at), "cudaFreeHost");
    else if (is("driver")) check(drv_free((uint64_t)(uintptr_t)at), "cuMemFree");
    else check(cudaFree(at), "cudaFree");
}

__attribute__((noinline)) void keep_result(void) {
    void *at = take(KEPT);
    sum += at != NULL;
}

__attribute__((noinline)) void do_work(void) {
    void *a = take(WORK), *b = take(WORK / 2);
    give(a);
    give(b);
}

static void *rounds(void *n) {
    for (long i = 0; i < (long)n; i++) {
        if (is("two")) check(cudaSetDevice((int)(i % 2)), "cudaSetDevice");
        do_work();
        keep_result();
    }
    return NULL;
}

int main(int argc, char **argv) {
    kind = argc > 1 ? argv[1] : "device";
    long n = argc > 2 ? atol(argv[2]) : 80;
    if (is("driver")) {
#ifdef OPENED
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library) return 8;
        int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
        int (*retain)(void **, int) = (int (*)(void **, int))dlsym(library, "cuDevicePrimaryCtxRetain");
        int (*set)(void *) = (int (*)(void *))dlsym(library, "cuCtxSetCurrent");
        dlerror();
        drv_malloc = (int (*)(uint64_t *, size_t))dlsym(library, "cuMemAlloc_v2");
        printf("after a look-up: %s\n", dlerror() ? "an error" : "none");
        drv_free = (int (*)(uint64_t))dlsym(library, "cuMemFree_v2");
        dlerror();
        if (dlsym(library, "cuNoSuchFunction")) return 8;
        const char *why = dlerror();
        printf("after a failed one: %s\n", why && strstr(why, "cuNoSuchFunction") ? "an error" : "none");
#else
#define init cuInit
#define retain cuDevicePrimaryCtxRetain
#define set cuCtxSetCurrent
#endif
        void *context = NULL;
        check(init(0), "cuInit");
        check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
        check(set(context), "cuCtxSetCurrent");
    }
    if (is("empty")) {
        dlerror();
        printf("no CUDA: %s\n", dlsym(RTLD_DEFAULT, "cuMemAllocAsync_ptsz") ? "there" : "none");
        printf("no CUDA: %s\n", dlerror() ? "an error" : "no error");
        return 7;
    }
    if (is("errors")) {
        void *at = (void *)1;
        printf("too large %d\n", cudaMalloc(&at, (size_t)1 << 50));
        printf("nothing %d\n", cudaMalloc(&at, 0));
        printf("null %d\n", cudaFree(NULL));
        printf("foreign %d\n", cudaFree((void *)0x1000));
        check(cudaMalloc(&at, 100), "cudaMalloc");
        printf("aligned %d\n", (int)((uintptr_t)at % 256));
        printf("free %d\n", cudaFree(at));
        printf("again %d\n", cudaFree(at));
        return 7;
    }
    if (is("threads")) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, rounds, (void *)(n / 4));
        for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    } else {
        rounds((void *)n);
    }
    if (is("fork")) {
        pid_t child = fork();
        if (child == 0) {
            void *at = NULL;
            int code = cudaMalloc(&at, 1000);
            _exit(code == 0 && cudaFree(at) == 0 ? 5 : 6);
        }
        int status;
        waitpid(child, &status, 0);
        printf("child %d\n", WEXITSTATUS(status));
    }
    printf("kept %d\n", sum);
    return 7;
}
