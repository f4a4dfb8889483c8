// Where a block's result meets the residual stream: the only place.
#pragma once
#include "kernels/kernels.h"
#include "layers/batch.h"
#include "layers/buffers.h"
#include "model/weights.h"

namespace ftbert {

// The stream's rows that a block's result is added to, and what becomes of the sum.
template <class T>
struct Residual {
  T* x;       // [rows, hidden] in
  T* sum;     // out, x + the block's result: the stream of pre-norm models; nullptr: not kept
  T* normed;  // out, LayerNorm(sum); may be x
};

// A block's last product, the residual sum and the norm behind it: sum = x + a @ block^T + bias, normed = norm(sum).
// a [chunk.computed, k]; the first chunk.rows rows count. Where only the norm is kept, in place, it may be one kernel:
// the plan says so, and there are norm_moments for it (post-norm models).
template <class Device, class T>
void add_residual(Context<Device>& context, const Linear<T>& block, const Operand& a, const Chunk& chunk,
                  const Norm<T>& norm, const Residual<T>& r, LayerBuffers<T>& b) {
  if (!r.sum && r.normed == r.x &&
      linear_layernorm<Device, T>(context, block, a, chunk.computed, norm, chunk.rows, b.norm_moments, r.x))
    return;
  const Operand y = linear(context, block, a, chunk.computed, {}, b.projected);
  add_bias_input_layernorm<Device, T>(context, y.as<T>(), block.bias, r.x, norm, chunk.rows, block.weight.n, r.sum,
                                      r.normed);
}

}  // namespace ftbert
