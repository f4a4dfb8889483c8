#include "binding/decoder_class.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>
#include <set>

#include "binding/q8_0.h"
#include "binding/rank_runner.h"
#include "binding/tensors.h"
#include "binding/torch_products.h"

namespace ftbert::binding {
namespace {

// Host tensors of a call.
const int32_t* host_integers(const char* name, const at::Tensor& t, int64_t count) {
  plain(name, t);
  FTBERT_CHECK(t.dim() == 1 && t.size(0) == count && t.scalar_type() == at::kInt && t.is_cpu() && t.is_contiguous(),
               name, ": expected contiguous Int [", count, "] on cpu, got ", describe(t));
  return data<int32_t>(t);
}

constexpr int64_t kUnreadRows = 8;  // of a head whose logits nobody reads; as few as a product by q8_0 has

}  // namespace

auto DecoderClass::check_head(const EncoderClass& encoder, const at::Tensor& weight, std::optional<at::Tensor> bias,
                              const std::optional<at::Tensor>& scale) -> DecoderHead {
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
    check_q8_0(weight, *scale, "weight", "scale");
    return {pack_q8_0(weight, *scale), DType::q8_0, bias, vocab};
  }
  return {device.is_cpu() ? pack_weight(weight.detach()) : weight.detach().contiguous(), dtype_of(type), bias, vocab};
}

auto DecoderClass::parts_of(const c10::intrusive_ptr<EncoderClass>& encoder, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& scale)
    -> std::vector<Part> {
  const auto head_at = [&](const c10::intrusive_ptr<EncoderClass>& part, int64_t rows) {
    const auto some = [&](const std::optional<at::Tensor>& of_all) -> std::optional<at::Tensor> {
      if (!of_all || of_all->dim() == 0) return of_all;
      return of_all->narrow(0, 0, std::min(rows, of_all->size(0))).to(part->device());
    };
    return check_head(*part, *some(weight), some(bias), some(scale));
  };
  constexpr int64_t all = std::numeric_limits<int64_t>::max();
  if (const auto& stages = encoder->stages(); !stages.empty()) {
    FTBERT_CHECK(static_cast<int64_t>(stages.size()) == stages.front()->config().stage.count,
                 "stages (parallel=\"pipeline\") in several processes generate no text: load them in one process, or "
                 "with parallel=\"tensor\"");
    std::vector<Part> parts;
    for (const auto& stage : stages)
      parts.push_back({stage, stage == stages.back() ? head_at(stage, all) : DecoderHead()});
    return parts;
  }
  if (encoder->shards().empty()) return {{encoder, check_head(*encoder, weight, bias, scale)}};
  std::vector<Part> parts;
  for (const auto& shard : encoder->shards())
    parts.push_back({shard, parts.empty() ? check_head(*shard, weight, bias, scale) : head_at(shard, kUnreadRows)});
  return parts;
}

DecoderClass::DecoderClass(c10::intrusive_ptr<EncoderClass> encoder, const at::Tensor& weight,
                           std::optional<at::Tensor> bias, int64_t slots, int64_t positions,
                           std::optional<at::Tensor> scale)
    : DecoderClass(parts_of(encoder, weight, bias, scale), slots, positions) {
  runner_ = encoder->engine().runner();
}

DecoderClass::DecoderClass(const std::vector<Part>& parts, int64_t slots, int64_t positions)
    : DecoderClass(parts.front().encoder, parts.front().head, slots, positions) {
  for (size_t i = 1; i < parts.size(); ++i)
    others_.push_back(c10::intrusive_ptr<DecoderClass>::unsafe_steal_from_new(
        new DecoderClass(parts[i].encoder, parts[i].head, slots, positions)));
}

DecoderClass::DecoderClass(c10::intrusive_ptr<EncoderClass> encoder, DecoderHead head, int64_t slots, int64_t positions)
    : encoder_(std::move(encoder)),
      head_(std::move(head)),
      memory_(KvCache(encoder_->config(), encoder_->engine().attention_path(), dtype_of(encoder_->dtype()),
                      encoder_->device().is_cuda() ? kCudaRowBytes : 1, slots, positions),
              encoder_->device()),
      lengths_(slots, 0),
      engine_(make_decoder_engine(*encoder_, head_, memory_)) {
  if (!encoder_->device().is_cuda()) return;
  const c10::DeviceGuard guard(encoder_->device());
  const StreamOrder::Turn turn(memory_.order);
  if (head_.weight.defined()) memory_.order.keep(head_.weight);
  if (head_.bias) memory_.order.keep(*head_.bias);
}

c10::intrusive_ptr<DecoderClass> DecoderClass::with_cache(int64_t slots, int64_t positions) {
  const std::lock_guard lock(mutex_);
  const c10::DeviceGuard guard(encoder_->device());
  const StreamOrder::Turn turn(memory_.order);  // the head was made in those before
  auto made =
      c10::intrusive_ptr<DecoderClass>::unsafe_steal_from_new(new DecoderClass(encoder_, head_, slots, positions));
  made->runner_ = runner_;
  for (const c10::intrusive_ptr<DecoderClass>& other : others_)
    made->others_.push_back(other->with_cache(slots, positions));
  return made;
}

at::Tensor DecoderClass::forward(const at::Tensor& input_ids, const at::Tensor& cu_seqlens, const at::Tensor& slots,
                                 bool all_rows) {
  return forward_from({}, input_ids, cu_seqlens, slots, all_rows);
}

at::Tensor DecoderClass::forward_from(const at::Tensor& hidden, const at::Tensor& input_ids,
                                      const at::Tensor& cu_seqlens, const at::Tensor& slots, bool all_rows) {
  const std::lock_guard lock(mutex_);
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
    FTBERT_CHECK(there + tokens <= memory_.cache.positions(), "the cache is full: it has ", memory_.cache.positions(),
                 " positions a sequence, and sequence ", i, " with ", there, " tokens there gets ", tokens, " more");
    max_q = std::max(max_q, tokens), max_k = std::max(max_k, there + tokens);
  }

  const DecoderCall call{input_ids, cu_seqlens, slots, max_q, max_k, all_rows, hidden};
  at::Tensor made = others_.empty() ? forward_here(call) : forward_on_all(call);
  for (int64_t i = 0; i < count; ++i) lengths_[index[i]] += cu[i + 1] - cu[i];
  return made;
}

at::Tensor DecoderClass::forward_here(const DecoderCall& call) {
  const c10::DeviceGuard guard(encoder_->device());
  const StreamOrder::Turn turn(memory_.order);
  return engine_->forward(call);
}

at::Tensor DecoderClass::forward_on_all(const DecoderCall& call) {
  try {
    return runner_ ? forward_on_ranks(call) : forward_on_stages(call);
  } catch (...) {
    // Some may have stored the tokens.
    const auto* const index = data<int32_t>(call.slots);
    for (int64_t i = 0; i < call.count(); ++i) restore_length(index[i], lengths_[index[i]]);
    throw;
  }
}

at::Tensor DecoderClass::forward_on_ranks(const DecoderCall& call) {
  std::vector<at::Tensor> ids{call.input_ids};
  at::Tensor logits;
  const auto work = [&](int64_t rank) {
    if (rank == 0)
      logits = forward_here(call);
    else
      others_[rank - 1]->forward(ids[rank], call.cu_seqlens, call.slots, call.all_rows);
  };
  runner_->run(work, [&] {
    for (size_t rank = 1; rank <= others_.size(); ++rank)
      ids.push_back(runner_->at_rank(call.input_ids, static_cast<int64_t>(rank)));
  });
  return logits;
}

at::Tensor DecoderClass::forward_on_stages(const DecoderCall& call) {
  const auto move = [](const at::Tensor& tensor, at::Device device) {
    return tensor.to(device, /*non_blocking=*/true);
  };
  std::vector<at::Tensor> ids;  // a copy between two GPUs waits for what both have begun
  for (const auto& other : others_) ids.push_back(move(call.input_ids, other->encoder_->device()));
  at::Tensor made = forward_here(call);
  for (size_t i = 0; i < others_.size(); ++i) {
    const at::Tensor hidden = move(made, others_[i]->encoder_->device());
    made = others_[i]->forward_from(hidden, ids[i], call.cu_seqlens, call.slots, call.all_rows);
  }
  return move(made, encoder_->device());
}

void DecoderClass::restore_length(int64_t slot, int64_t length) {
  const c10::DeviceGuard guard(encoder_->device());
  const StreamOrder::Turn turn(memory_.order);
  set_length(slot, length);
  for (const c10::intrusive_ptr<DecoderClass>& other : others_) {
    const std::lock_guard lock(other->mutex_);
    other->restore_length(slot, length);
  }
}

std::vector<int64_t> DecoderClass::lengths() const {
  const std::lock_guard lock(mutex_);
  return lengths_;
}

int64_t DecoderClass::recorded() const {
  const std::lock_guard lock(mutex_);
  return engine_->recorded();
}

void DecoderClass::truncate(int64_t slot, int64_t length) {
  const std::lock_guard lock(mutex_);
  check_slot("slot", slot);
  check_length(slot, length);
  restore_length(slot, length);
}

void DecoderClass::copy_prefix(int64_t from, const std::vector<int64_t>& to, int64_t length) {
  const std::lock_guard lock(mutex_);
  check_slot("from", from);
  for (const int64_t one : to) {
    check_slot("to", one);
    FTBERT_CHECK(from != one, "to: expected other slots than ", from);
  }
  check_length(from, length);
  for (const c10::intrusive_ptr<DecoderClass>& other : others_) other->copy_prefix(from, to, length);
  const c10::DeviceGuard guard(encoder_->device());
  const StreamOrder::Turn turn(memory_.order);
  for (const int64_t one : to) {
    set_length(one, 0);
    dispatch(device_kind(encoder_->device()), dtype_of(encoder_->dtype()),
             [&]<class Device, class T>(Backend<Device, T>) {
               memory_.cache.copy_prefix(CallContext<Device>(encoder_->device()).context, from, one, length);
             });
    set_length(one, length);
  }
}

void DecoderClass::check_slot(const char* name, int64_t slot) const {
  FTBERT_CHECK(slot >= 0 && slot < memory_.cache.slots(), name, ": expected 0 to ", memory_.cache.slots() - 1, ", got ",
               slot);
}

void DecoderClass::check_length(int64_t slot, int64_t length) const {
  FTBERT_CHECK(length >= 0 && length <= lengths_[slot], "length: expected 0 to ", lengths_[slot],
               ", the tokens that slot ", slot, " has, got ", length);
}

void DecoderClass::set_length(int64_t slot, int64_t length) {
  memory_.lengths.select(0, slot).fill_(length);
  lengths_[slot] = length;
}

}  // namespace ftbert::binding
