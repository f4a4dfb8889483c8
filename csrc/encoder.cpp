#include "encoder.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

PackedBatch batch_of(const EncoderInput& input, const int32_t* columns) {
  return {input.cu_seqlens, columns, input.batch, input.tokens, input.max_seqlen};
}

// A matrix product over all rows of x, into out also where the product's library keeps the result elsewhere.
template <class Device, class T>
void linear_into(Context<Device>& context, const Linear<T>& linear, const T* x, int64_t rows, Activation activation,
                 T* out) {
  const Operand made =
      linear_all(context, linear, Operand::of(x), rows, {.bias = true, .activation = activation}, Operand::of(out));
  if (made.data != out) copy_on_device(context, made.as<T>(), out, rows * linear.weight.n * sizeof(T));
}

}  // namespace

template <class Device, class T>
struct Encoder<Device, T>::Buffers {
  int32_t* positions = nullptr;  // [tokens], where the input does not bring them
  int32_t* columns = nullptr;    // [tokens], where attention has a relative bias and ids are padded
  T* x = nullptr;                // [tokens, hidden], where the caller reads first rows only
  T* first = nullptr;            // [batch, hidden], attention's result in those rows
  T* embedded = nullptr;         // [tokens, embedding], where it is projected to hidden
  Schedule schedule;
  LayerBuffers<T> layers;
  std::vector<LayerBuffers<T>> alone;  // of threads with sequences of their own; in the memory of `layers`
};

template <class Device, class T>
Encoder<Device, T>::Encoder(const Context<Device>& context, EncoderConfig config, Weights<T> weights,
                            std::optional<AttentionPath> attention, const AllocateFloats& allocate)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      attention_(choose_attention<Device, T>(context, config_, attention)),
      layers_(config_, weights_, attention_.path) {
  constexpr DeviceKind kKind = std::is_same_v<Device, Cpu> ? DeviceKind::cpu : DeviceKind::cuda;
  for (const Layer<T>& layer : weights_.layers)
    for (const Linear<T>* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down})
      check_product_exists(kKind, *linear);
  for (const Linear<T>* linear : {&weights_.embedding_projection, &weights_.pooler})
    if (linear->weight.n > 0) check_product_exists(kKind, *linear);
  if (allocate) deferred_ = make_deferred_norm(context, config_, weights_, attention_.path, allocate);
}

template <class Device, class T>
std::string Encoder<Device, T>::deferred_state(const Context<Device>& context) const {
  if (!deferred_.maker) return "no: " + deferred_.refusal;
  const std::string sizes = deferred_.maker->sizes(context);
  return sizes.empty() ? "no: no number of tokens has all four products of a layer from wgmma_tile"
                       : "of " + sizes + " tokens";
}

template <class Device, class T>
auto Encoder<Device, T>::carve(const Context<Device>& context, Workspace& ws, const EncoderInput& input) const
    -> Buffers {
  const EncoderConfig& c = config_;
  // First rows go through the last layer all together; empty sequences make them more than tokens.
  const bool first = input.rows == OutputRows::first;
  const int64_t first_rows = first ? input.batch : 0, rows = std::max(input.tokens, first_rows);
  int64_t width = c.hidden;
  for (const LayerConfig& layer : c.layers) width = std::max(width, layer.attention.heads.width());
  Buffers b;
  if (!input.positions) b.positions = ws.take<int32_t>(input.tokens);
  if (c.relative_span > 0 && input.token_index) b.columns = ws.take<int32_t>(input.tokens);
  if (first) b.x = ws.take<T>(rows_with_slack<Device>(input.tokens) * c.hidden);
  if (first) b.first = ws.take<T>(rows_with_slack<Device>(input.batch) * width);
  if (c.embedding_projection) b.embedded = ws.take<T>(rows_with_slack<Device>(input.tokens) * c.embedding);
  LayerBuffers<T> of_batch;
  layers_.carve(ws, rows, of_batch);
  if (deferred_.maker) deferred_.maker->carve(ws, input.tokens, of_batch);

  b.schedule = make_schedule(context, batch_of(input, nullptr), attention_.path == AttentionPath::fused);
  const auto carve_run = [&](int64_t most_rows, bool alone) {
    LayerBuffers<T> made =
        carve_layer_buffers<Device, T>(ws, c, {most_rows, input.batch, input.max_seqlen, attention_.path, alone});
    made.normed = of_batch.normed, made.row_moments = of_batch.row_moments;
    return made;
  };
  const size_t shared = ws.mark();
  for (const std::vector<Run>& runs : b.schedule.alone) b.alone.push_back(carve_run(Schedule::most_tokens(runs), true));
  const size_t alone_end = ws.bytes();
  ws.release(shared);
  b.layers = carve_run(std::max(Schedule::most_tokens(b.schedule.together), first_rows), false);
  if (ws.bytes() < alone_end) ws.release(alone_end);
  return b;
}

template <class Device, class T>
size_t Encoder<Device, T>::workspace_bytes(const Context<Device>& context, const EncoderInput& input) const {
  Workspace measure;
  carve(context, measure, input);
  return measure.bytes();
}

template <class Device, class T>
void Encoder<Device, T>::find_positions(Context<Device>& context, const EncoderInput& input, int64_t most,
                                        int32_t* positions, int32_t* columns) const {
  const auto find = [&](PositionKind kind, int32_t* out) {
    padding_positions<Device>(context, kind, input.input_ids, input.token_index, input.cu_seqlens, input.batch,
                              input.seq, config_.padding_id, most, out);
  };
  find(config_.positions, positions);
  if (columns) find(PositionKind::absolute, columns);
}

// x = what the layers start from
template <class Device, class T>
void Encoder<Device, T>::embed(Context<Device>& context, const EncoderInput& input, const Buffers& b, T* x) const {
  const EncoderConfig& c = config_;
  if (!input.positions) find_positions(context, input, input.tokens, b.positions, b.columns);
  const EmbeddingTables<T> tables{weights_.word,   weights_.position, weights_.token_type,    c.vocab,
                                  c.max_positions, c.token_types,     weights_.embedding_norm};
  T* const embedded = b.embedded ? b.embedded : x;
  embeddings_layernorm<Device, T>(context, tables, input.input_ids, input.token_type_ids, input.token_index,
                                  input.positions ? input.positions : b.positions, input.tokens, c.embedding, embedded);
  if (b.embedded) linear_into(context, weights_.embedding_projection, embedded, input.tokens, Activation::none, x);
}

template <class Device, class T>
void Encoder<Device, T>::forward(Context<Device>& context, const EncoderInput& input, Workspace workspace, T* out,
                                 const HiddenStateHook<T>& hook) const {
  const bool first_only = input.rows == OutputRows::first;
  if (input.tokens > 0) {
    Buffers b = carve(context, workspace, input);
    T* const x = first_only ? b.x : out;
    embed(context, input, b, x);

    const PackedBatch batch = batch_of(input, input.columns ? input.columns : b.columns);
    const int64_t layers = config_.depth() - (first_only && config_.depth() > 0);
    if (b.alone.size() > 1 && !hook) {
      on_threads(context, static_cast<int64_t>(b.alone.size()), [&](Context<Device>& own, int64_t i) {
        layers_.run(own, batch, b.schedule.alone[i], layers, b.alone[i], x, nullptr);
      });
    } else {
      std::unique_ptr<DeferredCall<Device, T>> deferred;
      if (deferred_.maker && !hook && layers > 0)
        deferred = deferred_.maker->start(context, input.tokens, layers, b.layers, x);
      layers_.run(context, batch, b.schedule.together, layers, b.layers, x, hook, deferred.get());
    }
    if (first_only) layers_.run_first_tokens(context, batch, b.schedule.together, b.layers, x, b.first, out);
  }
  if (first_only) zero_empty_rows<Device, T>(context, input.cu_seqlens, input.batch, config_.hidden, out);
}

template <class Device, class T>
void Encoder<Device, T>::pooler(Context<Device>& context, const T* first, const int32_t* cu_seqlens, int64_t batch,
                                T* out) const {
  if (batch == 0) return;
  linear_into(context, weights_.pooler, first, batch, Activation::tanh, out);
  zero_empty_rows<Device, T>(context, cu_seqlens, batch, config_.hidden, out);
}

#define FTBERT_INSTANTIATE(D, T) template class Encoder<D, T>;
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
