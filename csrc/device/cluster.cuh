// What blocks of a cluster write into each other's shared memory, as functions (sm_90).
#pragma once
#include <cstdint>

namespace ftbert {

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

// cluster_arrive (device/tma.cuh), with what this thread wrote.
__device__ inline void cluster_publish() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

}  // namespace ftbert
