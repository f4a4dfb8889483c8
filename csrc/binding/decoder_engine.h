// A decoder's forward pass between torch and the core: the head, memory from torch's allocator, the current stream.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "binding/encoder_class.h"
#include "binding/stream_order.h"
#include "layers/kv_cache.h"

namespace ftbert::binding {

// Undefined of a stage before the last.
struct DecoderHead {
  at::Tensor weight;  // [vocab, hidden], packed on the CPU, and in q8_0
  DType dtype = DType::fp32;
  std::optional<at::Tensor> bias = {};
  int64_t vocab = 0;
};

// Tokens that follow those in the slots, checked but for the ids.
struct DecoderCall {
  at::Tensor input_ids;          // int64 or int32 [tokens] on the device
  at::Tensor cu_seqlens, slots;  // int32 [count + 1], [count] on the host
  int64_t max_q, max_k;          // of the longest sequence its tokens, and those with what its slot holds
  bool all_rows;
  at::Tensor hidden = {};  // [tokens, hidden] on the device: of a later stage, what the one before has left

  int64_t count() const { return slots.numel(); }
  bool is_step() const { return max_q == 1; }  // each sequence gets one token
};

// A cache's memory, and what orders those who use it.
struct CacheMemory {
  KvCache cache;
  at::Tensor bytes;    // of the cache
  at::Tensor lengths;  // int32 [slots] on the device
  StreamOrder order;

  CacheMemory(KvCache layout, at::Device device);
};

// What differs between (device, dtype) pairs, behind one virtual call. A call is a turn of the memory's order.
struct DecoderEngine {
  virtual ~DecoderEngine() = default;
  // [output rows, vocab]; of a stage before the last [tokens, hidden]
  virtual at::Tensor forward(const DecoderCall& call) = 0;
  virtual int64_t recorded() const = 0;  // graphs so far
};

// All of it must outlive the engine.
std::unique_ptr<DecoderEngine> make_decoder_engine(const EncoderClass& encoder, const DecoderHead& head,
                                                   CacheMemory& memory);

}  // namespace ftbert::binding
