// What the ranks of a model do together: each, a device or a process, runs the same calls in the same order on its
// share of the weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>

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
  // For small sums: memory of each rank, inbox_bytes for each sender, into which other ranks send their parts. A sum
  // then takes a single trip over the link, in place of a flag's, a question's and an answer's. A kernel leaves the
  // inboxes of its turn empty. inbox_bytes 0: there are none.
  void* inboxes[kMostRanks] = {};
  size_t inbox_bytes = 0;
  const volatile int32_t* stop = nullptr;  // of the host: not 0 where a rank has failed, for which nobody waits

  explicit operator bool() const { return size > 0; }
};

// Serves one call at a time, which all ranks make alike.
template <class Device>
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual Shard shard() const = 0;
  // Before a call, and before its ranks agree to launch: it has sums of up to so many bytes. Takes memory for them.
  virtual void reserve(size_t /*bytes*/) {}
  // Where a product leaves its part of a sum of so many bytes, for kernels that add up. Calls come with turn 0 and 1
  // alternately, also from a call of a model to the next: memory that other ranks may still read, or have not emptied
  // yet, is not written.
  virtual PeerParts parts(size_t /*bytes*/, int /*turn*/) { return {}; }
  // Held while a call launches, where ranks in other processes would not notice that calls mix.
  virtual std::unique_lock<std::mutex> alone() { return {}; }
  // Without such parts: x [count] becomes the sum over all ranks' x, the same bits on every rank. Launched on the
  // context's stream.
  virtual void all_reduce(Context<Device>& context, DType dtype, void* x, int64_t count) = 0;
  // Whether a graph may record its work.
  virtual bool records() const = 0;
  // Returns when every rank has come here: whether all have said true. Before a rank launches, and when it has
  // launched: while a kernel waits for another rank, whatever makes the host wait for that kernel, as taking memory or
  // loading code may, keeps the other rank from launching.
  virtual bool agree(bool mine) { return mine; }
  // Launches a kernel that waits for other ranks: none of them does anything else meanwhile, for the same reason. A
  // recording, in which nothing runs, just has it.
  virtual void launch_together(const Context<Device>&, const std::function<void()>& launch) { launch(); }
};

}  // namespace ftbert
