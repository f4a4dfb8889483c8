#include "binding/decoder_class.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <set>

#include "binding/padding.h"
#include "binding/q8_0.h"
#include "binding/torch_products.h"
#include "decoder.h"

namespace ftbert::binding {
namespace {

// Host tensors of a call.
const int32_t* host_integers(const char* name, const at::Tensor& t, int64_t count) {
  plain(name, t);
  FTBERT_CHECK(t.dim() == 1 && t.size(0) == count && t.scalar_type() == at::kInt && t.is_cpu() && t.is_contiguous(),
               name, ": expected contiguous Int [", count, "] on cpu, got ", describe(t));
  return data<int32_t>(t);
}

// Pinned, so that the copy does not wait for the GPU.
at::Tensor to_device(const at::Tensor& t, at::Device device) {
  return device.is_cpu() ? t : t.pin_memory().to(device, /*non_blocking=*/true);
}

}  // namespace

auto DecoderClass::check_head(const EncoderClass& encoder, const at::Tensor& weight, std::optional<at::Tensor> bias,
                              const std::optional<at::Tensor>& scale) -> Head {
  const at::Device device = encoder.device();
  const int64_t hidden = encoder.config().hidden;
  const at::ScalarType type = scale ? at::kChar : encoder.dtype();
  plain("weight", weight);
  FTBERT_CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) == hidden && weight.scalar_type() == type &&
                   weight.device() == device,
               "weight: expected ", at::toString(type), " [vocab, ", hidden, "] on ", device.str(), ", got ",
               describe(weight));
  const int64_t vocab = weight.size(0);
  if (bias) {
    plain("bias", *bias);
    FTBERT_CHECK(
        bias->sizes() == at::IntArrayRef({vocab}) && bias->scalar_type() == encoder.dtype() && bias->device() == device,
        "bias: expected ", at::toString(encoder.dtype()), " [", vocab, "] on ", device.str(), ", got ",
        describe(*bias));
    bias = bias->detach().contiguous();
  }
  if (scale) {
    plain("scale", *scale);
    FTBERT_CHECK(scale->sizes() == at::IntArrayRef({vocab, hidden / kQ8Block}) && scale->scalar_type() == at::kHalf &&
                     scale->device() == device,
                 "scale: expected Half [", vocab, ", ", hidden / kQ8Block, "] on ", device.str(), ", got ",
                 describe(*scale));
    return {pack_q8_0(weight, *scale), DType::q8_0, bias, vocab};
  }
  return {device.is_cpu() ? pack_weight(weight.detach()) : weight.detach().contiguous(), dtype_of(type), bias, vocab};
}

DecoderClass::DecoderClass(c10::intrusive_ptr<EncoderClass> encoder, const at::Tensor& weight,
                           std::optional<at::Tensor> bias, int64_t slots, int64_t positions,
                           std::optional<at::Tensor> scale)
    : DecoderClass(encoder, check_head(*encoder, weight, std::move(bias), scale), slots, positions) {}

DecoderClass::DecoderClass(c10::intrusive_ptr<EncoderClass> encoder, Head head, int64_t slots, int64_t positions)
    : encoder_(std::move(encoder)),
      head_(std::move(head)),
      cache_(encoder_->config(), encoder_->engine().attention_path(), dtype_of(encoder_->dtype()), slots, positions) {
  const at::TensorOptions there = at::TensorOptions().device(encoder_->device());
  // Zeros: what lies behind a slot's tokens is read beside them, with a weight of 0.
  memory_ = at::zeros({static_cast<int64_t>(cache_.bytes())}, there.dtype(at::kByte));
  cache_.lie_at(memory_.data_ptr());
  lengths_there_ = at::zeros({slots}, there.dtype(at::kInt));
  lengths_.assign(slots, 0);
}

c10::intrusive_ptr<DecoderClass> DecoderClass::with_cache(int64_t slots, int64_t positions) const {
  return c10::intrusive_ptr<DecoderClass>::reclaim(new DecoderClass(encoder_, head_, slots, positions));
}

at::Tensor DecoderClass::forward(const at::Tensor& input_ids, const at::Tensor& cu_seqlens, const at::Tensor& slots,
                                 bool all_rows) {
  const std::lock_guard lock(mutex_);
  const at::Device device = encoder_->device();
  const int64_t count = slots.numel();
  const int32_t* const index = host_integers("slots", slots, count);
  const int32_t* const cu = host_integers("cu_seqlens", cu_seqlens, count + 1);
  FTBERT_CHECK(count > 0, "slots: expected at least one sequence");
  FTBERT_CHECK(cu[0] == 0 && cu[count] == input_ids.numel(), "cu_seqlens: expected it to run from 0 to ",
               input_ids.numel(), " (the number of input ids), got ", cu[0], " to ", cu[count]);
  std::set<int32_t> seen;
  int64_t max_q = 0, max_k = 0;
  for (int64_t i = 0; i < count; ++i) {
    check_slot("slots", index[i]);
    FTBERT_CHECK(seen.insert(index[i]).second, "slots: expected each once, got ", index[i], " twice");
    const int64_t tokens = cu[i + 1] - cu[i], there = lengths_[index[i]];
    FTBERT_CHECK(tokens > 0, "cu_seqlens: expected at least one token a sequence, got ", tokens, " of sequence ", i);
    FTBERT_CHECK(there + tokens <= cache_.positions(), "the cache is full: it has ", cache_.positions(),
                 " positions a sequence, and sequence ", i, " with ", there, " tokens there gets ", tokens, " more");
    max_q = std::max(max_q, tokens), max_k = std::max(max_k, there + tokens);
  }

  const c10::DeviceGuard guard(device);
  const at::Tensor cu_there = to_device(cu_seqlens, device), slots_there = to_device(slots, device);
  at::Tensor logits;
  dispatch(device_kind(device), dtype_of(encoder_->dtype()), [&]<class Device, class T>(Backend<Device, T>) {
    CallContext<Device> call(device);
    Context<Device>& context = call.for_products();
    const Encoder<Device, T>& encoder = encoder_of<Device, T>(encoder_->engine());
    const CheckedInput input =
        check_packed<Device>(context, device, encoder.config(), input_ids, cu_there, max_q, std::nullopt);
    Batch batch = input.batch;
    batch.sequences.max_k = max_k;
    batch.rows = {all_rows ? RowKind::all : RowKind::last};
    Matrix head{.dtype = head_.dtype, .n = head_.vocab, .k = encoder.config().hidden};
    if (head.dtype == DType::q8_0) head.per = granularity_of(head.dtype);
    if (device.is_cpu())
      head.packed = &head_.weight;
    else
      head.data = data<void>(head_.weight);
    const Decoder<Device, T> decoder(context, encoder, {.weight = head, .bias = data<T>(head_.bias), .input = {}},
                                     cache_);
    call.for_products(decoder.weight_scratch_bytes(context, batch));
    const at::TensorOptions there = at::TensorOptions().device(device);
    const at::Tensor memory = at::empty({static_cast<int64_t>(decoder.bytes(context, batch))}, there.dtype(at::kByte));
    logits = at::empty({rows_with_slack<Device>(batch.output_rows()), head_.vocab}, there.dtype(encoder_->dtype()));
    const CacheSlots in{data<int32_t>(slots_there), data<int32_t>(lengths_there_), cache_.positions()};
    decoder.forward(context, batch, in, Workspace(memory.data_ptr(), memory.nbytes()), data<T>(logits));
    logits = logits.narrow(0, 0, batch.output_rows());
  });
  for (int64_t i = 0; i < count; ++i) lengths_[index[i]] += cu[i + 1] - cu[i];
  return logits;
}

std::vector<int64_t> DecoderClass::lengths() const {
  const std::lock_guard lock(mutex_);
  return lengths_;
}

void DecoderClass::truncate(int64_t slot, int64_t length) {
  const std::lock_guard lock(mutex_);
  check_slot("slot", slot);
  FTBERT_CHECK(length >= 0 && length <= lengths_[slot], "length: expected 0 to ", lengths_[slot],
               ", the tokens that slot ", slot, " has, got ", length);
  set_length(slot, length);
}

void DecoderClass::copy_prefix(int64_t from, int64_t to, int64_t length) {
  const std::lock_guard lock(mutex_);
  check_slot("from", from);
  check_slot("to", to);
  FTBERT_CHECK(from != to, "to: expected another slot than ", from);
  FTBERT_CHECK(length >= 0 && length <= lengths_[from], "length: expected 0 to ", lengths_[from],
               ", the tokens that slot ", from, " has, got ", length);
  const c10::DeviceGuard guard(encoder_->device());
  dispatch(device_kind(encoder_->device()), dtype_of(encoder_->dtype()),
           [&]<class Device, class T>(Backend<Device, T>) {
             cache_.copy_prefix(CallContext<Device>(encoder_->device()).context, from, to, length);
           });
  set_length(to, length);
}

void DecoderClass::check_slot(const char* name, int64_t slot) const {
  FTBERT_CHECK(slot >= 0 && slot < cache_.slots(), name, ": expected 0 to ", cache_.slots() - 1, ", got ", slot);
}

void DecoderClass::set_length(int64_t slot, int64_t length) {
  lengths_there_.select(0, slot).fill_(length);
  lengths_[slot] = length;
}

}  // namespace ftbert::binding
