// Kernels of several GPUs that read each other's memory: block b of each waits for block b of all others.
#pragma once
#include "core/communicator.h"
#include "device/vector.cuh"

namespace ftbert {

// Words of PeerParts::arrivals for so many blocks: of each block how often each rank has come there, and how often this
// rank has been waiting for it.
constexpr size_t peer_arrival_words(size_t blocks) { return blocks * 2 * PeerParts::kMostRanks; }

// Of this much waiting, in nanoseconds, the kernel makes an error: nobody will come any more.
constexpr uint64_t kLongestWait = 20'000'000'000;

// Called once by every thread of every block, behind wait_for_inputs: returns when the kernels ahead of this one have
// ended on every rank, and what they have written can be read. The grid is the same on each rank, and all of it is
// there at once. With a rank that has failed (`stop`) it returns at some time, and what is read then means nothing.
__device__ inline void meet_peers(const PeerParts& peers) {
  const int other = threadIdx.x;
  if (other < peers.size && other != peers.rank) {
    constexpr int kRanks = PeerParts::kMostRanks;
    const size_t block = static_cast<size_t>(blockIdx.x) * 2 * kRanks;
    volatile uint32_t* const waits = peers.arrivals[peers.rank] + block + kRanks + other;
    const uint32_t count = *waits + 1;
    *waits = count;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(peers.arrivals[other] + block + peers.rank), "r"(count)
                 : "memory");
    const uint32_t* const here = peers.arrivals[peers.rank] + block + other;
    uint64_t began = 0;
    for (uint32_t tries = 1;; ++tries) {
      uint32_t there;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(there) : "l"(here) : "memory");
      if (static_cast<int32_t>(there - count) >= 0) break;
      if (tries % 1024 != 0) continue;
      if (*peers.stop != 0) break;
      uint64_t now;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      if (began == 0) began = now;
      if (now - began > kLongestWait) __trap();
    }
  }
  __syncthreads();
}

}  // namespace ftbert
