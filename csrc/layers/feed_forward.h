// A layer's second block up to its last product.
#pragma once
#include "layers/buffers.h"
#include "model/weights.h"

namespace ftbert {

// activation(x @ up^T + bias) of x [m, hidden], in the type in which the block's last product reads it: [m, inter] at
// b.inner, or in memory of the product's library.
template <class Device, class T>
Operand feed_forward(Context<Device>& context, const Layer<T>& layer, const T* x, int64_t m, const LayerBuffers<T>& b) {
  const Epilogue epilogue{.bias = true, .activation = layer.config.ffn.activation};
  return linear(context, layer.up, Operand::of(x), m, epilogue, b.inner, operand_dtype<Device, T>(layer.down.weight));
}

}  // namespace ftbert
