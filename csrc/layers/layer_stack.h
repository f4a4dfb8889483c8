// The layers of one model on one device, one after another.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "core/context.h"
#include "layers/batch.h"
#include "layers/buffers.h"
#include "layers/residual.h"
#include "model/weights.h"

namespace ftbert {

// Throws Error that lists what this config describes and no layer computes yet.
void check_layers_exist(const ModelConfig& config);

// Sees the packed hidden states [tokens, hidden]: 0 the embeddings, i the result of layer i (the last layer's after the
// model's final norm, as transformers counts them).
template <class T>
using HiddenStateHook = std::function<void(int64_t i, const T* hidden)>;

// Immutable: any number of threads may run it, each on buffers of its own.
template <class Device, class T>
class LayerStack {
 public:
  // config and weights must outlive this.
  LayerStack(const ModelConfig& config, const Weights<T>& weights, AttentionPath path)
      : config_(config), weights_(weights), path_(path) {}

  // Takes what it needs of the call's workspace beside carve_layer_buffers, for hidden states of so many rows.
  void carve(Workspace& workspace, int64_t rows, LayerBuffers<T>& b) const;

  // What the first block reads of x where that is neither x nor a norm of it, for who makes x; else without data.
  Operand read_first(const LayerBuffers<T>& b) const;

  // x [tokens, hidden], the embedding's output, becomes what the model's first `layers` layers make of it, in the rows
  // of these runs. With norms that products do there is one run and no hook.
  void run(Context<Device>& context, const Batch& batch, const std::vector<Run>& runs, int64_t layers,
           LayerBuffers<T>& b, T* x, const HiddenStateHook<T>& hook, NormedBy by = NormedBy::kernels) const;

  // layers/chosen_rows.cpp. The last layer for batch.rows, which are not all: their queries, and every token's keys and
  // values. x is what `run` has left, chosen [rows_with_slack(output_rows), width] scratch, out of that many rows. Rows
  // of empty sequences are undefined.
  void run_chosen_rows(Context<Device>& context, const Batch& batch, const std::vector<Run>& runs, LayerBuffers<T>& b,
                       T* x, T* chosen, T* out) const;

 private:
  // By a kernel of its own, where there is a norm.
  void norm_rows(Context<Device>& context, const T* x, const Norm<T>& norm, int64_t rows, const Output<T>& out) const;
  // Before the first layer: rows of the stream.
  void begin(Context<Device>& context, int64_t rows, const Stream<Device, T>& stream) const;
  // What follows attention in layer i of `layers`, on the stream's first `rows` rows; attended [rows, width]. final:
  // the model's final norm, or an absent one where that comes later.
  void finish(Context<Device>& context, int64_t i, int64_t layers, const Operand& attended, int64_t rows,
              LayerBuffers<T>& b, Stream<Device, T>& stream, const Norm<T>& final) const;
  // With a convolution beside the first layer: activation(that of the rows of x) at b.convolved, before the layer; and
  // behind it the norm of the sum of both.
  void convolve(Context<Device>& context, const Batch& batch, const Run& run, const T* x,
                const LayerBuffers<T>& b) const;
  void add_convolved(Context<Device>& context, int64_t rows, const Stream<Device, T>& stream,
                     const LayerBuffers<T>& b) const;
  // Behind the last of `layers`, which run: the norm that no product has done, also as the next layer wishes to read
  // it.
  void settle(Context<Device>& context, int64_t rows, int64_t layers, const Stream<Device, T>& stream) const;

  const ModelConfig& config_;
  const Weights<T>& weights_;
  const AttentionPath path_;
};

}  // namespace ftbert
