// x += attention(norm(x)); x += feed_forward(norm(x)); behind the last layer x = norm(x). x holds the sum of all blocks
// so far, b.normed what the next one reads: each norm is applied where the sum is made.
#include "core/dispatch.h"
#include "layers/feed_forward.h"
#include "layers/layer_stack.h"
#include "layers/residual.h"

namespace ftbert {
namespace {

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
    add_bias_input_layernorm<Device, T>(context, from, nullptr, nullptr, norm.gamma, norm.beta, norm.eps, rows, cols,
                                        nullptr, layers ? b.normed + first * cols : from);
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
std::unique_ptr<LayerStack<Device, T>> make_pre_norm(const EncoderConfig& config, const Weights<T>& weights,
                                                     AttentionPath path) {
  return std::make_unique<PreNorm<Device, T>>(config, weights, path);
}

#define FTBERT_INSTANTIATE(D, T)                                                                          \
  template std::unique_ptr<LayerStack<D, T>> make_pre_norm<D, T>(const EncoderConfig&, const Weights<T>&, \
                                                                 AttentionPath);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
