/* A small cudart: the runtime's allocation functions over the driver, as the real one reaches it.
 *
 * The real cudart (looked at: 13.0, shared and static) opens libcuda.so.1, asks `dlsym` for cuGetProcAddress_v2
 * and that for everything else, by base name and version. With -DBY_DLSYM it asks dlsym for each function, as
 * cudarts before 11.3 do. Compiled as a shared library and as an archive. With -DHIDDEN_DRIVER it reaches the
 * driver without asking anybody (a cudart that finds another way). It must not know the code under test. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "small_cudart.h"

enum { INITIALIZATION = 3 };
static struct {
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*synchronize)(void);
    int (*malloc)(uint64_t *, size_t);
    int (*malloc_pitch)(uint64_t *, size_t *, size_t, size_t, unsigned);
    int (*free)(uint64_t);
    int (*malloc_managed)(uint64_t *, size_t, unsigned);
    int (*host_alloc)(void **, size_t, unsigned);
    int (*free_host)(void *);
    int (*malloc_async)(uint64_t *, size_t, void *);
    int (*free_async)(uint64_t, void *);
} driver;
static void *contexts[16];
static int ready;
static __thread int device;

static void *function(void *library, const char *base, const char *exported, int version) {
    void *found = NULL;
#ifdef BY_DLSYM
    (void)base; (void)version;
    found = dlsym(library, exported);
#elif defined HIDDEN_DRIVER
    (void)base; (void)version;
    found = dlvsym(library, exported, "nothing");
    if (!found) {
        void *(*own)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        if (!own) own = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
        found = own ? own(library, exported) : NULL;
    }
#else
    (void)exported;
    int (*ask)(const char *, void **, int, uint64_t, int *) =
        (int (*)(const char *, void **, int, uint64_t, int *))dlsym(library, "cuGetProcAddress_v2");
    int status;
    if (!ask || ask(base, &found, version, 0, &status)) found = NULL;
#endif
    if (!found) {
        fprintf(stderr, "small_cudart: no %s\n", exported);
        abort();
    }
    return found;
}

static int enter(void) {
    if (!ready) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library) return INITIALIZATION;
#define FIND(place, base, exported, version) *(void **)&driver.place = function(library, base, exported, version)
        FIND(init, "cuInit", "cuInit", 2000);
        FIND(retain, "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000);
        FIND(set_current, "cuCtxSetCurrent", "cuCtxSetCurrent", 4000);
        FIND(synchronize, "cuCtxSynchronize", "cuCtxSynchronize", 2000);
        FIND(malloc, "cuMemAlloc", "cuMemAlloc_v2", 3020);
        FIND(malloc_pitch, "cuMemAllocPitch", "cuMemAllocPitch_v2", 3020);
        FIND(free, "cuMemFree", "cuMemFree_v2", 3020);
        FIND(malloc_managed, "cuMemAllocManaged", "cuMemAllocManaged", 6000);
        FIND(host_alloc, "cuMemHostAlloc", "cuMemHostAlloc", 2020);
        FIND(free_host, "cuMemFreeHost", "cuMemFreeHost", 2000);
        FIND(malloc_async, "cuMemAllocAsync", "cuMemAllocAsync", 11020);
        FIND(free_async, "cuMemFreeAsync", "cuMemFreeAsync", 11020);
        if (driver.init(0)) return INITIALIZATION;
        ready = 1;
    }
    if (!contexts[device] && driver.retain(&contexts[device], device)) return INITIALIZATION;
    return driver.set_current(contexts[device]);
}

#define ENTER int failed = enter(); if (failed) return failed;
cudaError_t cudaSetDevice(int ordinal) { device = ordinal; ENTER return 0; }
cudaError_t cudaGetDevice(int *ordinal) { *ordinal = device; return 0; }
cudaError_t cudaDeviceSynchronize(void) { ENTER return driver.synchronize(); }
cudaError_t cudaMalloc(void **at, size_t size) { ENTER return driver.malloc((uint64_t *)at, size); }
cudaError_t cudaMallocPitch(void **at, size_t *pitch, size_t width, size_t height) { ENTER return driver.malloc_pitch((uint64_t *)at, pitch, width, height, 4); }
cudaError_t cudaFree(void *at) { ENTER return driver.free((uint64_t)(uintptr_t)at); }
cudaError_t cudaMallocManaged(void **at, size_t size, unsigned flags) { ENTER return driver.malloc_managed((uint64_t *)at, size, flags); }
cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags) { ENTER return driver.host_alloc(at, size, flags); }
cudaError_t cudaMallocHost(void **at, size_t size) { return cudaHostAlloc(at, size, 0); }
cudaError_t cudaFreeHost(void *at) { ENTER return driver.free_host(at); }
cudaError_t cudaMallocAsync(void **at, size_t size, void *stream) { ENTER return driver.malloc_async((uint64_t *)at, size, stream); }
cudaError_t cudaFreeAsync(void *at, void *stream) { ENTER return driver.free_async((uint64_t)(uintptr_t)at, stream); }
