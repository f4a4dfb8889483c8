#include "layers/layer_stack.h"

#include "core/dispatch.h"
#include "layers/attention.h"

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
  const int64_t width = layer.config.attention.width();
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
  return config.norm_place == NormPlace::pre ? make_pre_norm<Device, T>(config, weights, path)
                                             : make_post_norm<Device, T>(config, weights, path);
}

#define FTBERT_INSTANTIATE(D, T)                                                                             \
  template class LayerStack<D, T>;                                                                           \
  template std::unique_ptr<LayerStack<D, T>> make_layer_stack<D, T>(const EncoderConfig&, const Weights<T>&, \
                                                                    AttentionPath);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
