/* cuda/cluster.cuh - clusters of blocks: launching them, their barrier, and where their shared memory lies for each other. */
#ifndef TLC_CLUSTER_CUH
#define TLC_CLUSTER_CUH

#include "device.cuh"

/* As tlc_launch, in clusters of `cluster` blocks along x; policy: where the blocks of one go. */
template <typename... P, typename... A>
static inline cudaError_t tlc_launch_policy(const struct tlc_launch *l, void (*kernel)(P...), int cluster,
                                            enum cudaClusterSchedulingPolicy policy, dim3 grid, dim3 block,
                                            size_t shared, A... args)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at[3];
    cudaError_t e;
    if (cluster == 1)
        return tlc_launch(l, kernel, grid, block, shared, args...);
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared;
    c.stream = l->stream;
    c.attrs = at;
    if (l->dependent) {
        at[c.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[c.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    at[c.numAttrs].id = cudaLaunchAttributeClusterDimension;
    at[c.numAttrs].val.clusterDim.x = (unsigned)cluster;
    at[c.numAttrs].val.clusterDim.y = at[c.numAttrs].val.clusterDim.z = 1;
    c.numAttrs++;
    if (policy != cudaClusterSchedulingPolicyDefault) {
        at[c.numAttrs].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
        at[c.numAttrs++].val.clusterSchedulingPolicyPreference = policy;
    }
    e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared); /* as all kernels */
    return e == cudaSuccess ? cudaLaunchKernelEx(&c, kernel, P(args)...) : e;
}
template <typename... P, typename... A>
static inline cudaError_t tlc_launch_cluster(const struct tlc_launch *l, void (*kernel)(P...), int cluster, dim3 grid,
                                             dim3 block, size_t shared, A... args)
{
    return tlc_launch_policy(l, kernel, cluster, cudaClusterSchedulingPolicyDefault, grid, block, shared, args...);
}

#ifdef __CUDACC__
/* Barrier of all threads of a cluster, in two halves. The first, without the order: waits for nothing, and costs no
 * fence. */
static __device__ __forceinline__ void tlc_cluster_arrive()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
static __device__ __forceinline__ void tlc_cluster_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}
/* Both, with the shared memory of the blocks in order. */
static __device__ __forceinline__ void tlc_cluster_sync()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive;" ::: "memory");
#endif
    tlc_cluster_wait();
}

/* This block's place in its cluster (along x), and which cluster of the row that is; without one: 0, and which block. */
static __device__ __forceinline__ int tlc_cluster_rank()
{
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return (int)rank;
}
static __device__ __forceinline__ int tlc_cluster_number()
{
    unsigned number = blockIdx.x;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(number));
#endif
    return (int)number;
}

/* The same place in the shared memory of another block of the cluster. */
static __device__ __forceinline__ unsigned tlc_far_at(const void *p, int rank)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(p);
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
#endif
    return at;
}
#endif

#endif
