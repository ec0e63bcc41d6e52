/* Kernels on the stand-in: strandline's own (cuda/guard.cu, compiled here as C), run by the host thread by thread.
 *
 * A launch is done at once, whatever its stream has queued; who must not see what it found before its stream is done
 * can be caught out by fake_cuda_queue. Launches on a stream that captures, or in the legacy stream while another
 * captures, are misuses. Faults: "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", or a kernel's name.
 * Included by libcuda.c. */
typedef unsigned long long u64;
typedef unsigned char u8;
typedef struct { u64 x, y; } ulonglong2;
static u64 rank_, threads_;
#define STRANDLINE_STAND_IN
#define KERNEL static void
#define RANK rank_
#define THREADS threads_
#define LEAST(place, value) do { if ((value) < *(place)) *(place) = (value); } while (0)
#define ADD(place, value) (*(place) += (value))
#define RAISE(place) (*(volatile u64 *)(place) = 1)
#include "../../cuda/guard.cu"

static const char *const kernels[] = {"strandline_guard_arm", "strandline_guard_retire", "strandline_guard_check"};

CUresult cuModuleLoadData(void **module, const void *image) {
    BEGIN("cuModuleLoadData", 1, 1)
    /* What the driver would compile has the functions that are asked for below. */
    for (int i = 0; i < 3; i++) if (!strstr(image, kernels[i])) FAIL(218);
    *module = (void *)kernels;
    END
}
CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
    BEGIN("cuModuleGetFunction", 1, 0)
    if (module != (void *)kernels) FAIL(misuse("cuModuleGetFunction"));
    for (int i = 0; i < 3; i++) if (strcmp(kernels[i], name) == 0) { *function = (void *)&kernels[i]; goto out; }
    FAIL(500);
    END
}
CUresult cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared,
                        CUstream name, void **arguments, void **extra) {
    BEGIN("cuLaunchKernel", 1, 0)
    const char *const *kernel = function;
    if (kernel < kernels || kernel >= kernels + 3 || x == 0 || tx == 0 || tx > 1024 || y * z * ty * tz != 1 || shared || extra)
        FAIL(misuse("cuLaunchKernel"));
    if (stream_of(name)->capturing || (name == NULL && captures)) FAIL(misuse("a launch that would be captured"));
    if ((result = enter(*kernel, 1, 0))) goto out;
    struct stream *stream = live_stream(name);
    if (!stream) FAIL(INVALID_HANDLE);
    stream->launches = stream->done < stream->queued ? stream->launches + 1 : 0;
    if (stream->launches == setting("FAKE_CUDA_QUEUE", 1000)) misuse("a launch that would wait for room in the stream's queue");
    if (!backed()) goto out;
#define WORD(n) (*(u64 *)arguments[n])
#define PLACE(type, n) ((type *)(uintptr_t)WORD(n))
    threads_ = (u64)x * tx;
    for (rank_ = 0; rank_ < threads_; rank_++)
        switch (kernel - kernels) {
        case 0: strandline_guard_arm(PLACE(u8, 0), WORD(1), WORD(2), WORD(3), WORD(4)); break;
        case 1: strandline_guard_retire(PLACE(u8, 0), WORD(1), WORD(2), WORD(3), WORD(4), WORD(5), WORD(6), PLACE(struct slot, 7), PLACE(u64, 8)); break;
        default: strandline_guard_check(PLACE(u8, 0), WORD(1), WORD(2), PLACE(struct slot, 3), PLACE(u64, 4));
        }
    END
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *at, void *host, unsigned flags) {
    BEGIN("cuMemHostGetDevicePointer_v2", 1, 0)
    if (flags) FAIL(INVALID_VALUE);
    *at = (CUdeviceptr)(uintptr_t)host;
    END
}
CUresult cuMemsetD8_v2(CUdeviceptr at, unsigned char value, size_t size) {
    BEGIN("cuMemsetD8_v2", 1, 1)
    if (!backed()) FAIL(NOT_SUPPORTED);
    memset((void *)(uintptr_t)at, value, size);
    END
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    BEGIN("cuMemcpyDtoH_v2", 1, 1)
    if (!backed()) FAIL(NOT_SUPPORTED);
    memcpy(to, (const void *)(uintptr_t)from, size);
    END
}
