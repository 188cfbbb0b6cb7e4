/* A CUDA runtime and driver without a device. torch finds one GPU, whose calls succeed and do nothing. Calls that need
 * its memory fail. Calls that fail, and calls that would make the host wait, are reported to `report` if it is set.
 *
 * This library is built as libcuda.so.1 and preloaded. So its functions of the runtime come before those of torch's
 * library, and its functions of the driver are found because a library with the driver's name is already loaded. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN __attribute__((visibility("default")))

static void (*report)(const char *);
SHOWN void simulated_report(void (*to)(const char *)) { report = to; }

static cudaError_t told(const char *call, cudaError_t result) {
  if (report) report(call);
  return result;
}

/* Define a call that does nothing, that would make the host wait, that fails, or that returns a value. */
#define DOES_NOTHING(call, ...) \
  SHOWN cudaError_t call(__VA_ARGS__) { return cudaSuccess; }
#define WAITS(call, ...) \
  SHOWN cudaError_t call(__VA_ARGS__) { return told(#call, cudaSuccess); }
#define FAILS(call, ...) \
  SHOWN cudaError_t call(__VA_ARGS__) { return told(#call, cudaErrorMemoryAllocation); }
#define GIVES(call, type, value, ...) \
  SHOWN cudaError_t call(type *out, ##__VA_ARGS__) { \
    *out = value; \
    return cudaSuccess; \
  }

/* The device, which looks like an H100. */
GIVES(cudaGetDeviceCount, int, 1)
GIVES(cudaGetDevice, int, 0)
GIVES(cudaDriverGetVersion, int, CUDART_VERSION)
GIVES(cudaRuntimeGetVersion, int, CUDART_VERSION)
GIVES(cudaDeviceCanAccessPeer, int, 0, int device, int peer)
DOES_NOTHING(cudaSetDevice, int device)
DOES_NOTHING(cudaDeviceEnablePeerAccess, int peer, unsigned flags)

SHOWN cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  struct cudaDeviceProp gpu = {
      .name = "simulated GPU", .totalGlobalMem = (size_t)80 << 30, .major = 9, .minor = 0, .multiProcessorCount = 132,
      .warpSize = 32, .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048,
      .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {INT32_MAX, 65535, 65535}, .regsPerBlock = 65536,
      .regsPerMultiprocessor = 65536, .sharedMemPerBlock = 48 << 10, .sharedMemPerBlockOptin = 227 << 10,
      .sharedMemPerMultiprocessor = 228 << 10, .l2CacheSize = 50 << 20};
  *out = gpu;
  return cudaSuccess;
}

SHOWN cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr which, int device) {
  *out = which == cudaDevAttrComputeCapabilityMajor ? 9 : which == cudaDevAttrMultiProcessorCount ? 132 : 0;
  return cudaSuccess;
}

SHOWN cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = *total_bytes = (size_t)80 << 30;
  return cudaSuccess;
}

SHOWN cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

/* Streams and events are numbers. */
static uintptr_t handles;
#define NEW_HANDLE (void *)(handles += 64)
GIVES(cudaStreamCreateWithPriority, cudaStream_t, NEW_HANDLE, unsigned flags, int priority)
GIVES(cudaStreamCreateWithFlags, cudaStream_t, NEW_HANDLE, unsigned flags)
GIVES(cudaEventCreateWithFlags, cudaEvent_t, NEW_HANDLE, unsigned flags)
GIVES(cudaEventCreate, cudaEvent_t, NEW_HANDLE)
GIVES(cudaEventElapsedTime, float, 1.0f, cudaEvent_t start, cudaEvent_t end)
GIVES(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode, cudaStreamCaptureModeRelaxed)
SHOWN cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
  *out = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
SHOWN cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) {
  *out = 0;
  return cudaSuccess;
}
SHOWN cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *out, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *num_nodes) {
  *out = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
DOES_NOTHING(cudaStreamDestroy, cudaStream_t stream)
DOES_NOTHING(cudaStreamQuery, cudaStream_t stream)
DOES_NOTHING(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
DOES_NOTHING(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
DOES_NOTHING(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
DOES_NOTHING(cudaEventQuery, cudaEvent_t event)
DOES_NOTHING(cudaEventDestroy, cudaEvent_t event)
DOES_NOTHING(cudaGetLastError, void)
DOES_NOTHING(cudaPeekAtLastError, void)
WAITS(cudaDeviceSynchronize, void)
WAITS(cudaStreamSynchronize, cudaStream_t stream)
WAITS(cudaEventSynchronize, cudaEvent_t event)

/* Memory, and calls that use it. */
FAILS(cudaMalloc, void **out, size_t bytes)
FAILS(cudaMallocAsync, void **out, size_t bytes, cudaStream_t stream)
FAILS(cudaHostAlloc, void **out, size_t bytes, unsigned flags)
DOES_NOTHING(cudaFree, void *pointer)
DOES_NOTHING(cudaFreeAsync, void *pointer, cudaStream_t stream)
DOES_NOTHING(cudaFreeHost, void *pointer)
FAILS(cudaMemcpy, void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
FAILS(cudaMemcpyAsync, void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
FAILS(cudaMemset, void *to, int value, size_t bytes)
FAILS(cudaMemsetAsync, void *to, int value, size_t bytes, cudaStream_t stream)
FAILS(cudaLaunchKernel, const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
SHOWN cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
  memset(out, 0, sizeof *out);  /* host memory that CUDA does not know */
  return cudaSuccess;
}

/* The driver. torch asks it whether a device is in use. All functions that are not defined here are "not supported". */
SHOWN int cuInit(unsigned flags) { return 0; }
SHOWN int cuDriverGetVersion(int *out) { return *out = CUDART_VERSION, 0; }
SHOWN int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
SHOWN int cuGetErrorString(int error, const char **out) { return *out = "the GPU is simulated", 0; }
static int not_supported(void) { return 801; }
SHOWN cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **out, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  void *known = dlsym(RTLD_DEFAULT, name);
  *out = known ? known : (void *)not_supported;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
