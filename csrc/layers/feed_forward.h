// A layer's second block up to its last product.
#pragma once
#include "layers/buffers.h"
#include "layers/residual.h"
#include "model/weights.h"

namespace ftbert {

// activation(norm(x) @ up^T + bias) of the stream's first m rows, with a gate activation(its columns) * the others, as
// the block's last product wishes to read it: [m, inter] at b.inner or b.scaled_inner, or in memory of the product's
// library.
template <class Device, class T>
Operand feed_forward(Context<Device>& context, const Layer<T>& layer, const Stream<Device, T>& stream, int64_t m,
                     const LayerBuffers<T>& b) {
  const FeedForwardConfig& ffn = layer.config.ffn;
  const Operand inner = wished_by<Device, T>(layer.down, b.inner);
  const Made<T> made = linear(context, layer.up, stream.read(layer.up, layer.ffn_norms.before), m,
                              {.activation = ffn.activation,
                               .gate = ffn.gated ? Gate::pairs : Gate::none,
                               .deferral = stream.deferral(1, false)},
                              inner);
  return scaled_for<Device, T>(context, layer.down, made.rows.rows, m, b.scaled_inner);
}

}  // namespace ftbert
