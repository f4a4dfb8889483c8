// CUDA graphs of a model's small calls, in which launches take longer than kernels. A call is recorded once for a range
// of sizes and then repeated as one launch. What differs between calls of a size is copied into buffers of fixed size:
// rows past the last token are computed and never read, sequences past the last are empty.
#pragma once
#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "binding/decoder_cache.h"
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
  bool ends_of_keys = false;  // the batch says where each sequence's keys end
  bool operator==(const ReplaySize&) const = default;

  // nullopt: there is nothing to compute, or enough to hide the launches; or the call is a decoder's and no step, which
  // gives each sequence one token; or it has a shared prefix.
  static std::optional<ReplaySize> holding(const Context<Cuda>& context, const Batch& batch, AttentionPath attention);
  static std::optional<ReplaySize> holding(const Context<Cpu>&, const Batch&, AttentionPath) { return std::nullopt; }
};

struct AnyReplay {
  virtual ~AnyReplay() = default;
  virtual int64_t recorded() const = 0;
};

// The recordings of an encoder's calls, or of a decoder's steps. The host waits for no GPU work.
template <class Device, class T>
class Replay : public AnyReplay {
  struct Lane;

 public:
  // Any number of threads and streams may call.
  Replay(const Encoder<Device, T>& encoder, at::Device device);
  // Of steps: calls are uses in the cache's order. The cache outlives this.
  Replay(const Encoder<Device, T>& encoder, DecoderCache& cache);
  ~Replay() override;

  struct GiveBack {
    Replay* owner = nullptr;
    void operator()(Lane* lane) const { owner->give_back(*lane); }
  };
  // rows: what a call leaves, the hidden states or logits [output_rows, cols]. What reads them must be launched on the
  // call's stream before the lease ends.
  struct Lease {
    std::unique_ptr<Lane, GiveBack> lane;
    const T* rows = nullptr;
    explicit operator bool() const { return rows != nullptr; }
  };

  // An empty lease: the caller is recording, every lane is in use or there is no memory; the call runs like any other.
  // A size runs directly the first time, is recorded the second, and then repeated. size: what holds the batch. slots:
  // of a step, int32 [sequences] on the host. head: always the same.
  Lease run(const Context<Device>& context, const ReplaySize& size, const Batch& batch, const at::Tensor& slots = {},
            const Linear<T>* head = nullptr);

  void enable(bool on);
  bool enabled() const;
  void clear();               // of steps: forgets all recordings
  std::string state() const;  // for `ftbert info`
  int64_t recorded() const override;

 private:
  struct Recording;
  void give_back(Lane& lane);
  Lane* acquire(void* stream);
  Recording& find(Lane& lane, const ReplaySize& size, const Context<Device>& context, const Linear<T>* head);
  void fill(Context<Device>& context, const Batch& batch, const at::Tensor& slots, const Recording& recording);
  void fill_slots(const at::Tensor& slots);
  void record(const Context<Device>& context, Recording& recording, const Linear<T>* head);

  const Encoder<Device, T>& encoder_;
  at::Device device_;
  mutable std::mutex mutex_;  // of everything below, but not of a lane in use
  bool enabled_;
  std::list<Lane> lanes_;
  int64_t recorded_ = 0;
  std::string refusal_;  // why something could not be recorded

  // Of steps, what every recording reads, for as many sequences as a step may have.
  DecoderCache* const cache_ = nullptr;
  at::Tensor slots_, offsets_;      // int32 [count] and [count+1] on the device
  std::vector<int32_t> slots_now_;  // on their way to slots_, or there
};

// The CPU has no launches to save.
template <class T>
class Replay<Cpu, T> : public AnyReplay {
 public:
  struct Lease {
    const T* rows = nullptr;
    explicit operator bool() const { return false; }
  };
  Replay(const Encoder<Cpu, T>&, at::Device) : enabled_(cuda_graphs_by_default()) {}
  Replay(const Encoder<Cpu, T>&, DecoderCache&) : enabled_(false) {}
  Lease run(const Context<Cpu>&, const ReplaySize&, const Batch&, const at::Tensor& = {}, const Linear<T>* = nullptr) {
    return {};
  }
  void enable(bool on) { enabled_ = on; }
  bool enabled() const { return enabled_; }
  void clear() {}
  std::string state() const { return "none on the CPU"; }
  int64_t recorded() const override { return 0; }

 private:
  std::atomic<bool> enabled_;  // for a copy that moves to a GPU
};

}  // namespace ftbert::binding
