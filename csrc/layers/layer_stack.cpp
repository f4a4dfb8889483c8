#include "layers/layer_stack.h"

#include <algorithm>

#include "core/dispatch.h"
#include "layers/attention.h"

namespace ftbert {
namespace {

// A layer's second block up to its last product: activation(norm(x) @ up^T + bias) of the stream's first m rows, with a
// gate activation(its columns) * the others, as the block's last product wishes to read it: [m, inter] at b.inner or
// b.scaled_inner, or in memory of the product's library.
template <class Device, class T>
Operand feed_forward(Context<Device>& context, const Layer<T>& layer, const Stream<Device, T>& stream, int64_t m,
                     const LayerBuffers<T>& b) {
  const FeedForwardConfig& ffn = layer.config.ffn;
  const Operand inner = wished_by(layer.down, b.inner);
  const Made<T> made = linear(context, layer.up, stream.read(layer.up, layer.ffn_norms.before), m,
                              {.activation = ffn.activation,
                               .gate = ffn.gated ? Gate::pairs : Gate::none,
                               .deferral = stream.deferral(1, false)},
                              inner);
  return scaled_for<Device, T>(context, layer.down, made.rows.rows, m, b.scaled_inner);
}

}  // namespace

template <class Device, class T>
void LayerStack<Device, T>::carve(Workspace& workspace, int64_t rows, LayerBuffers<T>& b) const {
  const auto scaled = [](const Linear<T>& next) { return wished_by<T>(next, nullptr).scaled(); };
  bool apart = false;
  for (const Layer<T>& l : weights_.layers)
    apart = apart || l.attention_norms.before || l.ffn_norms.before || scaled(l.qkv) || scaled(l.up);
  if (apart) b.normed = workspace.take<T>(rows_with_slack<Device>(rows) * config_.hidden);
}

template <class Device, class T>
Operand LayerStack<Device, T>::read_first(const LayerBuffers<T>& b) const {
  if (config_.depth() == 0 || weights_.layers[0].attention_norms.before) return {};
  return Stream<Device, T>{.normed = b.normed}.read_apart(weights_.layers[0].qkv, {});
}

template <class Device, class T>
void LayerStack<Device, T>::norm_rows(Context<Device>& context, const T* x, const Norm<T>& norm, int64_t rows,
                                      const Output<T>& out) const {
  if (norm) add_bias_input_layernorm<Device, T>(context, x, nullptr, nullptr, norm, rows, config_.hidden, out);
}

template <class Device, class T>
void LayerStack<Device, T>::begin(Context<Device>& context, int64_t rows, const Stream<Device, T>& stream) const {
  const bool empty = config_.depth() == 0;
  const Norm<T>& norm = empty ? weights_.final_norm : weights_.layers[0].attention_norms.before;
  if (empty)
    norm_rows(context, stream.x, norm, rows, {.normed = stream.x});
  else if (norm)
    norm_rows(context, stream.x, norm, rows, {.copy = stream.read(weights_.layers[0].qkv, norm).rows});
}

template <class Device, class T>
void LayerStack<Device, T>::finish(Context<Device>& context, int64_t i, int64_t layers, const Operand& attended,
                                   int64_t rows, LayerBuffers<T>& b, Stream<Device, T>& stream,
                                   const Norm<T>& final) const {
  const Norm<T> absent;
  const Layer<T>& layer = weights_.layers[i];
  const bool last = i + 1 == config_.depth(), keep_sum = layer.config.norm_place == NormPlace::pre;
  const BlockNorms<T>&of_attention = layer.attention_norms, &of_ffn = layer.ffn_norms;
  // The model's final norm is that after the last sum, or a second one.
  const Norm<T>& behind = last && !of_ffn.after ? final : of_ffn.after;
  const bool second = last && of_ffn.after && final;
  const Norm<T>& next = last ? absent : weights_.layers[i + 1].attention_norms.before;
  const Linear<T>* const next_product = last ? nullptr : &weights_.layers[i + 1].qkv;
  const BlockEnd<T> of_first{layer.out, of_attention.result, of_attention.after, of_ffn.before, &layer.up, 0, keep_sum,
                             true};
  const BlockEnd<T> of_second{layer.down, of_ffn.result, behind, next, next_product, 1, keep_sum, i + 1 < layers};
  const auto of_chunk = [&](const Chunk& chunk, Stream<Device, T>& part) {
    const Operand a = scaled_for<Device, T>(context, layer.out, attended.from(chunk.first, layer.out.weight.k),
                                            chunk.rows, b.qkv);  // which nobody reads any more
    project_and_add(context, of_first, a, chunk, part, b);
    const Operand inner = feed_forward(context, layer, part, chunk.computed, b);
    project_and_add(context, of_second, inner, chunk, part, b);
    if (second) norm_rows(context, part.x, final, chunk.rows, {.normed = part.x});
  };
  if (stream.by != NormedBy::kernels) {
    const int64_t computed = stream.by == NormedBy::reader ? rows : product_rows(context, layer.out, rows);
    return of_chunk({0, rows, computed}, stream);
  }
  for (const Chunk& chunk : chunks_of(context, layer.out, rows)) {
    Stream<Device, T> part = stream.from(chunk.first, config_.hidden);
    of_chunk(chunk, part);
  }
}

template <class Device, class T>
void LayerStack<Device, T>::convolve(Context<Device>& context, const Batch& batch, const Run& run, const T* x,
                                     const LayerBuffers<T>& b) const {
  const Convolution& c = *config_.convolution;
  neighbour_rows<Device, T>(context, x, batch.of(run), batch.columns, c.kernel, config_.hidden, b.neighbours);
  const Made<T> made = linear(context, weights_.convolution, {Operand::of(b.neighbours)}, run.tokens,
                              {.activation = c.activation, .in_one_piece = true}, Operand::of(b.convolved));
  const T* const at = made.rows.rows.template as<T>();
  if (at != b.convolved) copy_on_device(context, at, b.convolved, run.tokens * config_.hidden * sizeof(T));
}

template <class Device, class T>
void LayerStack<Device, T>::add_convolved(Context<Device>& context, int64_t rows, const Stream<Device, T>& stream,
                                          const LayerBuffers<T>& b) const {
  const Layer<T>* const next = config_.depth() > 1 ? &weights_.layers[1] : nullptr;  // none: of a stage's only layer
  const Operand apart = next ? stream.read_apart(next->qkv, next->attention_norms.before) : Operand();
  add_bias_input_layernorm<Device, T>(context, b.convolved, nullptr, stream.x, weights_.convolution_norm, rows,
                                      config_.hidden, {.normed = stream.x, .copy = apart});
}

template <class Device, class T>
void LayerStack<Device, T>::settle(Context<Device>& context, int64_t rows, int64_t layers,
                                   const Stream<Device, T>& stream) const {
  const T* const x = stream.sum.rows.template as<T>();
  if (!stream.sum.pending)
    return norm_rows(context, x, stream.next.pending, rows, {.copy = Operand::of(stream.normed)});
  const Stream<Device, T> settled{.x = stream.x, .normed = stream.normed};
  norm_rows(context, x, stream.sum.pending, rows,
            {.normed = stream.x,
             .copy = layers < config_.depth() ? settled.read_apart(weights_.layers[layers].qkv, {}) : Operand()});
}

template <class Device, class T>
void LayerStack<Device, T>::run(Context<Device>& context, const Batch& batch, const std::vector<Run>& runs,
                                int64_t layers, LayerBuffers<T>& b, T* x, const HiddenStateHook<T>& hook,
                                NormedBy by) const {
  std::vector<Stream<Device, T>> streams;
  for (const Run& run : runs) streams.push_back(Stream<Device, T>{x, b.normed}.from(run.first_token, config_.hidden));
  if (by != NormedBy::kernels) {
    Stream<Device, T>& stream = streams.front();
    stream.by = by, stream.tile_counts = b.tile_counts;
    if (by == NormedBy::moments) {
      const int64_t words = gemm_rows(context, batch.tokens()) * kMomentWords;
      stream.moments[0] = {b.deferred_moments}, stream.moments[1] = {b.deferred_moments + words};
    }
    stream.sum = {Operand::of(x)};
  }
  if (hook && config_.depth() > 0) hook(0, x);
  for (size_t r = 0; r < runs.size(); ++r) begin(context, runs[r].tokens, streams[r]);
  if (hook && config_.depth() == 0) hook(0, x);
  const bool apart = hook && config_.states_before_final_norm;
  const Norm<T> absent;
  for (int64_t i = 0; i < layers; ++i) {
    for (size_t r = 0; r < runs.size(); ++r) {
      const Layer<T>& layer = weights_.layers[i];
      const bool convolves = i == 0 && config_.convolution;
      if (convolves) convolve(context, batch, runs[r], streams[r].x, b);
      const Operand wished = wished_by(layer.out, b.attended);
      const Operand attended = attend(context, layer, batch, runs[r], streams[r], Queries::all, path_, b,
                                      wished.scaled() ? wished : Operand::of(b.attended));
      finish(context, i, layers, attended, runs[r].tokens, b, streams[r], apart ? absent : weights_.final_norm);
      if (convolves) add_convolved(context, runs[r].tokens, streams[r], b);
    }
    if (hook) hook(i + 1, x);
    for (size_t r = 0; apart && i + 1 == config_.depth() && r < runs.size(); ++r)
      norm_rows(context, streams[r].x, weights_.final_norm, runs[r].tokens, {.normed = streams[r].x});
  }
  if (by != NormedBy::kernels) settle(context, batch.tokens(), layers, streams.front());
}

#define FTBERT_INSTANTIATE(D, T) template class LayerStack<D, T>;
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
