// Kernels of several GPUs that read and write each other's memory. Large sums: block b of each waits for block b of all
// others, and reads their parts. Small ones: each sends its part, and waits for the words of the others themselves.
#pragma once
#include "core/communicator.h"
#include "device/vector.cuh"

namespace ftbert {

// Of this much waiting, in nanoseconds, the kernel makes an error: nobody will come any more.
constexpr uint64_t kLongestWait = 20'000'000'000;

// How long a thread waits for another rank.
class PeerWait {
 public:
  __device__ explicit PeerWait(const PeerParts& peers) : stop_(peers.stop) {}
  // After a look that found nothing. false: a rank has failed (`stop`), and what is read means nothing.
  __device__ bool goes_on() {
    if (++tries_ % 1024 != 0) return true;
    if (*stop_ != 0) return false;
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (began_ == 0) began_ = now;
    if (now - began_ > kLongestWait) __trap();
    return true;
  }

 private:
  const volatile int32_t* const stop_;
  uint32_t tries_ = 0;
  uint64_t began_ = 0;
};

// A kernel's meeting with the same one on the other ranks, whose parts it reads; where parts are sent there is none.
// All threads make one, before wait_for_inputs: the kernel ahead has no meeting, for its count is read then.
class PeerMeeting {
 public:
  __device__ explicit PeerMeeting(const PeerParts& peers) : peers_(peers) {
    if (!comes()) return;
    volatile uint32_t* const waits = peers.arrivals[peers.rank] + block() + kRanks + threadIdx.x;
    count_ = *waits + 1;
    *waits = count_;
  }

  // Called by every thread of every block, behind wait_for_inputs, as a barrier of the block: returns when the kernels
  // ahead of this one have ended on every rank, and what they have written can be read. The grid is the same on each
  // rank, and all of it is there at once. With a rank that has failed (`stop`) it returns at some time, and what is
  // read then means nothing. Where parts are sent it is that barrier alone.
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
  __device__ bool comes() const {
    return peers_.inbox_bytes == 0 && threadIdx.x < peers_.size && threadIdx.x != peers_.rank;
  }
  __device__ static size_t block() { return static_cast<size_t>(blockIdx.x) * 2 * kRanks; }

  __device__ void wait_for_other(const uint32_t* here) const {
    PeerWait wait(peers_);
    do {
      uint32_t there;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(there) : "l"(here) : "memory");
      if (static_cast<int32_t>(there - count_) >= 0) return;
    } while (wait.goes_on());
  }

  const PeerParts& peers_;
  uint32_t count_;  // of who comes
};

// A word of an inbox where nothing has come: one NaN in 32 bits, two in 16.
constexpr uint32_t kNothingCame = 0xffffffff;
constexpr uint32_t kSentInstead = 0x7fff7fff;  // other NaN

// Where rank `from` leaves in rank `to`'s inbox the 16 bytes at byte `at` of its part.
__device__ inline void* inbox_place(const PeerParts& peers, int to, int from, int64_t at) {
  return static_cast<char*>(peers.inboxes[to]) + from * peers.inbox_bytes + at;
}

// Needs no order among its words: each says by itself that it has come.
__device__ inline void send_words(void* to, uint4 x) {
  const auto sent = [](uint32_t word) { return word == kNothingCame ? kSentInstead : word; };
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(sent(x.x)), "r"(sent(x.y)),
               "r"(sent(x.z)), "r"(sent(x.w))
               : "memory");
}

// x = the words there; whether all have come.
__device__ inline bool receive_words(const void* from, uint4& x) {
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x.x != kNothingCame && x.y != kNothingCame && x.z != kNothingCame && x.w != kNothingCame;
}

// Behind receive_words, by who has received: for the sum after the next. Its sender has then received from this rank's
// kernel of the next sum, and that kernel begins when this kernel has ended.
__device__ inline void forget_words(void* there) {
  *static_cast<uint4*>(there) = {kNothingCame, kNothingCame, kNothingCame, kNothingCame};
}

}  // namespace ftbert
