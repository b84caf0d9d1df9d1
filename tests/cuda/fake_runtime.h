/* tests/cuda/fake_runtime.h - the CUDA runtime without a card: device memory is the host's, kernels do nothing, and any call can be
 * made to fail. The CUDA backend's host side runs on it as it is; what it computes is nothing. It refuses what a card refuses of
 * shared memory, and counts work that may overtake what it needs: that of a stream which does not wait for the default stream.
 *
 * A program that includes this once is linked without the CUDA runtime. A call of the backend that is missing here shows as an
 * undefined symbol. Owner: the program. Thread: one. */
#ifndef FAKE_RUNTIME_H
#define FAKE_RUNTIME_H

#include <cuda_runtime_api.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAKE_KERNELS      512
#define FAKE_SHARED_FIRST ((size_t)48 << 10) /* what a block may have without asking */

static struct fake {
    int driver, devices, major, minor;
    cudaError_t devices_error; /* of asking how many there are */
    size_t memory, used;
    size_t shared;       /* bytes of shared memory that a block may have */
    long calls, fail_at; /* calls since the start; the one that fails, 0 = none */
    long launches;       /* of kernels */
    cudaError_t fail_with;
    bool dead;               /* after a failure that no call survives: all of them fail alike */
    long held;               /* memory, streams, events, graphs that were taken and not given back */
    const char *failed_call; /* the last one made to fail */
    bool under_way;          /* work of the default stream that nobody has waited for */
    long overtaken;          /* how often another stream was given work meanwhile */
    cudaStream_t pushed;     /* of a launch in the short form */
    struct {
        const void *kernel;
        size_t shared;
    } asked[FAKE_KERNELS]; /* more shared memory than every kernel may have */
} fake;

static void fake_reset(void)
{
    fake = (struct fake){.driver = 13000, .devices = 1, .major = 9, .memory = (size_t)1 << 30, .shared = 227 << 10};
}

/* Every call goes through here first. */
static cudaError_t fake_call(const char *name)
{
    fake.calls++;
    if (fake.dead)
        return fake.fail_with;
    if (fake.calls != fake.fail_at)
        return cudaSuccess;
    fake.failed_call = name;
    fake.dead = fake.fail_with != cudaErrorMemoryAllocation;
    return fake.fail_with;
}

#define FAKE_CALL                                                                                                      \
    do {                                                                                                               \
        cudaError_t e_ = fake_call(__func__);                                                                          \
        if (e_ != cudaSuccess)                                                                                         \
            return e_;                                                                                                 \
    } while (0)

/* ---- the device ---- */

cudaError_t cudaDriverGetVersion(int *v)
{
    FAKE_CALL;
    *v = fake.driver;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *n)
{
    FAKE_CALL;
    *n = fake.devices;
    return fake.devices_error;
}
cudaError_t cudaGetDevice(int *d)
{
    FAKE_CALL;
    *d = 0;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d)
{
    (void)d;
    FAKE_CALL;
    memset(p, 0, sizeof(*p));
    snprintf(p->name, sizeof(p->name), "Card of Paper");
    p->major = fake.major;
    p->minor = fake.minor;
    p->multiProcessorCount = 132;
    p->sharedMemPerBlockOptin = fake.shared;
    p->totalGlobalMem = fake.memory;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int d)
{
    (void)d;
    FAKE_CALL;
    *value = what == cudaDevAttrComputeCapabilityMajor         ? fake.major
             : what == cudaDevAttrComputeCapabilityMinor       ? fake.minor
             : what == cudaDevAttrMaxSharedMemoryPerBlockOptin ? (int)fake.shared
             : what == cudaDevAttrMultiProcessorCount          ? 132
                                                               : 1;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *bytes_free, size_t *bytes_total)
{
    FAKE_CALL;
    *bytes_free = fake.memory - fake.used;
    *bytes_total = fake.memory;
    return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorNoDevice ? "no device" : "made to fail";
}
cudaError_t cudaGetLastError(void) { return fake.dead ? fake.fail_with : cudaSuccess; }

/* ---- memory: the size is kept in front ---- */

static cudaError_t fake_take(void **p, size_t bytes, bool device)
{
    size_t *at;
    *p = NULL;
    if (device && bytes > fake.memory - fake.used)
        return cudaErrorMemoryAllocation;
    at = calloc(1, bytes + 256);
    if (!at)
        return cudaErrorMemoryAllocation;
    at[0] = device ? bytes : 0;
    fake.used += at[0];
    fake.held++;
    *p = (uint8_t *)at + 256;
    return cudaSuccess;
}
static cudaError_t fake_give(void *p)
{
    size_t *at = (size_t *)(void *)((uint8_t *)p - 256);
    if (!p)
        return cudaSuccess;
    fake.used -= at[0];
    fake.held--;
    free(at);
    return fake.dead ? fake.fail_with : cudaSuccess;
}
cudaError_t cudaMalloc(void **p, size_t bytes)
{
    FAKE_CALL;
    return fake_take(p, bytes, true);
}
cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    FAKE_CALL;
    return fake_take(p, bytes, false);
}
cudaError_t cudaFree(void *p) { return fake_give(p); }
cudaError_t cudaFreeHost(void *p) { return fake_give(p); }
/* Streams of the backend do not wait for the default one. */
static void fake_work(cudaStream_t s)
{
    if (!s)
        fake.under_way = true;
    else if (fake.under_way)
        fake.overtaken++;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s)
{
    (void)kind;
    FAKE_CALL;
    fake_work(s);
    memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    cudaError_t e = cudaMemcpyAsync(to, from, bytes, kind, NULL);
    if (kind == cudaMemcpyDeviceToHost) /* to the device it may return before the bytes are there */
        fake.under_way = false;
    return e;
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    FAKE_CALL;
    fake_work(s);
    memset(p, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, NULL); }

/* ---- streams, events, graphs ---- */

static cudaError_t fake_thing(void **p)
{
    fake.held++;
    *p = &fake;
    return cudaSuccess;
}
static cudaError_t fake_thing_ends(void)
{
    fake.held--;
    return fake.dead ? fake.fail_with : cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    (void)flags;
    FAKE_CALL;
    return fake_thing((void **)s);
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    (void)s;
    return fake_thing_ends();
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    (void)s;
    FAKE_CALL;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s)
{
    (void)s;
    FAKE_CALL;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    (void)flags;
    FAKE_CALL;
    return fake_thing((void **)e);
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    (void)e;
    return fake_thing_ends();
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    (void)e;
    (void)s;
    FAKE_CALL;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    (void)e;
    FAKE_CALL;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    (void)s;
    (void)mode;
    FAKE_CALL;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g)
{
    (void)s;
    *g = NULL;
    FAKE_CALL;
    return fake_thing((void **)g);
}
cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    (void)g;
    return fake_thing_ends();
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long flags)
{
    (void)g;
    (void)flags;
    *x = NULL;
    FAKE_CALL;
    return fake_thing((void **)x);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x)
{
    (void)x;
    return fake_thing_ends();
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s)
{
    (void)x;
    FAKE_CALL;
    fake_work(s);
    return cudaSuccess;
}

/* ---- kernels ---- */

/* Where the kernel's limit of shared memory is kept; NULL: it has none of its own, and there is no room for one. */
static size_t *fake_asked(const void *kernel)
{
    for (int i = 0; i < FAKE_KERNELS; i++)
        if (!fake.asked[i].kernel || fake.asked[i].kernel == kernel) {
            fake.asked[i].kernel = kernel;
            return &fake.asked[i].shared;
        }
    return NULL;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *kernel, void **args)
{
    size_t *asked = fake_asked(kernel);
    (void)args;
    FAKE_CALL;
    fake.launches++;
    fake_work(c->stream);
    if (!asked || c->dynamicSmemBytes > (*asked ? *asked : FAKE_SHARED_FIRST))
        return cudaErrorInvalidValue;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute what, int value)
{
    size_t *asked = fake_asked(kernel);
    FAKE_CALL;
    if (what != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    if (!asked || value < 0 || (size_t)value > fake.shared)
        return cudaErrorInvalidValue;
    *asked = (size_t)value;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *kernel)
{
    (void)kernel;
    memset(a, 0, sizeof(*a));
    FAKE_CALL;
    a->maxThreadsPerBlock = 1024;
    a->maxDynamicSharedSizeBytes = (int)FAKE_SHARED_FIRST;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int *n, const void *kernel, const cudaLaunchConfig_t *c)
{
    (void)kernel;
    (void)c;
    *n = 0;
    FAKE_CALL;
    *n = 8;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *kernel, int threads, size_t shared)
{
    (void)kernel;
    (void)threads;
    (void)shared;
    *n = 0;
    FAKE_CALL;
    *n = 1;
    return cudaSuccess;
}
static int fake_driver_call(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **p, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    int (*call)(void) = fake_driver_call;
    (void)name;
    (void)version;
    (void)flags;
    *p = NULL;
    FAKE_CALL;
    memcpy(p, &call, sizeof(call));
    if (found)
        *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* What nvcc's own code calls around kernels. */
void **__cudaRegisterFatBinary(void *image);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, void *block, void *grid, int *warp);
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                       int constant, int global);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream);
cudaError_t __cudaGetKernel(void **kernel, const void *host);
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream);

void **__cudaRegisterFatBinary(void *image)
{
    (void)image;
    return (void **)&fake.calls;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, void *block, void *grid, int *warp)
{
    (void)handle, (void)host, (void)device, (void)name, (void)limit, (void)tid, (void)bid, (void)block, (void)grid;
    (void)warp;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                       int constant, int global)
{
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    (void)grid, (void)block, (void)shared;
    fake.pushed = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = *block = (dim3){1, 1, 1};
    *shared = 0;
    *(cudaStream_t *)stream = fake.pushed;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, const void *host)
{
    (void)host;
    *kernel = NULL;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
    (void)kernel, (void)grid, (void)block, (void)args, (void)shared;
    FAKE_CALL;
    fake_work(stream);
    return cudaSuccess;
}

#endif
