// What the ranks of a model do together: each, a device or a process, runs the same calls in the same order on its
// share of the weights.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace ftbert {

template <class Device>
struct Context;

// Which share of a layer's heads and of its `inter` columns. The products of one rank's share are parts of sums.
struct Shard {
  int64_t rank = 0, size = 1;
  bool whole() const { return size == 1; }
  bool operator==(const Shard&) const = default;
};

// The parts of a sum in memory that the kernels of every rank read, and flags by which kernels wait for each other
// (device/peers.cuh).
struct PeerParts {
  static constexpr int kMostRanks = 8;

  int rank = 0, size = 0;        // size 0: parts do not lie in such memory
  void* parts[kMostRanks] = {};  // by rank
  uint32_t* arrivals[kMostRanks] = {};
  const volatile int32_t* stop = nullptr;  // of the host: not 0 where a rank has failed, for which nobody waits

  explicit operator bool() const { return size > 0; }
};

// Serves one call at a time, which all ranks make alike.
template <class Device>
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual Shard shard() const = 0;
  // Where a product leaves its part of a sum of so many bytes, for kernels that add up. Calls come with turn 0 and 1
  // alternately: what is written next is not what other ranks may still read.
  virtual PeerParts parts(size_t /*bytes*/, int /*turn*/) { return {}; }
  // Where there are no such parts: x [count] becomes the sum over ranks of what each has there, the same bits on each.
  // Launched on the context's stream.
  virtual void all_reduce(Context<Device>& context, DType dtype, void* x, int64_t count) = 0;
  // Whether a graph may record its work.
  virtual bool records() const = 0;
  // Between taking memory and launching kernels: returns when every rank has come here. A kernel that waits for another
  // rank keeps that one from taking memory.
  virtual void meet() {}
};

}  // namespace ftbert
