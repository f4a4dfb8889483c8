// Kernels of several GPUs that read each other's memory: block b of each waits for block b of all others.
#pragma once
#include "core/communicator.h"
#include "device/vector.cuh"

namespace ftbert {

// Words of PeerParts::arrivals for so many blocks: of each block how often each rank has come there, and how often this
// rank has been waiting for it.
constexpr size_t peer_arrival_words(size_t blocks) { return blocks * 2 * PeerParts::kMostRanks; }

// Called once by every thread of every block, behind wait_for_inputs: returns when the kernels ahead of this one have
// ended on every rank, and what they have written can be read. The grid is the same on each rank, and all of it is
// there at once. With a rank that has failed (`stop`) it returns at some time, and what is read then means nothing.
__device__ inline void meet_peers(const PeerParts& peers) {
  const int other = threadIdx.x;
  if (other < peers.size && other != peers.rank) {
    constexpr int kRanks = PeerParts::kMostRanks;
    const size_t block = static_cast<size_t>(blockIdx.x) * 2 * kRanks;
    uint32_t* const waits = peers.arrivals[peers.rank] + block + kRanks + other;
    const uint32_t count = *waits + 1;
    *waits = count;
    // Relaxed: what others read was written by kernels that have ended, and a release would wait for nothing else.
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(peers.arrivals[other] + block + peers.rank), "r"(count)
                 : "memory");
    const uint32_t* const here = peers.arrivals[peers.rank] + block + other;
    for (uint32_t tries = 1;; ++tries) {
      uint32_t there;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(there) : "l"(here) : "memory");
      if (static_cast<int32_t>(there - count) >= 0) break;
      if (tries % 1024 == 0 && *peers.stop != 0) break;
    }
  }
  __syncthreads();
}

}  // namespace ftbert
