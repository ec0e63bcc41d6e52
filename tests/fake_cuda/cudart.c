/* A stand-in for the parts of libcudart that torch needs to believe in a GPU: devices, streams, events,
 * and nothing that computes. Preloaded in front of torch's own libcudart; memory comes from the stand-in
 * for libcuda beneath strandline, so `torch.empty(…, device="cuda")` works and kernels do not.
 * Compiled with CUDA's own headers, for the layout of cudaDeviceProp. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int current;
static unsigned long made = 0x1000;

static int devices(void) {
    const char *text = getenv("FAKE_CUDA_DEVICES");
    return text ? atoi(text) : 1;
}

cudaError_t cudaGetDeviceCount(int *count) { *count = devices(); return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    (void)device;
    memset(prop, 0, sizeof *prop);
    strcpy(prop->name, "Stand-in");
    prop->major = 9;
    prop->totalGlobalMem = 1ul << 30;
    prop->multiProcessorCount = 1;
    prop->warpSize = 32;
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    (void)attribute; (void)device; *value = 0; return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = 1ul << 29; *total = 1ul << 30; return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags; (void)priority;
    *stream = (cudaStream_t)(uintptr_t)__atomic_add_fetch(&made, 16, __ATOMIC_RELAXED);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { (void)stream; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { (void)stream; return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { (void)stream; (void)event; (void)flags; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    (void)stream; *status = cudaStreamCaptureStatusNone; return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { (void)mode; return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = (cudaEvent_t)(uintptr_t)__atomic_add_fetch(&made, 16, __ATOMIC_RELAXED);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { (void)event; (void)stream; return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { (void)event; (void)stream; (void)flags; return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { (void)event; return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { (void)event; return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { (void)event; return cudaSuccess; }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) { (void)event; memset(handle, 0, sizeof *handle); return cudaSuccess; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { (void)handle; return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer && !getenv("FAKE_CUDA_NO_PEERS"); return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { (void)peer; (void)flags; return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)to; (void)from; (void)n; (void)kind; (void)stream; return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t n, cudaStream_t stream) { (void)at; (void)value; (void)n; (void)stream; return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *at) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = (void *)at;
    return cudaSuccess;
}

/* Torch asks the runtime for functions of the driver. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    (void)version; (void)flags;
    char second[128];
    snprintf(second, sizeof second, "%s_v2", name);
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *function = driver ? dlsym(driver, second) : NULL;
    if (driver && !*function) *function = dlsym(driver, name);
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* The runtime initialises the driver. */
__attribute__((constructor)) static void initialise(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    int (*init)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
    if (init) init(0);
}

/* For torch's own allocator (observer mode). */
cudaError_t cudaMalloc(void **at, size_t size) {
    static uintptr_t next = 0x7d0000000000ull;
    *at = (void *)__atomic_fetch_add(&next, (size + (2ul << 20)) & ~((1ul << 20) - 1), __ATOMIC_RELAXED);
    return cudaSuccess;
}
cudaError_t cudaFree(void *at) { (void)at; return cudaSuccess; }
