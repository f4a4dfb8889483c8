// A ring of stages in shared memory (sm_90): who fills them goes ahead of who reads them, and a barrier of each stage
// says that it is full, another that it is empty.
#pragma once
#include <cstdint>

#include "device/launch.cuh"
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

  // Returns the stage it leaves. Where several take stages in turns, as many at a time.
  __device__ int next(int at_a_time = 1) {
    const int left = stage;
    stage += at_a_time;
    if (stage >= stages) stage -= stages, parity ^= 1;
    return left;
  }
  // To where the ring is after so many steps.
  __device__ void go_to(int64_t steps) {
    stage = static_cast<int>(steps % stages);
    parity = steps / stages % 2;
  }
};

// One thread feeds a ring with the operands of a product's steps of k: it asks the accelerator for them. Steps: a walk
// over the steps, more() and next(), copyable. ask_b(stage, steps) says how many bytes the stage expects, and asks for
// the step's rows of B, the weight; ask_a(stage, steps) for those of A. Weights do not change while a model runs: B of
// the first round is asked for by feed_weights, ahead of wait_for_inputs, and all else by feed, behind it.

// Returns for how many steps.
template <int kStages, int kReaders, class Steps, class AskB>
__device__ int feed_weights(const Ring<kStages, kReaders>&, Steps steps, const AskB& ask_b) {
  int ahead = 0;
#pragma unroll 1
  for (; steps.more() && ahead < kStages; ++ahead, steps.next()) ask_b(ahead, steps);
  return ahead;
}

// ahead: what feed_weights has returned.
template <int kStages, int kReaders, class Steps, class AskB, class AskA>
__device__ void feed(Ring<kStages, kReaders>& ring, Steps steps, int ahead, const AskB& ask_b, const AskA& ask_a) {
#pragma unroll 1
  for (; steps.more(); steps.next(), --ahead) {
    if (ahead <= 0) {
      ring.wait_empty();
      ask_b(ring.stage, steps);
    }
    ask_a(ring.stage, steps);
    ring.next();
  }
}

// The steps of every `blocks`-th tile from the first on.
struct StepsOfTiles {
  int steps, tile, tiles, blocks, step = 0;
  __device__ bool more() const { return tile < tiles; }
  __device__ void next() {
    if (++step == steps) step = 0, tile += blocks;
  }
};

// Steps of one tile.
struct StepsOfTile {
  int steps, step = 0;
  __device__ bool more() const { return step < steps; }
  __device__ void next() { ++step; }
};

}  // namespace ftbert
