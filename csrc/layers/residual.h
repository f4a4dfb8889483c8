// The residual stream, and the only place where a block's result meets it.
#pragma once
#include "core/device.h"
#include "kernels/kernels.h"
#include "layers/batch.h"
#include "layers/buffers.h"
#include "layers/deferred_norm.h"
#include "layers/rank_sum.h"
#include "model/weights.h"

namespace ftbert {

// Rows of the stream between two blocks.
template <class Device, class T>
struct Stream {
  T* x = nullptr;       // [rows, hidden] what blocks are added to
  T* normed = nullptr;  // [all rows, hidden] room for what the next block reads, where that is not the stream
  int64_t first = 0;    // x is this row of all
  // Norms wait for the next product. Where they follow sums, x then stays the first block's input.
  DeferredCall<Device, T>* deferred = nullptr;

  Stream from(int64_t row, int64_t cols) const { return {x + row * cols, normed, first + row, deferred}; }
  // What a block's first product reads that has this norm before it. Rows with scales are always apart from the stream.
  Operand read(const Linear<T>& next, const Norm<T>& before) const {
    Operand apart = wished_by<Device, T>(next, normed);
    if (!apart.scaled()) {
      if (!before) return Operand::of(x);
      apart = Operand::of(normed);
    }
    return apart.from(first, next.weight.k);
  }
  // The same where it is apart from the stream; else without data.
  Operand read_apart(const Linear<T>& next, const Norm<T>& before) const {
    const Operand a = read(next, before);
    return before || a.scaled() ? a : Operand();
  }
};

// a [rows, k]; or what is made of it at `memory`, where `next` wishes to read numbers with a scale and a has none.
template <class Device, class T>
Operand scaled_for(Context<Device>& context, const Linear<T>& next, const Operand& a, int64_t rows, T* memory) {
  const Operand wished = wished_by<Device, T>(next, memory);
  if (!wished.scaled() || a.scaled()) return a;
  quantise<Device, T>(context, a.template as<T>(), rows, next.weight.k, wished);
  return wished;
}

// The most that a sum over ranks takes in a call that goes through a model with this batch.
template <class Device, class T>
size_t sum_bytes(const EncoderConfig& config, const Batch& batch) {
  return rows_with_slack<Device>(std::max(batch.tokens(), batch.output_rows())) * config.hidden * sizeof(T);
}

// A block's end: its last product, and the norms between that and the next block's first.
template <class T>
struct BlockEnd {
  const Linear<T>& product;
  const Norm<T>& result;       // of the block's result, before it is added
  const Norm<T>& after;        // of the sum
  const Norm<T>& before_next;  // of the stream, for the next block alone
  const Linear<T>* next;       // the next block's first product; nullptr: nobody reads on
  int turn;                    // 0 for a layer's first block, 1 for its second
};

// stream = after(stream + result(a @ product^T + bias)), and before_next(stream) as `next` reads it. a [chunk.computed,
// k]; the first chunk.rows rows count. Three ways: the norm is left to the next product (DeferredCall); product and the
// one norm of the sum are one kernel, where the plan says so and there are exchanged_moments for it; or a product, then
// the norms. The product of a shard is summed over ranks behind it: by the first norm's kernel, which reads the parts
// of all ranks, or by the communicator.
template <class Device, class T>
void project_and_add(Context<Device>& context, const BlockEnd<T>& end, const Operand& a, const Chunk& chunk,
                     const Stream<Device, T>& stream, LayerBuffers<T>& b) {
  const Linear<T>& block = end.product;
  const int64_t rows = chunk.rows, cols = block.weight.n;
  if (stream.deferred) return stream.deferred->add(context, block, a, end.after, end.before_next);
  // The first norm of the sum; where it is for the next block alone the stream keeps the sum.
  const bool keep_sum = !end.after && end.before_next, second = end.after && end.before_next;
  const Norm<T>& first = keep_sum ? end.before_next : end.after;
  const Operand apart = end.next ? stream.read_apart(*end.next, end.before_next) : Operand();
  Output<T> to{.copy = second ? Operand() : apart};
  (keep_sum ? to.sum : to.normed) = stream.x;
  if constexpr (kNormInsideProducts<Device, T>)
    if (!end.result && !second && block.shard.whole() &&
        linear_norm<Device, T>(context, block, a, chunk.computed, first, rows, b.exchanged_moments, to))
      return;
  const auto norm = [&](const auto& x, const T* bias, const T* input, const Norm<T>& norm, const Output<T>& out) {
    norm_of(context, context.communicator, x, bias, input, norm, rows, cols, out);
  };
  const auto norms = [&](const auto& y) {
    if (end.result) {
      norm(y, block.bias, nullptr, end.result, {.normed = b.projected});
      norm(b.projected, nullptr, stream.x, first, to);
    } else {
      norm(y, block.bias, stream.x, first, to);
    }
    if (second) norm(stream.x, nullptr, nullptr, end.before_next, {.copy = apart});
  };
  const auto product = [&](T* at) -> const T* {
    return linear(context, block, a, chunk.computed, {}, Operand::of(at)).template as<T>();
  };
  if (block.shard.whole()) return norms(product(b.projected));
  with_sum_over_ranks(context, *context.communicator, end.turn, chunk.computed, rows, cols, b.projected, product,
                      norms);
}

}  // namespace ftbert
