// Hopper's tensor memory accelerator and its barriers (sm_90a), as functions. One thread asks for a whole tile; a
// barrier in shared memory counts the bytes that have come.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace ftbert {

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After barrier_init, before the accelerator and other threads use the barriers (and then a barrier of all threads).
// The fence of CUTLASS (cutlass::arch::fence_barrier_init). fence.proxy.async is for data that ordinary stores wrote;
// initialisation of a barrier does not need it (CCCL, cub/device/dispatch/kernels/kernel_transform.cuh).
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// Arrives, and lets the phase end only after `bytes` more have come.
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same address in block `rank` of the cluster. Says nothing of what this thread wrote: a release for the
// cluster waits for all of a thread's stores, and made a product's step of k take 0.46 us longer (H100).
__device__ inline void barrier_arrive(uint32_t barrier, int rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Four floats to the same address in block `rank` of the cluster, where the barrier counts their 16 bytes.
__device__ inline void store_async(uint32_t shared, float4 v, uint32_t barrier, int rank) {
  asm volatile(
      "{ .reg .b32 there, counted; mapa.shared::cluster.u32 there, %0, %6; mapa.shared::cluster.u32 counted, %5, %6; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%1, %2, %3, %4}, [counted]; }" ::"r"(
          shared),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier), "r"(rank)
      : "memory");
}
// Of all threads of a cluster: nobody passes the second before all have come to the first. For barriers that were
// initialised, with barrier_init_fence; of what threads wrote it says nothing.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void cluster_arrived() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// To the same address in block `rank`. Seen by those who are behind cluster_arrived(), when this thread has been at
// cluster_publish().
__device__ inline void store_in_cluster(uint32_t shared, float2 x, int rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %3; st.shared::cluster.v2.f32 [there], {%1, %2}; }" ::"r"(
          shared),
      "f"(x.x), "f"(x.y), "r"(rank)
      : "memory");
}
__device__ inline void store_in_cluster(uint32_t shared, float4 x, int rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %5; "
      "st.shared::cluster.v4.f32 [there], {%1, %2, %3, %4}; }" ::"r"(shared),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(rank)
      : "memory");
}

// cluster_arrive, with what this thread wrote.
__device__ inline void cluster_publish() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

// The box at (column, row) of a matrix to shared memory; zeros beyond its edges.
__device__ inline void tma_load(uint32_t shared, const CUtensorMap& map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// The same of a tensor of three dimensions, the innermost first.
__device__ inline void tma_load(uint32_t shared, const CUtensorMap& map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
// A matrix's box to the first `blocks` blocks of the cluster, at the same address in each. Each block's own barrier
// counts its bytes.
__device__ inline void tma_load_to_all(uint32_t shared, const CUtensorMap& map, int column, int row, uint32_t barrier,
                                       int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>((1 << blocks) - 1))
      : "memory");
}
// So many bytes, a multiple of 16, from an address that is a multiple of 16.
__device__ inline void bulk_load(uint32_t shared, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// The box from shared memory to (column, row) of a matrix, what lies within its edges; asynchronous. What this warp has
// written there needs fence_shared_for_async first. Until tma_store_wait_read, in the same thread, the memory is in
// use.
__device__ inline void tma_store(const CUtensorMap& map, int column, int row, uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
               "r"(row), "r"(shared)
               : "memory");
}
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// The box to the L2 cache, for a load that follows.
__device__ inline void tma_prefetch(const CUtensorMap& map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row)
               : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// How many registers a warpgroup's threads may have from here on.
template <int kRegisters>
__device__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ftbert
