// x = norm(x + attention(x)); x = norm(x + feed_forward(x)).
#include "core/dispatch.h"
#include "layers/feed_forward.h"
#include "layers/layer_stack.h"
#include "layers/residual.h"

namespace ftbert {
namespace {

template <class Device, class T>
class PostNorm : public LayerStack<Device, T> {
 public:
  using LayerStack<Device, T>::LayerStack;

 protected:
  void begin(Context<Device>&, int64_t, int64_t, const LayerBuffers<T>&, T*) const override {}

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

}  // namespace

template <class Device, class T>
std::unique_ptr<LayerStack<Device, T>> make_post_norm(const EncoderConfig& config, const Weights<T>& weights,
                                                      AttentionPath path) {
  return std::make_unique<PostNorm<Device, T>>(config, weights, path);
}

#define FTBERT_INSTANTIATE(D, T)                                                                           \
  template std::unique_ptr<LayerStack<D, T>> make_post_norm<D, T>(const EncoderConfig&, const Weights<T>&, \
                                                                  AttentionPath);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
