// The residual stream, and the only place where a block's result meets it.
#pragma once
#include "kernels/kernels.h"
#include "layers/batch.h"
#include "layers/buffers.h"
#include "layers/deferred_norm.h"
#include "model/weights.h"

namespace ftbert {

// Rows of the stream between two blocks.
template <class Device, class T>
struct Stream {
  T* x = nullptr;  // [rows, hidden] what blocks are added to
  Operand normed;  // [rows, hidden] the norm before the next block of it, where there is one
  // Norms wait for the next product. Where they follow sums, x then stays the first block's input.
  DeferredCall<Device, T>* deferred = nullptr;

  Stream from(int64_t row, int64_t cols) const {
    Operand part = normed;
    if (normed) part.data = static_cast<char*>(normed.data) + row * cols * bytes_of(normed.dtype);
    return {x + row * cols, part, deferred};
  }
  // What a block reads that has this norm before it.
  Operand read(const Norm<T>& before) const { return before ? normed : Operand::of(x); }
};

// A block's end: its last product, and the norms between that and the next block's first.
template <class T>
struct BlockEnd {
  const Linear<T>& product;
  const Norm<T>& result;       // of the block's result, before it is added
  const Norm<T>& after;        // of the sum
  const Norm<T>& before_next;  // of the stream, for the next block alone
};

// stream = after(stream + result(a @ product^T + bias)), normed = before_next(stream). a [chunk.computed, k]; the first
// chunk.rows rows count. Three ways: the norm is left to the next product (DeferredCall); product and the one norm of
// the sum are one kernel, where the plan says so and there are exchanged_moments for it; or a product, then the norms.
// A sum over GPUs would stand behind that product.
template <class Device, class T>
void project_and_add(Context<Device>& context, const BlockEnd<T>& end, const Operand& a, const Chunk& chunk,
                     const Stream<Device, T>& stream, LayerBuffers<T>& b) {
  const Linear<T>& block = end.product;
  const int64_t rows = chunk.rows, cols = block.weight.n;
  if (stream.deferred) return stream.deferred->add(context, block, a, end.after, end.before_next);
  // The first norm of the sum; where it is for the next block alone the stream keeps the sum.
  const bool keep_sum = !end.after && end.before_next, second = end.after && end.before_next;
  const Norm<T>& first = keep_sum ? end.before_next : end.after;
  const Output<T> to = keep_sum ? Output<T>{.sum = stream.x, .copy = stream.normed} : Output<T>{.normed = stream.x};
  if constexpr (kNormInsideProducts<Device, T>)
    if (!end.result && !second &&
        linear_norm<Device, T>(context, block, a, chunk.computed, first, rows, b.exchanged_moments, to))
      return;
  const auto norm = [&](const T* x, const T* bias, const T* input, const Norm<T>& norm, const Output<T>& out) {
    add_bias_input_layernorm<Device, T>(context, x, bias, input, norm, rows, cols, out);
  };
  const T* y = linear(context, block, a, chunk.computed, {}, Operand::of(b.projected)).template as<T>();
  const T* bias = block.bias;
  if (end.result) {
    norm(y, bias, nullptr, end.result, {.normed = b.projected});
    y = b.projected, bias = nullptr;
  }
  norm(y, bias, stream.x, first, to);
  if (second) norm(stream.x, nullptr, nullptr, end.before_next, {.copy = stream.normed});
}

}  // namespace ftbert
