// A ring of stages in shared memory (sm_90): who fills them goes ahead of who reads them, and a barrier of each stage
// says that it is full, another that it is empty.
#pragma once
#include <cstdint>

#include "device/tma.cuh"

namespace ftbert {

// kReaders: arrivals that make a stage empty. kWriters: arrivals that make it full, with all bytes that writers expect.
// `stages` of kStages are in use. Each thread has an object of its own, with its own place in the ring.
template <int kStages, int kReaders, int kWriters = 1>
struct Ring {
  static constexpr int kBytes = 16 * kStages;  // of the barriers, aligned to 8

  uint32_t barriers;  // where they begin in shared memory: of full stages, then of empty ones
  int stages = kStages;
  int stage = 0;
  uint32_t parity = 0;  // of the rounds so far

  __device__ uint32_t full(int of) const { return barriers + 8 * of; }
  __device__ uint32_t empty(int of) const { return barriers + 8 * kStages + 8 * of; }

  // By one thread, before barrier_init_fence.
  __device__ void init_full() const {
    for (int s = 0; s < stages; ++s) barrier_init(full(s), kWriters);
  }
  __device__ void init_empty(int readers = kReaders) const {
    for (int s = 0; s < stages; ++s) barrier_init(empty(s), readers);
  }
  __device__ void init() const {
    for (int s = 0; s < stages; ++s) barrier_init(full(s), kWriters), barrier_init(empty(s), kReaders);
  }

  __device__ void wait_full() const { barrier_wait(full(stage), parity); }
  // In the first round all stages are empty.
  __device__ void wait_empty() const { barrier_wait(empty(stage), parity ^ 1); }
  // One of the arrivals of kReaders.
  __device__ void release(int of) const { barrier_arrive(empty(of)); }
  // Of kReaders in block `rank` of the cluster.
  __device__ void release(int of, int rank) const { barrier_arrive(empty(of), rank); }

  __device__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  // Where several readers take stages in turns.
  __device__ void next(int readers) {
    stage += readers;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
  // To where the ring is after so many steps.
  __device__ void go_to(int64_t steps) {
    stage = static_cast<int>(steps % stages);
    parity = steps / stages % 2;
  }
};

}  // namespace ftbert
