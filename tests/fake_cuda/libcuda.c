/* A stand-in for libcuda.so.1: the driver's bookkeeping without a device.
 *
 * It keeps contexts, address ranges, handles, mappings, events and streams as the driver does, answers
 * with the driver's codes, and counts every misuse that the real driver punishes later or not at all
 * (leaks, partial unmaps, releases of mapped handles, calls that invalidate a capture). It must not know
 * the code under test.
 *
 * Environment: FAKE_CUDA_DEVICES (1), FAKE_CUDA_MEMORY bytes per device (1 GiB), FAKE_CUDA_FAULT
 * "function:k:code" (the k-th call, from 1, fails; k 0: every call), FAKE_CUDA_NO_VMM (attribute says no),
 * FAKE_CUDA_NO_FD (handles that can be exported are refused), FAKE_CUDA_NO_PEERS, FAKE_CUDA_BACKED (there is memory
 * behind the addresses; see memory.h).
 * A launch on a busy stream behind FAKE_CUDA_QUEUE (1,000) others, where the driver would wait, is a misuse.
 * Compile with -DOLD_DRIVER for a driver that lacks the virtual-memory symbols. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct event *CUevent;
typedef void *CUstream;
typedef struct { uint32_t type; int id; } Location;
typedef struct {
    uint32_t type, handle_types;
    Location location;
    void *win32;
    struct { uint8_t compression, rdma; uint16_t usage; uint8_t reserved[4]; } flags;
} Prop;
typedef struct { Location location; uint32_t flags; } Access;

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEINITIALIZED = 4, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, PEER_ALREADY_ENABLED = 704,
       NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { PAGE = 2 << 20, DEVICES = 16, STREAMS = 64, THINGS = 65536, FUNCTIONS = 192, DEPTH = 16 };

struct context { int device, retained; };
struct event { CUcontext context; int live, recorded, all; CUstream stream; uint64_t until, untils[STREAMS]; };
struct range { CUdeviceptr at; size_t size; int live; };
struct handle { size_t size, place; int device, live, mapped, exportable, imported; };
struct mapping { CUdeviceptr at; size_t size; uint64_t handle; int live; uint32_t access; };
struct stream { CUstream name; uint64_t queued, done; int capturing, launches, destroyed; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct context contexts[DEVICES];
static struct event events[THINGS];
static struct range ranges[THINGS], plain[THINGS], pinned[THINGS];
static struct handle handles[THINGS];
static struct mapping mappings[THINGS];
static struct stream streams[STREAMS];
static size_t used[DEVICES];
static int initialised, gone, misuses, captures, n_events, n_ranges, n_plain, n_pinned, n_handles, n_mappings, n_streams;
static CUdeviceptr next_address = 0x7e0000000000ull;
static struct { const char *name; int calls, fault_at, fault_code; } functions[FUNCTIONS];
static __thread CUcontext stack[DEPTH];
static __thread int depth;
static __thread uint32_t capture_mode;

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int misuse(const char *what) {
    misuses++;
    if (getenv("FAKE_CUDA_VERBOSE")) fprintf(stderr, "fake_cuda: misuse: %s\n", what);
    return INVALID_VALUE;
}

static int slot(const char *name) {
    for (int i = 0; i < FUNCTIONS; i++) {
        if (functions[i].name == NULL) {
            functions[i].name = strdup(name); /* the caller may be short-lived */
            const char *fault = getenv("FAKE_CUDA_FAULT");
            size_t n = strlen(name);
            functions[i].fault_at = -1;
            if (fault && strncmp(fault, name, n) == 0 && fault[n] == ':')
                sscanf(fault + n + 1, "%d:%d", &functions[i].fault_at, &functions[i].fault_code);
            return i;
        }
        if (strcmp(functions[i].name, name) == 0) return i;
    }
    abort();
}

/* Counts the call; answers a fault's code if one is due. */
static int enter(const char *name, int needs_context, int unsafe_in_capture) {
    int i = slot(name);
    functions[i].calls++;
    if (functions[i].fault_at == 0 || functions[i].fault_at == functions[i].calls) return functions[i].fault_code;
    if (gone) return DEINITIALIZED;
    if (!initialised && strcmp(name, "cuInit") != 0) return NOT_INITIALIZED;
    if (needs_context && depth == 0) return INVALID_CONTEXT;
    if (unsafe_in_capture && captures && capture_mode != 2) {
        misuse("a call that invalidates a capture");
        return CAPTURE_UNSUPPORTED;
    }
    return 0;
}

#define BEGIN(name, context, unsafe_) \
    pthread_mutex_lock(&lock); \
    CUresult result = enter(name, context, unsafe_); \
    if (result) goto out;
#define END out: pthread_mutex_unlock(&lock); return result;
#define FAIL(code) do { result = (code); goto out; } while (0)

static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }
static int device_count(void) { return (int)setting("FAKE_CUDA_DEVICES", 1); }
static size_t capacity(void) { return (size_t)setting("FAKE_CUDA_MEMORY", 1l << 30); }

static struct stream *stream_of(CUstream name) {
    for (int i = 0; i < n_streams; i++) if (streams[i].name == name) return &streams[i];
    if (n_streams == STREAMS) abort();
    streams[n_streams] = (struct stream){.name = name};
    return &streams[n_streams++];
}

/* The same, for a call that needs the stream to be there still. */
static struct stream *live_stream(CUstream name) {
    struct stream *stream = stream_of(name);
    if (stream->destroyed) misuse("a destroyed stream");
    return stream->destroyed ? NULL : stream;
}

#include "memory.h"

/* What tests ask and tell. */
int fake_cuda_calls(const char *name) { pthread_mutex_lock(&lock); int n = functions[slot(name)].calls; pthread_mutex_unlock(&lock); return n; }
int fake_cuda_misuses(void) { return misuses; }
void fake_cuda_fault(const char *name, int k, int code) {
    pthread_mutex_lock(&lock);
    int i = slot(name);
    functions[i].fault_at = k > 0 ? functions[i].calls + k : k;
    functions[i].fault_code = code;
    pthread_mutex_unlock(&lock);
}
void fake_cuda_queue(CUstream name) { pthread_mutex_lock(&lock); stream_of(name)->queued++; pthread_mutex_unlock(&lock); }
void fake_cuda_complete(CUstream name) { pthread_mutex_lock(&lock); struct stream *s = stream_of(name); s->done = s->queued; pthread_mutex_unlock(&lock); }
void fake_cuda_capture(CUstream name, int on) { pthread_mutex_lock(&lock); struct stream *s = stream_of(name); captures += on - s->capturing; s->capturing = on; pthread_mutex_unlock(&lock); }
CUresult cuStreamDestroy_v2(CUstream name) { pthread_mutex_lock(&lock); stream_of(name)->destroyed = 1; pthread_mutex_unlock(&lock); return 0; }
void fake_cuda_shut_down(void) { gone = 1; }
int fake_cuda_context_depth(void) { return depth; }
unsigned fake_cuda_capture_mode(void) { return capture_mode; }
long fake_cuda_live(const char *what) {
    long n = 0;
    pthread_mutex_lock(&lock);
    if (strcmp(what, "ranges") == 0) for (int i = 0; i < n_ranges; i++) n += ranges[i].live;
    if (strcmp(what, "pinned") == 0) for (int i = 0; i < n_pinned; i++) n += pinned[i].live;
    if (strcmp(what, "plain") == 0) for (int i = 0; i < n_plain; i++) n += plain[i].live;
    if (strcmp(what, "handles") == 0) for (int i = 0; i < n_handles; i++) n += handles[i].live;
    if (strcmp(what, "mappings") == 0) for (int i = 0; i < n_mappings; i++) n += mappings[i].live;
    if (strcmp(what, "events") == 0) for (int i = 0; i < n_events; i++) n += events[i].live;
    if (strcmp(what, "bytes") == 0) for (int i = 0; i < DEVICES; i++) n += (long)used[i];
    pthread_mutex_unlock(&lock);
    return n;
}
/* The devices (a bit each) that may reach an address; 0 where nothing is mapped. */
unsigned fake_cuda_access(CUdeviceptr at) {
    unsigned access = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_mappings; i++)
        if (mappings[i].live && at >= mappings[i].at && at < mappings[i].at + mappings[i].size) access = mappings[i].access;
    pthread_mutex_unlock(&lock);
    return access;
}

/* The driver. */
CUresult cuInit(unsigned flags) { BEGIN("cuInit", 0, 0) if (flags) FAIL(INVALID_VALUE); initialised = 1; END }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuDeviceGetCount(int *count) { BEGIN("cuDeviceGetCount", 0, 0) *count = device_count(); END }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    BEGIN("cuDeviceGet", 0, 0)
    if (ordinal < 0 || ordinal >= device_count()) FAIL(INVALID_DEVICE);
    *device = ordinal;
    END
}
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    BEGIN("cuDeviceGetAttribute", 0, 0)
    (void)device;
    *value = attribute == 102 ? !getenv("FAKE_CUDA_NO_VMM") : attribute == 103 || attribute == 110;
    END
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    BEGIN("cuDevicePrimaryCtxRetain", 0, 0)
    contexts[device].device = device;
    contexts[device].retained++;
    *context = &contexts[device];
    END
}
CUresult cuCtxGetCurrent(CUcontext *context) { BEGIN("cuCtxGetCurrent", 0, 0) *context = current(); END }
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    BEGIN("cuCtxPushCurrent_v2", 0, 0)
    if (!context || depth == DEPTH) FAIL(misuse("push"));
    stack[depth++] = context;
    END
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    BEGIN("cuCtxPopCurrent_v2", 1, 0)
    *context = stack[--depth];
    END
}
CUresult cuCtxSynchronize(void) {
    BEGIN("cuCtxSynchronize", 1, 1)
    for (int i = 0; i < n_streams; i++) streams[i].done = streams[i].queued;
    END
}
CUresult cuMemGetInfo_v2(size_t *free_, size_t *total) {
    BEGIN("cuMemGetInfo_v2", 1, 0)
    *total = capacity();
    *free_ = *total - used[current()->device];
    END
}
CUresult cuGetErrorName(CUresult code, const char **name) {
    static const char *const out_of_memory = "CUDA_ERROR_OUT_OF_MEMORY", *const invalid = "CUDA_ERROR_INVALID_VALUE";
    *name = code == OUT_OF_MEMORY ? out_of_memory : code == INVALID_VALUE ? invalid : NULL;
    return *name ? 0 : INVALID_VALUE;
}
CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t size) {
    BEGIN("cuMemAlloc_v2", 1, 1)
    int device = current()->device;
    if (size == 0) FAIL(misuse("cuMemAlloc of nothing"));
    if (used[device] + size > capacity()) FAIL(OUT_OF_MEMORY);
    used[device] += size;
    *at = addresses(size, 1);
    plain[n_plain++] = (struct range){*at, size, 1};
    END
}
CUresult cuMemFree_v2(CUdeviceptr at) {
    BEGIN("cuMemFree_v2", 1, 1)
    if (at == 0) goto out;
    for (int i = n_plain - 1; i >= 0; i--)
        if (plain[i].live && plain[i].at == at) { plain[i].live = 0; used[current()->device] -= plain[i].size; goto out; }
    FAIL(misuse("cuMemFree of an address that cuMemAlloc did not give"));
    END
}

/* For programs that allocate by themselves. Freed slots are used again, so that long programs fit. */
static CUresult plain_block(CUdeviceptr *at, size_t size) {
    int device = current()->device, slot = 0;
    if (size == 0) return INVALID_VALUE;
    if (used[device] + size > capacity()) return OUT_OF_MEMORY;
    while (slot < n_plain && plain[slot].live) slot++;
    if (slot == THINGS) return OUT_OF_MEMORY;
    if (slot == n_plain) n_plain++;
    used[device] += size;
    *at = addresses(size, 1);
    plain[slot] = (struct range){*at, size, 1};
    return 0;
}
CUresult cuCtxGetDevice(CUdevice *device) { BEGIN("cuCtxGetDevice", 1, 0) *device = current()->device; END }
CUresult cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height, unsigned element) {
    BEGIN("cuMemAllocPitch_v2", 1, 1)
    if (element != 4 && element != 8 && element != 16) FAIL(INVALID_VALUE);
    *pitch = (width + 511) / 512 * 512;
    result = plain_block(at, *pitch * height);
    END
}
CUresult cuMemAllocManaged(CUdeviceptr *at, size_t size, unsigned flags) {
    BEGIN("cuMemAllocManaged", 1, 1)
    if (flags != 1 && flags != 2) FAIL(INVALID_VALUE);
    result = plain_block(at, size);
    END
}
#define IN_STREAM_ORDER(malloc_, pool_, free_) \
    CUresult malloc_(CUdeviceptr *at, size_t size, CUstream stream) { BEGIN(#malloc_, 1, 0) (void)stream; result = plain_block(at, size); END } \
    CUresult pool_(CUdeviceptr *at, size_t size, void *pool, CUstream stream) { BEGIN(#pool_, 1, 0) (void)stream; (void)pool; result = plain_block(at, size); END } \
    CUresult free_(CUdeviceptr at, CUstream stream) { (void)stream; return cuMemFree_v2(at); }
IN_STREAM_ORDER(cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync)
IN_STREAM_ORDER(cuMemAllocAsync_ptsz, cuMemAllocFromPoolAsync_ptsz, cuMemFreeAsync_ptsz)
CUresult cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    BEGIN("cuMemHostAlloc", 1, 1)
    (void)flags;
    if (size == 0 || n_pinned == THINGS) FAIL(INVALID_VALUE);
    if (!(*at = aligned_alloc(4096, (size + 4095) / 4096 * 4096))) FAIL(OUT_OF_MEMORY);
    pinned[n_pinned++] = (struct range){(CUdeviceptr)(uintptr_t)*at, size, 1};
    END
}
CUresult cuMemAllocHost_v2(void **at, size_t size) { return cuMemHostAlloc(at, size, 0); }
CUresult cuMemFreeHost(void *at) {
    BEGIN("cuMemFreeHost", 1, 1)
    for (int i = n_pinned - 1; i >= 0; i--)
        if (pinned[i].live && pinned[i].at == (CUdeviceptr)(uintptr_t)at) { pinned[i].live = 0; free(at); goto out; }
    FAIL(misuse("cuMemFreeHost of memory that is not pinned"));
    END
}
CUresult cuEventCreate(CUevent *event, unsigned flags) {
    BEGIN("cuEventCreate", 1, 0)
    (void)flags;
    if (n_events == THINGS) FAIL(OUT_OF_MEMORY);
    events[n_events] = (struct event){.context = current(), .live = 1};
    *event = &events[n_events++];
    END
}
CUresult cuEventDestroy_v2(CUevent event) {
    BEGIN("cuEventDestroy_v2", 0, 0)
    if (!event->live) FAIL(misuse("an event destroyed twice"));
    event->live = 0;
    END
}
CUresult cuEventRecord(CUevent event, CUstream name) {
    BEGIN("cuEventRecord", 1, 0)
    if (!event->live || event->context != current()) FAIL(misuse("an event recorded in another context"));
    struct stream *stream = live_stream(name);
    if (!stream) FAIL(INVALID_HANDLE);
    event->recorded = 1;
    event->all = 0;
    event->stream = name;
    event->until = stream->queued;
    END
}
CUresult cuCtxRecordEvent(CUcontext context, CUevent event) {
    BEGIN("cuCtxRecordEvent", 1, 0)
    if (!event->live || event->context != context) FAIL(misuse("an event recorded in another context"));
    if (captures) FAIL(CAPTURE_UNSUPPORTED);
    event->recorded = event->all = 1;
    for (int i = 0; i < STREAMS; i++) event->untils[i] = i < n_streams ? streams[i].queued : 0;
    END
}
static int is_done(struct event *event) {
    if (!event->recorded) return 1;
    if (!event->all) return stream_of(event->stream)->done >= event->until;
    for (int i = 0; i < n_streams; i++) if (streams[i].done < event->untils[i]) return 0;
    return 1;
}
CUresult cuEventQuery(CUevent event) {
    BEGIN("cuEventQuery", 0, 1)
    if (!event->live) FAIL(misuse("a destroyed event queried"));
    if (!is_done(event)) FAIL(NOT_READY);
    END
}
CUresult cuEventSynchronize(CUevent event) {
    BEGIN("cuEventSynchronize", 0, 1)
    if (!event->live) FAIL(misuse("a destroyed event waited for"));
    for (int i = 0; event->all && i < n_streams; i++)
        if (streams[i].done < event->untils[i]) streams[i].done = event->untils[i];
    if (event->all) goto out;
    struct stream *stream = stream_of(event->stream);
    if (stream->done < event->until) stream->done = event->until;
    END
}
CUresult cuStreamWaitEvent(CUstream name, CUevent event, unsigned flags) {
    BEGIN("cuStreamWaitEvent", 1, 0)
    (void)name;
    if (flags || !event->live) FAIL(misuse("cuStreamWaitEvent"));
    END
}
CUresult cuStreamSynchronize(CUstream name) {
    BEGIN("cuStreamSynchronize", 1, 1)
    struct stream *stream = stream_of(name);
    stream->done = stream->queued;
    END
}
CUresult cuStreamIsCapturing(CUstream name, unsigned *status) {
    BEGIN("cuStreamIsCapturing", 1, 0)
    struct stream *stream = live_stream(name);
    if (!stream) FAIL(INVALID_HANDLE);
    *status = (unsigned)stream->capturing;
    END
}
CUresult cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    BEGIN("cuThreadExchangeStreamCaptureMode", 0, 0)
    unsigned old = capture_mode;
    capture_mode = *mode;
    *mode = old;
    END
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    BEGIN("cuDeviceCanAccessPeer", 0, 0)
    *can = device != peer && !getenv("FAKE_CUDA_NO_PEERS");
    END
}
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    BEGIN("cuCtxEnablePeerAccess", 1, 0)
    if (flags || peer == current()) FAIL(INVALID_VALUE);
    END
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t n, CUstream stream) {
    BEGIN("cuMemcpyPeerAsync", 1, 0)
    (void)to; (void)from; (void)n; (void)stream;
    if (to_context == from_context) FAIL(misuse("a copy between a device and itself"));
    END
}

/* Torch looks these up when it starts; nothing here computes, so none is called for what the tests do. */
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    BEGIN("cuDevicePrimaryCtxGetState", 0, 0)
    *flags = 0;
    *active = contexts[device].retained > 0;
    END
}
CUresult cuCtxSetCurrent(CUcontext context) {
    BEGIN("cuCtxSetCurrent", 0, 0)
    if (depth == 0) depth = 1;
    stack[depth - 1] = context;
    END
}
CUresult cuGetErrorString(CUresult code, const char **text) { return cuGetErrorName(code, text); }
#define ABSENT(name) CUresult name(void) { return NOT_SUPPORTED; }
ABSENT(cuFuncGetAttribute) ABSENT(cuFuncSetAttribute) ABSENT(cuFuncSetCacheConfig) ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLinkAddData_v2) ABSENT(cuLinkComplete) ABSENT(cuLinkCreate_v2) ABSENT(cuModuleLoad) ABSENT(cuModuleLoadDataEx)
ABSENT(cuModuleUnload) ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor) ABSENT(cuPointerGetAttribute)
ABSENT(cuTensorMapEncodeTiled)

#ifdef NO_KERNELS
ABSENT(cuLaunchKernel) ABSENT(cuModuleGetFunction)
#else
#include "kernels.h"
#endif

/* Functions by name and version, as the driver gives them: the newest that the caller's version has. */
#include <dlfcn.h>
CUresult cuGetProcAddress_v2(const char *symbol, void **place, int version, uint64_t flags, int *status) {
    char name[128];
    void *self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    if (!self && getenv("STRANDLINE_LIBCUDA")) self = dlopen(getenv("STRANDLINE_LIBCUDA"), RTLD_NOLOAD | RTLD_LAZY);
    *place = NULL;
    const char *endings[] = {flags & 2 ? "_ptsz" : "_v2", strcmp(symbol, "cuGetProcAddress") ? "_v2" : "", ""};
    for (int i = 0; i < 3 && !*place; i++) {
        if (version < 12000 && !strcmp(symbol, "cuGetProcAddress") && !strcmp(endings[i], "_v2")) continue;
        snprintf(name, sizeof name, "%s%s", symbol, endings[i]);
        *place = dlsym(self, name);
    }
    if (status) *status = *place ? 0 : 1;
    return *place ? 0 : 500;
}
CUresult cuGetProcAddress(const char *symbol, void **place, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, place, version, flags, NULL);
}

#ifndef OLD_DRIVER
CUresult cuMemGetAllocationGranularity(size_t *size, const Prop *prop, unsigned option) {
    BEGIN("cuMemGetAllocationGranularity", 0, 0)
    (void)prop; (void)option;
    *size = PAGE;
    END
}
CUresult cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    BEGIN("cuMemAddressReserve", 0, 0)
    (void)alignment; (void)wish;
    if (size == 0 || size % PAGE || flags) FAIL(misuse("cuMemAddressReserve"));
    *at = addresses(size, 0);
    ranges[n_ranges++] = (struct range){*at, size, 1};
    END
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    BEGIN("cuMemAddressFree", 0, 0)
    for (int i = 0; i < n_mappings; i++)
        if (mappings[i].live && mappings[i].at >= at && mappings[i].at < at + size) FAIL(misuse("addresses freed under a mapping"));
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].live && ranges[i].at == at && ranges[i].size == size) { ranges[i].live = 0; goto out; }
    FAIL(misuse("cuMemAddressFree of another range than was reserved"));
    END
}
CUresult cuMemCreate(uint64_t *handle, size_t size, const Prop *prop, unsigned long long flags) {
    BEGIN("cuMemCreate", 0, 1)
    if (size == 0 || size % PAGE || flags || prop->type != 1 || prop->location.type != 1) FAIL(misuse("cuMemCreate"));
    if (prop->handle_types && getenv("FAKE_CUDA_NO_FD")) FAIL(NOT_SUPPORTED);
    int device = prop->location.id;
    if (used[device] + size > capacity()) FAIL(OUT_OF_MEMORY);
    used[device] += size;
    handles[n_handles] = (struct handle){.size = size, .device = device, .live = 1, .exportable = prop->handle_types == 1};
    back(&handles[n_handles]);
    *handle = (uint64_t)++n_handles;
    END
}
CUresult cuMemRelease(uint64_t handle) {
    BEGIN("cuMemRelease", 0, 1)
    if (handle == 0 || handle > (uint64_t)n_handles || !handles[handle - 1].live) FAIL(misuse("a handle released twice"));
    struct handle *it = &handles[handle - 1];
    if (it->mapped) misuse("a mapped handle released");
    it->live = 0;
    if (!it->imported) used[it->device] -= it->size;
    END
}
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    BEGIN("cuMemMap", 0, 1)
    if (handle == 0 || handle > (uint64_t)n_handles || !handles[handle - 1].live) FAIL(misuse("a dead handle mapped"));
    if (offset || flags || size != handles[handle - 1].size || at % PAGE) FAIL(misuse("a handle mapped in part"));
    int inside = 0;
    for (int i = 0; i < n_ranges; i++) inside |= ranges[i].live && at >= ranges[i].at && at + size <= ranges[i].at + ranges[i].size;
    if (!inside) FAIL(misuse("a mapping outside every reserved range"));
    for (int i = 0; i < n_mappings; i++)
        if (mappings[i].live && at < mappings[i].at + mappings[i].size && mappings[i].at < at + size) FAIL(misuse("a mapping over another"));
    handles[handle - 1].mapped++;
    int i = 0;
    while (i < n_mappings && mappings[i].live) i++;
    mappings[i] = (struct mapping){at, size, handle, 1, 0};
    show(at, &handles[handle - 1]);
    if (i == n_mappings) n_mappings++;
    END
}
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    BEGIN("cuMemUnmap", 0, 1)
    for (int i = 0; i < n_mappings; i++)
        if (mappings[i].live && mappings[i].at == at && mappings[i].size == size) {
            mappings[i].live = 0;
            hide(at, size);
            handles[mappings[i].handle - 1].mapped--;
            goto out;
        }
    FAIL(misuse("cuMemUnmap of another range than was mapped"));
    END
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const Access *access, size_t count) {
    BEGIN("cuMemSetAccess", 0, 1)
    for (int i = 0; i < n_mappings; i++)
        if (mappings[i].live && mappings[i].at == at && mappings[i].size == size) {
            for (size_t k = 0; k < count; k++) {
                if (access[k].location.type != 1 || access[k].flags != 3) FAIL(misuse("cuMemSetAccess"));
                mappings[i].access |= 1u << access[k].location.id;
            }
            goto out;
        }
    FAIL(misuse("cuMemSetAccess where nothing is mapped"));
    END
}
/* The descriptor is a small memory file that holds the piece's size and device. */
CUresult cuMemExportToShareableHandle(void *file, uint64_t handle, unsigned type, unsigned long long flags) {
    BEGIN("cuMemExportToShareableHandle", 0, 0)
    if (type != 1 || flags || !handles[handle - 1].live || !handles[handle - 1].exportable) FAIL(INVALID_VALUE);
    long words[2] = {(long)handles[handle - 1].size, handles[handle - 1].device};
    int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (fd < 0 || write(fd, words, sizeof words) != sizeof words) FAIL(NOT_SUPPORTED);
    *(int *)file = fd;
    END
}
CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *file, unsigned type) {
    BEGIN("cuMemImportFromShareableHandle", 0, 0)
    long words[2];
    if (type != 1 || pread((int)(intptr_t)file, words, sizeof words, 0) != sizeof words) FAIL(INVALID_HANDLE);
    handles[n_handles] = (struct handle){.size = (size_t)words[0], .device = (int)words[1], .live = 1, .imported = 1};
    *handle = (uint64_t)++n_handles;
    END
}
#endif
