// CUDA graphs of a decoder's steps: where each sequence gets one token, launches take longer than most kernels. A step
// is recorded once for so many sequences and a range of lengths, and then repeated as one launch: ids, slots and
// lengths are read on the device.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <list>
#include <vector>

#include "binding/decoder_engine.h"
#include "decoder.h"

namespace ftbert::binding {

// One decoder's; its calls are turns of the memory's order. The host waits for no GPU work.
template <class Device, class T>
class DecodeSteps {
 public:
  DecodeSteps(const Decoder<Device, T>& decoder, const EncoderConfig& config, CacheMemory& memory, at::Device device);
  ~DecodeSteps();

  // What the decoder makes, [count, cols], of a call with one token for each sequence. Undefined, and nothing ran: too
  // many sequences, weights that need scratch, the caller is recording, no memory. A size runs directly the first time,
  // is recorded the second, then repeated.
  at::Tensor run(Context<Device>& context, const DecoderCall& call);
  void clear();  // forgets all recordings
  int64_t recorded() const { return recorded_; }

 private:
  struct Recording;
  void stage(Context<Device>& context, const DecoderCall& call);
  Recording& find(const Context<Device>& context, const DecoderCall& call);
  CacheSlots slots() const;

  const Decoder<Device, T>& decoder_;
  const EncoderConfig& config_;
  CacheMemory& memory_;
  at::Device device_;
  // What every recording reads, of as many sequences as one may have: int64 [count], int32 [count + 1] and [count].
  at::Tensor ids_, offsets_, slots_;
  at::Tensor hidden_;                // likewise [count, hidden], of a later stage
  std::vector<int32_t> staged_;      // the slots that are there
  at::Tensor buffers_;               // all recordings': calls follow each other
  std::list<Recording> recordings_;  // the one used last comes first
  int64_t recorded_ = 0;
};

// The CPU has no launches to save.
template <class T>
class DecodeSteps<Cpu, T> {
 public:
  DecodeSteps(const Decoder<Cpu, T>&, const EncoderConfig&, CacheMemory&, at::Device) {}
  at::Tensor run(Context<Cpu>&, const DecoderCall&) { return {}; }
  void clear() {}
  int64_t recorded() const { return 0; }
};

}  // namespace ftbert::binding
