// Stacks that run layer by layer, kernel by kernel: LayerNorm after each block's residual sum, or before each block.
#pragma once
#include <memory>

#include "layers/stack.h"
#include "model/weights.h"

namespace ftbert {

template <class Device, class T>
class LayerStack : public Stack<Device, T> {
 public:
  // weights must outlive this.
  LayerStack(const EncoderConfig& config, const Weights<T>& weights, AttentionPath path)
      : config_(config), weights_(weights), path_(path) {}

  // Takes what it needs of the call's workspace beside carve_layer_buffers, for hidden states of so many rows.
  virtual void carve(Workspace& /*workspace*/, int64_t /*rows*/, LayerBuffers<T>&) const {}

  void run(Context<Device>& context, const PackedBatch& batch, const std::vector<Run>& runs, int64_t layers,
           LayerBuffers<T>& b, T* x, const HiddenStateHook<T>& hook) const final;

  // The last layer for the first token of each sequence: its query, and every token's keys and values. x is what `run`
  // has left, first [padded_rows(batch), hidden] scratch, out [padded_rows(batch), hidden]. Rows of empty sequences are
  // undefined.
  void run_first_tokens(Context<Device>& context, const PackedBatch& batch, const std::vector<Run>& runs,
                        LayerBuffers<T>& b, const T* x, T* first, T* out) const;

 protected:
  // Before the first layer: rows of x that begin at `first`.
  virtual void begin(Context<Device>&, int64_t /*first*/, int64_t /*rows*/, const LayerBuffers<T>&, T* /*x*/) const {}
  // What attention reads of the stream.
  virtual const T* reads(const LayerBuffers<T>& b, const T* x) const = 0;
  // What follows attention in layer i, in place on `rows` rows of x; attended [rows, width]; normed: these rows of
  // b.normed.
  virtual void finish(Context<Device>& context, int64_t i, const T* attended, int64_t rows, LayerBuffers<T>& b, T* x,
                      T* normed) const = 0;

  const EncoderConfig& config_;
  const Weights<T>& weights_;
  const AttentionPath path_;
};

// The stack of kernels for the config's norm place.
template <class Device, class T>
std::unique_ptr<LayerStack<Device, T>> make_layer_stack(const EncoderConfig& config, const Weights<T>& weights,
                                                        AttentionPath path);

}  // namespace ftbert
