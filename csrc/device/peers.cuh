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

// A kernel's meeting with the same one on the other ranks. All threads make one, before wait_for_inputs: the kernel
// ahead has no meeting, for its count is read then.
class PeerMeeting {
 public:
  __device__ explicit PeerMeeting(const PeerParts& peers) : peers_(peers) {
    if (!comes()) return;
    volatile uint32_t* const waits = peers.arrivals[peers.rank] + block() + kRanks + threadIdx.x;
    count_ = *waits + 1;
    *waits = count_;
  }

  // Called by every thread of every block, behind wait_for_inputs: returns when the kernels ahead of this one have
  // ended on every rank, and what they have written can be read. The grid is the same on each rank, and all of it is
  // there at once. With a rank that has failed (`stop`) it returns at some time, and what is read then means nothing.
  __device__ void meet() const {
    if (comes()) {
      asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(peers_.arrivals[threadIdx.x] + block() + peers_.rank),
                   "r"(count_)
                   : "memory");
      wait_for_other(peers_.arrivals[peers_.rank] + block() + threadIdx.x);
    }
    __syncthreads();
  }

 private:
  static constexpr int kRanks = PeerParts::kMostRanks;

  // A thread for each of the others.
  __device__ bool comes() const { return threadIdx.x < peers_.size && threadIdx.x != peers_.rank; }
  __device__ static size_t block() { return static_cast<size_t>(blockIdx.x) * 2 * kRanks; }

  __device__ void wait_for_other(const uint32_t* here) const {
    uint64_t began = 0;
    for (uint32_t tries = 1;; ++tries) {
      uint32_t there;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(there) : "l"(here) : "memory");
      if (static_cast<int32_t>(there - count_) >= 0) return;
      if (tries % 1024 != 0) continue;
      if (*peers_.stop != 0) return;
      uint64_t now;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      if (began == 0) began = now;
      if (now - began > kLongestWait) __trap();
    }
  }

  const PeerParts& peers_;
  uint32_t count_;  // of who comes
};

}  // namespace ftbert
