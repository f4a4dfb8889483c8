// The residual stream, and the only place where a block's result meets it.
#pragma once
#include "core/device.h"
#include "kernels/kernels.h"
#include "layers/batch.h"
#include "layers/buffers.h"
#include "layers/rank_sum.h"
#include "model/weights.h"

namespace ftbert {

// Rows of the stream between two blocks, and what the products of a call do of the norms between them.
template <class Device, class T>
struct Stream {
  T* x = nullptr;       // [rows, hidden] what blocks are added to
  T* normed = nullptr;  // [all rows, hidden] room for what the next block reads, where that is not the stream
  int64_t first = 0;    // x is this row of all
  NormedBy by = NormedBy::kernels;
  RowMoments moments[2] = {};       // of the sums of a layer's two blocks
  uint32_t* tile_counts = nullptr;  // [kTileCounts]
  // With norms that products do there is one run. `sum`: what the next block is added to; where norms follow sums that
  // is not x. `next`: what the next block reads.
  Edge<T> sum = {}, next = {};

  Stream from(int64_t row, int64_t cols) const {
    Stream rest = *this;
    rest.x += row * cols, rest.first += row;
    return rest;
  }
  // Of a layer's first or second block the first or last product.
  Deferral deferral(int block, bool last) const {
    return {by, moments[block], tile_counts ? tile_counts + last : nullptr};
  }
  // What a block's first product reads that has this norm before it. Rows with scales are always apart from the stream.
  Edge<T> read(const Linear<T>& next_product, const Norm<T>& before) const {
    if (next.rows) return next;
    Operand apart = wished_by(next_product, normed);
    if (!apart.scaled()) {
      if (!before) return {Operand::of(x)};
      apart = Operand::of(normed);
    }
    return {apart.from(first, next_product.weight.k)};
  }
  // The same where it is apart from the stream; else without data.
  Operand read_apart(const Linear<T>& next_product, const Norm<T>& before) const {
    const Operand a = read(next_product, before).rows;
    return before || a.scaled() ? a : Operand();
  }
};

// a [rows, k]; or what is made of it at `memory`, where `next` wishes to read numbers with a scale and a has none.
template <class Device, class T>
Operand scaled_for(Context<Device>& context, const Linear<T>& next, const Operand& a, int64_t rows, T* memory) {
  const Operand wished = wished_by(next, memory);
  if (!wished.scaled() || a.scaled()) return a;
  quantise<Device, T>(context, a.template as<T>(), rows, next.weight.k, wished);
  return wished;
}

// The most that a sum over ranks takes in a call that goes through a model with this batch.
template <class Device, class T>
size_t sum_bytes(const ModelConfig& config, const Batch& batch) {
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
  int block;                   // 0 for a layer's first block, 1 for its second
  bool keep_sum;               // norms stand before the layer's blocks: the stream is the sum
  bool read_on;                // by a product of this call's layers
};

// The same where a norm is left to products on both sides, or to the one behind: no norm kernel runs.
template <class Device, class T>
void project_and_leave(Context<Device>& context, const BlockEnd<T>& end, const Operand& a, int64_t m,
                       Stream<Device, T>& stream, const LayerBuffers<T>& b) {
  Residual<T> residual{
      .stream = stream.sum, .rows = m, .norm = end.after ? end.after : end.before_next, .read = end.read_on};
  if (end.keep_sum)
    residual.to = {.sum = stream.x, .copy = Operand::of(stream.normed)};
  else
    residual.to.normed = stream.x;
  if (const float* scale = end.product.ahead_of_norm.copy_scale; scale && end.read_on)
    residual.to.copy = {stream.normed, &formats::e4m3_tensor, scale};
  stream.next = linear(context, end.product, {a}, m,
                       {.residual = &residual, .deferral = stream.deferral(end.block, true)}, Operand::of(b.projected))
                    .rows;
  stream.sum = stream.next;
  stream.sum.rows = Operand::of(b.projected);
  if (end.keep_sum) stream.sum = {Operand::of(stream.x), end.after};
}

// stream = after(stream + result(a @ product^T + bias)), and before_next(stream) as `next` reads it. a [chunk.computed,
// k]; the first chunk.rows rows count. Three ways: the norm is left to products (project_and_leave); product and the
// one norm of the sum are one kernel, where the plan says so and there are exchanged_moments for it; or a product, then
// the norms. The product of a shard is summed over ranks behind it: by the first norm's kernel, which reads the parts
// of all ranks, or by the communicator.
template <class Device, class T>
void project_and_add(Context<Device>& context, const BlockEnd<T>& end, const Operand& a, const Chunk& chunk,
                     Stream<Device, T>& stream, LayerBuffers<T>& b) {
  if (stream.by != NormedBy::kernels) return project_and_leave(context, end, a, chunk.computed, stream, b);
  const Linear<T>& block = end.product;
  const int64_t rows = chunk.rows, cols = block.weight.n;
  // The first norm of the sum; where it is for the next block alone the stream keeps the sum.
  const bool keep_sum = !end.after && end.before_next, second = end.after && end.before_next;
  const Norm<T>& first = keep_sum ? end.before_next : end.after;
  const Operand apart = end.next ? stream.read_apart(*end.next, end.before_next) : Operand();
  Output<T> to{.copy = second ? Operand() : apart};
  (keep_sum ? to.sum : to.normed) = stream.x;
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
  const auto product = [&](T* at, const Residual<T>* residual) {
    return linear(context, block, {a}, chunk.computed, {.bias = false, .residual = residual}, Operand::of(at));
  };
  if (block.shard.whole()) {
    const Residual<T> residual{{Operand::of(stream.x)}, rows, first, to, false, &b.exchanged_moments};
    const Made<T> made = product(b.projected, end.result || second ? nullptr : &residual);
    if (!made.added) norms(static_cast<const T*>(made.rows.rows.template as<T>()));
    return;
  }
  with_sum_over_ranks(
      context, *context.communicator, end.block, chunk.computed, rows, cols, b.projected,
      [&](T* at) -> const T* { return product(at, nullptr).rows.rows.template as<T>(); }, norms);
}

}  // namespace ftbert
