#include "binding/decoder_class.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "binding/engine.h"
#include "binding/packed_weight.h"
#include "binding/q8_0.h"
#include "binding/replay.h"
#include "binding/tensors.h"

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

DecoderHead check_head(const EncoderClass& encoder, const at::Tensor& weight, std::optional<at::Tensor> bias,
                       const std::optional<at::Tensor>& scale) {
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
    return {.weight = pack_q8_0(weight, *scale), .format = &formats::q8_0, .bias = bias, .vocab = vocab};
  }
  return {.weight = device.is_cpu() ? pack_weight(weight.detach()) : weight.detach().contiguous(),
          .format = &plain_format(dtype_of(type)),
          .bias = bias,
          .vocab = vocab};
}

// What computes the encoder's layers: its ranks, its stages or itself.
std::vector<EncoderPtr> members_of(const EncoderPtr& encoder) {
  const std::vector<EncoderPtr>& members = encoder->engine().members();
  return members.empty() ? std::vector<EncoderPtr>{encoder} : members;
}

// The head on each device. Of several ranks the first's logits are read, and the heads of the others have few rows; of
// stages the last has it.
std::vector<DecoderHead> heads_of(const EncoderPtr& encoder, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& scale) {
  const std::vector<EncoderPtr> members = members_of(encoder);
  if (members.size() == 1 && members[0] == encoder) return {check_head(*encoder, weight, bias, scale)};
  const Stage& last = members.back()->config().stage;
  const bool stages = !last.whole();
  FTBERT_CHECK(!stages || static_cast<int64_t>(members.size()) == last.count,
               "stages (parallel=\"pipeline\") in several processes generate no text: load them in one process, or "
               "with parallel=\"tensor\"");
  std::vector<DecoderHead> heads;
  for (const EncoderPtr& member : members) {
    const bool reads = !stages || member == members.back(), all = stages || heads.empty();
    const auto some = [&](const std::optional<at::Tensor>& of_all) -> std::optional<at::Tensor> {
      if (!of_all || of_all->dim() == 0) return of_all;
      return (all ? *of_all : of_all->narrow(0, 0, std::min(kUnreadRows, of_all->size(0)))).to(member->device());
    };
    heads.push_back(reads ? check_head(*member, *some(weight), some(bias), some(scale)) : DecoderHead());
  }
  return heads;
}

}  // namespace

DecoderClass::DecoderClass(EncoderPtr encoder, const at::Tensor& weight, std::optional<at::Tensor> bias, int64_t slots,
                           int64_t positions, std::optional<at::Tensor> scale)
    : DecoderClass(encoder, heads_of(encoder, weight, bias, scale), slots, positions) {}

DecoderClass::DecoderClass(EncoderPtr encoder, const std::vector<DecoderHead>& heads, int64_t slots, int64_t positions)
    : encoder_(std::move(encoder)) {
  const std::vector<EncoderPtr> members = members_of(encoder_);
  for (size_t i = 0; i < members.size(); ++i) {
    const c10::DeviceGuard guard(members[i]->device());
    caches_.push_back(std::make_unique<DecoderCache>(*members[i], heads[i], slots, positions));
  }
  lengths_.resize(slots, 0);
}

c10::intrusive_ptr<DecoderClass> DecoderClass::with_cache(int64_t slots, int64_t positions) {
  const std::lock_guard lock(mutex_);
  std::vector<DecoderHead> heads;
  for (const std::unique_ptr<DecoderCache>& one : caches_) {
    const c10::DeviceGuard guard(one->device);
    const StreamOrder::Use use(one->order);  // the head was made in a use before
    heads.push_back(one->head);
  }
  return c10::intrusive_ptr<DecoderClass>::unsafe_steal_from_new(new DecoderClass(encoder_, heads, slots, positions));
}

at::Tensor DecoderClass::forward(const at::Tensor& input_ids, const at::Tensor& cu_seqlens, const at::Tensor& slots,
                                 bool all_rows) {
  const std::lock_guard lock(mutex_);
  const int64_t count = slots.numel();
  const int32_t* const index = host_integers("slots", slots, count);
  const int32_t* const cu = host_integers("cu_seqlens", cu_seqlens, count + 1);
  FTBERT_CHECK(count > 0, "slots: expected at least one sequence");
  FTBERT_CHECK(cu[0] == 0 && cu[count] == input_ids.numel(), "cu_seqlens: expected it to run from 0 to ",
               input_ids.numel(), " (the number of input ids), got ", cu[0], " to ", cu[count]);
  std::vector<bool> seen(lengths_.size());
  int64_t max_q = 0, max_k = 0;
  for (int64_t i = 0; i < count; ++i) {
    check_slot("slots", index[i]);
    FTBERT_CHECK(!seen[index[i]], "slots: expected each once, got ", index[i], " twice");
    seen[index[i]] = true;
    const int64_t tokens = cu[i + 1] - cu[i], there = lengths_[index[i]];
    FTBERT_CHECK(tokens > 0, "cu_seqlens: expected at least one token a sequence, got ", tokens, " of sequence ", i);
    FTBERT_CHECK(there + tokens <= cache().positions(), "the cache is full: it has ", cache().positions(),
                 " positions a sequence, and sequence ", i, " with ", there, " tokens there gets ", tokens, " more");
    max_q = std::max(max_q, tokens), max_k = std::max(max_k, there + tokens);
  }

  const Call call{.input_ids = input_ids,
                  .cu_seqlens = cu_seqlens,
                  .max_seqlen = max_q,
                  .caches = caches_,
                  .slots = slots,
                  .max_held = max_k};
  at::Tensor made;
  try {
    made = encoder_->engine().forward(call, {all_rows ? Want::logits : Want::last_logits})[0];
  } catch (...) {
    if (caches_.size() > 1)  // some may have stored the tokens
      for (int64_t i = 0; i < count; ++i) set_length(index[i], lengths_[index[i]]);
    throw;
  }
  for (int64_t i = 0; i < count; ++i) lengths_[index[i]] += cu[i + 1] - cu[i];
  return made;
}

std::vector<int64_t> DecoderClass::lengths() const {
  const std::lock_guard lock(mutex_);
  return lengths_;
}

int64_t DecoderClass::recorded() const {
  const std::lock_guard lock(mutex_);
  return caches_.front()->steps->recorded();
}

void DecoderClass::truncate(int64_t slot, int64_t length) {
  const std::lock_guard lock(mutex_);
  check_slot("slot", slot);
  check_length(slot, length);
  set_length(slot, length);
}

void DecoderClass::copy_prefix(int64_t from, const std::vector<int64_t>& to, int64_t length) {
  const std::lock_guard lock(mutex_);
  check_slot("from", from);
  for (const int64_t one : to) {
    check_slot("to", one);
    FTBERT_CHECK(from != one, "to: expected other slots than ", from);
  }
  check_length(from, length);
  for (const int64_t one : to) {
    set_length(one, 0);
    for (const std::unique_ptr<DecoderCache>& on : caches_) on->copy_prefix(from, one, length);
    set_length(one, length);
  }
}

void DecoderClass::check_slot(const char* name, int64_t slot) const {
  FTBERT_CHECK(slot >= 0 && slot < cache().slots(), name, ": expected 0 to ", cache().slots() - 1, ", got ", slot);
}

void DecoderClass::check_length(int64_t slot, int64_t length) const {
  FTBERT_CHECK(length >= 0 && length <= lengths_[slot], "length: expected 0 to ", lengths_[slot],
               ", the tokens that slot ", slot, " has, got ", length);
}

void DecoderClass::set_length(int64_t slot, int64_t length) {
  for (const std::unique_ptr<DecoderCache>& one : caches_) one->set_length(slot, length);
  lengths_[slot] = length;
}

}  // namespace ftbert::binding
