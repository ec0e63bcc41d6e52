/* The part of cuda_runtime_api.h that small_cudart.c offers and program.c uses, and of cuda.h. */
#include <stddef.h>
#include <stdint.h>

typedef int cudaError_t;
cudaError_t cudaSetDevice(int ordinal);
cudaError_t cudaGetDevice(int *ordinal);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaMalloc(void **at, size_t size);
cudaError_t cudaMallocPitch(void **at, size_t *pitch, size_t width, size_t height);
cudaError_t cudaFree(void *at);
cudaError_t cudaMallocManaged(void **at, size_t size, unsigned flags);
cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags);
cudaError_t cudaMallocHost(void **at, size_t size);
cudaError_t cudaFreeHost(void *at);
cudaError_t cudaMallocAsync(void **at, size_t size, void *stream);
cudaError_t cudaFreeAsync(void *at, void *stream);

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(uint64_t *at, size_t size);
int cuMemFree_v2(uint64_t at);
