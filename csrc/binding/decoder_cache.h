// What a decoder has on one device beside its layers: a cache of keys and values, and the head that reads what the
// layers leave.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "binding/encoder_class.h"
#include "binding/stream_order.h"
#include "layers/kv_cache.h"

namespace ftbert::binding {

struct AnyReplay;  // binding/replay.h

// Undefined of a stage before the last.
struct DecoderHead {
  at::Tensor weight;  // [vocab, hidden], packed on the CPU, and in q8_0
  const Format* format = &formats::fp32;
  std::optional<at::Tensor> bias = {};
  int64_t vocab = 0;
};

// A call is a use in the order. The encoder must outlive this.
struct DecoderCache {
  DecoderHead head;
  at::Device device;
  KvCache cache;
  at::Tensor bytes;    // of the cache
  at::Tensor lengths;  // int32 [slots] on the device
  StreamOrder order;
  std::unique_ptr<AnyReplay> steps;  // recorded; of the encoder's device and type

  DecoderCache(EncoderClass& encoder, DecoderHead head, int64_t slots, int64_t positions);
  ~DecoderCache();

  void set_length(int64_t slot, int64_t length);
  // The first `length` tokens of one slot over those of another; lengths stay.
  void copy_prefix(int64_t from, int64_t to, int64_t length);
};

}  // namespace ftbert::binding
