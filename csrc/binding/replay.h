// CUDA graphs inside the engine: small calls are bound by launches, so the forward pass is recorded once for a range of
// sizes and then repeated as one launch. The ids are copied into buffers of fixed size; rows past the last token are
// computed and never read, sequences past the last are empty.
#pragma once
#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/graph.h"
#include "encoder.h"

namespace ftbert::binding {

// Unless $FTBERT_CUDA_GRAPHS is "off".
bool cuda_graphs_by_default();

// What a recording serves: batches of up to these sizes whose rows are chosen in this way. A call runs in the smallest
// that holds it.
struct ReplaySize {
  int64_t tokens, sequences, longest;
  RowKind rows;
  int64_t named_rows;  // of RowKind::any
  bool tf32;
  bool operator==(const ReplaySize&) const = default;

  // nullopt: there is nothing to compute, or enough to hide the launches.
  static std::optional<ReplaySize> holding(const Context<Cuda>& context, const Batch& batch, AttentionPath attention);
};

// The recordings of one model. Any number of threads and streams may call; the host waits for no GPU work.
template <class Device, class T>
class Replay {
  struct Slot;

 public:
  Replay(const Encoder<Device, T>& encoder, at::Device device);
  ~Replay();

  // The hidden states [output_rows, hidden] of one call. What reads them must be launched on the call's stream before
  // the lease ends.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept
        : owner_(std::exchange(other.owner_, nullptr)),
          slot_(other.slot_),
          stream_(other.stream_),
          hidden_(other.hidden_) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease();
    explicit operator bool() const { return owner_ != nullptr; }
    const T* hidden() const { return hidden_; }

   private:
    friend class Replay;
    Replay* owner_ = nullptr;
    Slot* slot_ = nullptr;
    void* stream_ = nullptr;
    const T* hidden_ = nullptr;
  };

  // An empty lease: this call is none for a recording (too large, the caller is recording, every slot is in use, no
  // memory) and runs like any other. A size runs directly the first time, is recorded the second, and then repeated.
  Lease run(const Context<Device>& context, const Batch& batch);

  void enable(bool on);
  bool enabled() const;
  std::string state() const;  // for `ftbert info`

 private:
  struct Recording;
  void release(Slot* slot);
  Slot* acquire(void* stream);
  Recording& find(Slot& slot, const ReplaySize& size, const Context<Device>& context);
  void stage(Context<Device>& context, const Batch& batch, Recording& recording);

  const Encoder<Device, T>& encoder_;
  at::Device device_;
  mutable std::mutex mutex_;  // of everything below, but not of a slot in use
  bool enabled_;
  std::list<Slot> slots_;
  int64_t recorded_ = 0;
  std::string refusal_;  // why something could not be recorded
};

// The CPU has no launches to save.
template <class T>
class Replay<Cpu, T> {
 public:
  struct Lease {
    explicit operator bool() const { return false; }
    const T* hidden() const { return nullptr; }
  };
  Replay(const Encoder<Cpu, T>&, at::Device) : enabled_(cuda_graphs_by_default()) {}
  Lease run(const Context<Cpu>&, const Batch&) { return {}; }
  void enable(bool on) { enabled_ = on; }
  bool enabled() const { return enabled_; }
  std::string state() const { return "none on the CPU"; }

 private:
  std::atomic<bool> enabled_;  // for a copy that moves to a GPU
};

}  // namespace ftbert::binding
