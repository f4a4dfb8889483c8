// The forward pass of encoders and decoders for every device and dtype: embed, the layers, the output rows or their
// logits. A decoder's tokens follow those in the slots of a cache.
#pragma once
#include <string>

#include "core/context.h"
#include "core/workspace.h"
#include "layers/attention.h"
#include "layers/layer_stack.h"
#include "layers/prepared.h"
#include "layers/schedule.h"
#include "model/config.h"
#include "model/weights.h"

namespace ftbert {

// One model on one (device, dtype). Immutable after construction: any number of threads may call it.
template <class Device, class T>
class Encoder {
 public:
  // With `allocate`, which rotary positions need, products do the work of the norms between them where they can
  // (layers/prepared.h).
  Encoder(const Context<Device>& context, ModelConfig config, Weights<T> weights,
          std::optional<AttentionPath> attention = std::nullopt, const AllocateFloats& allocate = nullptr);
  Encoder(const Encoder&) = delete;  // the layers refer to its config and weights
  Encoder& operator=(const Encoder&) = delete;

  // How forward runs a batch: of that one the counts are read, and on the CPU the offsets.
  struct Plan {
    Schedule schedule;
    size_t bytes = 0;  // of workspace
  };
  Plan plan(const Context<Device>& context, const Batch& batch, const Linear<T>* head = nullptr) const;

  // out [rows_with_slack(output_rows), hidden]: those rows of the last hidden state (zeros for an empty sequence).
  // `hook`, where given, is called with every hidden state of all tokens on the way; then all rows are read.
  // head [vocab, hidden]: out [unread_rows_with_slack(output_rows), vocab] becomes the logits of these rows.
  // A batch in slots of a cache: its tokens follow those in the slots, which then hold them too. What is launched
  // depends on the batch's sizes alone: ids, slots and lengths are read on the device.
  void forward(Context<Device>& context, const Batch& batch, const Plan& plan, Workspace workspace, T* out,
               const HiddenStateHook<T>& hook = nullptr, const Linear<T>* head = nullptr) const;

  // first [rows_with_slack(batch), hidden], the hidden state of the first tokens -> tanh(pooler(first)), out of that
  // shape
  void pooler(Context<Device>& context, const T* first, const int32_t* cu_seqlens, int64_t batch, T* out) const;

  const ModelConfig& config() const { return config_; }
  // Of Context::weight_scratch that a call needs.
  size_t weight_scratch_bytes(const Context<Device>& context, const Batch& batch,
                              const Linear<T>* head = nullptr) const;
  const AttentionChoice& attention() const { return attention_; }
  // On the fused path, which of its kernels run (describe_kernels).
  std::string attention_kernels(const Context<Device>& context) const;
  // Of how many tokens norms are deferred, or why they are not.
  std::string deferred_state(const Context<Device>& context) const;

 private:
  struct Buffers;
  Buffers carve(Workspace& workspace, const Batch& batch, const Schedule& schedule, bool has_head) const;
  void embed(Context<Device>&, const Batch&, const Buffers& b, T* x) const;

  const ModelConfig config_;
  Weights<T> weights_;  // as made ready for this device
  const AttentionChoice attention_;
  const LayerStack<Device, T> layers_;
  DeferralLimits limits_;
};

}  // namespace ftbert
