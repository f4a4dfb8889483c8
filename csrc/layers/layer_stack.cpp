// The loop over layers, and what follows attention in each: post-norm's order and pre-norm's.
#include "layers/layer_stack.h"

#include "core/dispatch.h"
#include "layers/attention.h"
#include "layers/feed_forward.h"
#include "layers/residual.h"

namespace ftbert {
namespace {

template <class T>
RelativeBias<T> bias_of(const EncoderConfig& config, const Weights<T>& weights, const PackedBatch& batch) {
  return {weights.relative_bias, batch.columns, config.relative_span};
}

template <class T>
T* row(T* matrix, int64_t i, int64_t cols) {
  return matrix ? matrix + i * cols : nullptr;
}

// x = norm(x + attention(x)); x = norm(x + feed_forward(x)).
template <class Device, class T>
class PostNorm : public LayerStack<Device, T> {
 public:
  using LayerStack<Device, T>::LayerStack;

 protected:
  const T* reads(const LayerBuffers<T>&, const T* x) const override { return x; }

  void finish(Context<Device>& context, int64_t i, const T* attended, int64_t rows, LayerBuffers<T>& b, T* x,
              T*) const override {
    const Layer<T>& layer = this->weights_.layers[i];
    const int64_t cols = this->config_.hidden;
    for (const Chunk& chunk : chunks_of(context, rows)) {
      T* const rows_x = x + chunk.first * cols;
      const Residual<T> residual{rows_x, nullptr, rows_x};
      const Operand a = Operand::of(attended + chunk.first * layer.out.weight.k);
      add_residual(context, layer.out, a, chunk, layer.attention_norm, residual, b);
      const Operand inner = feed_forward(context, layer, rows_x, chunk.computed, b);
      add_residual(context, layer.down, inner, chunk, layer.ffn_norm, residual, b);
    }
  }
};

// x += attention(norm(x)); x += feed_forward(norm(x)); behind the last layer x = norm(x). x holds the sum of all blocks
// so far, b.normed what the next one reads: each norm is applied where the sum is made.
template <class Device, class T>
class PreNorm : public LayerStack<Device, T> {
 public:
  using LayerStack<Device, T>::LayerStack;

  void carve(Workspace& workspace, int64_t rows, LayerBuffers<T>& b) const override {
    b.normed = workspace.take<T>(padded_rows<Device>(rows) * this->config_.hidden);
  }

 protected:
  void begin(Context<Device>& context, int64_t first, int64_t rows, const LayerBuffers<T>& b, T* x) const override {
    const int64_t cols = this->config_.hidden;
    const bool layers = this->config_.depth() > 0;
    const Norm<T>& norm = layers ? this->weights_.layers[0].attention_norm : this->weights_.final_norm;
    T* const from = x + first * cols;
    add_bias_input_layernorm<Device, T>(context, from, nullptr, nullptr, norm, rows, cols, nullptr,
                                        layers ? b.normed + first * cols : from);
  }

  const T* reads(const LayerBuffers<T>& b, const T*) const override { return b.normed; }

  void finish(Context<Device>& context, int64_t i, const T* attended, int64_t rows, LayerBuffers<T>& b, T* x,
              T* normed) const override {
    const Layer<T>& layer = this->weights_.layers[i];
    const bool last = i + 1 == this->config_.depth();
    const Norm<T>& next = last ? this->weights_.final_norm : this->weights_.layers[i + 1].attention_norm;
    const int64_t cols = this->config_.hidden;
    for (const Chunk& chunk : chunks_of(context, rows)) {
      T *const sum = x + chunk.first * cols, *const read = normed + chunk.first * cols;
      const Operand a = Operand::of(attended + chunk.first * layer.out.weight.k);
      add_residual(context, layer.out, a, chunk, layer.ffn_norm, {sum, sum, read}, b);
      const Operand inner = feed_forward(context, layer, read, chunk.computed, b);
      add_residual(context, layer.down, inner, chunk, next, {sum, last ? nullptr : sum, last ? sum : read}, b);
    }
  }
};

}  // namespace

template <class Device, class T>
void LayerStack<Device, T>::run(Context<Device>& context, const PackedBatch& batch, const std::vector<Run>& runs,
                                int64_t layers, LayerBuffers<T>& b, T* x, const HiddenStateHook<T>& hook) const {
  const int64_t cols = config_.hidden;
  if (hook && config_.depth() > 0) hook(0, x);
  for (const Run& run : runs) begin(context, run.first_token, run.tokens, b, x);
  if (hook && config_.depth() == 0) hook(0, x);
  const RelativeBias<T> bias = bias_of(config_, weights_, batch);
  for (int64_t i = 0; i < layers; ++i) {
    for (const Run& run : runs) {
      attend(context, weights_.layers[i], batch, run, reads(b, x) + run.first_token * cols, batch.max_seqlen, bias,
             path_, b);
      finish(context, i, b.attended, run.tokens, b, row(x, run.first_token, cols),
             row(b.normed, run.first_token, cols));
    }
    if (hook) hook(i + 1, x);
  }
}

template <class Device, class T>
void LayerStack<Device, T>::run_first_tokens(Context<Device>& context, const PackedBatch& batch,
                                             const std::vector<Run>& runs, LayerBuffers<T>& b, const T* x, T* first,
                                             T* out) const {
  first_rows<Device, T>(context, x, 0, batch.cu_seqlens, batch.batch, config_.hidden, out);
  const int64_t last = config_.depth() - 1;
  if (last < 0) return;
  const Layer<T>& layer = weights_.layers[last];
  const int64_t width = layer.config.attention.heads.width();
  const RelativeBias<T> bias = bias_of(config_, weights_, batch);
  for (const Run& run : runs) {
    attend(context, layer, batch, run, reads(b, x) + run.first_token * config_.hidden, 1, bias, path_, b);
    first_rows<Device, T>(context, b.attended, run.first_token, batch.cu_seqlens + run.first_sequence, run.sequences,
                          width, first + run.first_sequence * width);
  }
  finish(context, last, first, batch.batch, b, out, b.normed);
}

template <class Device, class T>
std::unique_ptr<LayerStack<Device, T>> make_layer_stack(const EncoderConfig& config, const Weights<T>& weights,
                                                        AttentionPath path) {
  if (config.depth() > 0 && config.layers.front().norm_place == NormPlace::pre)
    return std::make_unique<PreNorm<Device, T>>(config, weights, path);
  return std::make_unique<PostNorm<Device, T>>(config, weights, path);
}

#define FTBERT_INSTANTIATE(D, T)                                                                             \
  template class LayerStack<D, T>;                                                                           \
  template std::unique_ptr<LayerStack<D, T>> make_layer_stack<D, T>(const EncoderConfig&, const Weights<T>&, \
                                                                    AttentionPath);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
