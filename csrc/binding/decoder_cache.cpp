#include "binding/decoder_cache.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include "binding/engine.h"
#include "binding/replay.h"

namespace ftbert::binding {

DecoderCache::DecoderCache(EncoderClass& encoder, DecoderHead head, int64_t slots, int64_t positions)
    : head(std::move(head)),
      device(encoder.device()),
      cache(encoder.config(), encoder.engine().attention_path(), dtype_of(encoder.dtype()),
            device.is_cuda() ? kCudaRowBytes : 1, slots, positions),
      order(device) {
  const c10::DeviceGuard guard(device);
  const c10::InferenceMode normal(false);  // lengths change in place, in whatever mode the calls come
  const StreamOrder::Use use(order);
  const at::TensorOptions there = at::TensorOptions().device(device);
  // What lies behind a slot's tokens is read by no kernel, or replaced before it is used.
  bytes = at::empty({static_cast<int64_t>(cache.bytes())}, there.dtype(at::kByte));
  lengths = at::zeros({cache.slots()}, there.dtype(at::kInt));
  cache.lie_at(bytes.data_ptr());
  order.keep(bytes);
  order.keep(lengths);
  encoder.engine().attach(*this);
  if (this->head.weight.defined()) order.keep(this->head.weight);
  if (this->head.bias) order.keep(*this->head.bias);
}

DecoderCache::~DecoderCache() = default;

void DecoderCache::set_length(int64_t slot, int64_t length) {
  const c10::DeviceGuard guard(device);
  const StreamOrder::Use use(order);
  lengths.select(0, slot).fill_(length);
}

void DecoderCache::copy_prefix(int64_t from, int64_t to, int64_t length) {
  const c10::DeviceGuard guard(device);
  const StreamOrder::Use use(order);
  dispatch(device_kind(device), DType::fp32, [&]<class Device, class T>(Backend<Device, T>) {  // of any type
    cache.copy_prefix(CallContext<Device>(device).context, from, to, length);
  });
}

}  // namespace ftbert::binding
