#include "encoder.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/communicator.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"
#include "layers/kv_cache.h"

namespace ftbert {
namespace {

// A matrix product over all rows of x, into out also where the product's library keeps the result elsewhere.
template <class Device, class T>
void linear_into(Context<Device>& context, const Linear<T>& weights, const T* x, int64_t rows, Activation activation,
                 T* out) {
  const Made<T> made = linear(context, weights, {Operand::of(x)}, rows,
                              {.activation = activation, .in_one_piece = true}, Operand::of(out));
  const Operand& at = made.rows.rows;
  if (at.data != out) copy_on_device(context, at.as<T>(), out, rows * weights.weight.n * sizeof(T));
}

}  // namespace

template <class Device, class T>
struct Encoder<Device, T>::Buffers {
  CachePlaces places{};      // of a batch in slots of a cache
  T* read = nullptr;         // [output_rows, hidden], where a head reads them
  T* x = nullptr;            // [tokens, hidden], where not all rows are read
  T* chosen = nullptr;       // [output_rows, width], attention's result in those that are
  T* embedded = nullptr;     // [tokens, embedding], where it is projected to hidden
  float* factors = nullptr;  // [tokens] of the rows of the word table, where the model has token dropout
  float* angles = nullptr;   // Batch::angles and angle_rows, where the model needs them
  int32_t* angle_rows = nullptr;
  LayerBuffers<T> layers;
  std::vector<LayerBuffers<T>> alone;  // of threads with sequences of their own; in the memory of `layers`
};

template <class Device, class T>
Encoder<Device, T>::Encoder(const Context<Device>& context, ModelConfig config, Weights<T> weights,
                            std::optional<AttentionPath> attention, const AllocateFloats& allocate)
    : config_(std::move(config)),
      weights_(with_position_products(context, config_,
                                      with_rotary_tables(context, config_, std::move(weights), allocate), allocate)),
      attention_(choose_attention(context, weights_.layers, attention)),
      layers_(config_, weights_, attention_.path) {
  for (const Layer<T>& layer : weights_.layers)
    for (const Linear<T>* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down})
      check_product_exists(context, *linear);
  for (const Linear<T>* linear : {&weights_.embedding_projection, &weights_.convolution, &weights_.pooler})
    if (linear->weight.n > 0) check_product_exists(context, *linear);
  limits_ = prepare(context, config_, weights_, attention_.path, allocate);
}

template <class Device, class T>
size_t Encoder<Device, T>::weight_scratch_bytes(const Context<Device>& context, const Batch& batch,
                                                const Linear<T>* head) const {
  const int64_t rows = std::max(batch.tokens(), batch.output_rows());
  size_t most = head ? ftbert::weight_scratch_bytes(context, *head, batch.output_rows()) : 0;
  for (const Layer<T>& layer : weights_.layers)
    for (const Linear<T>* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down})
      most = std::max(most, ftbert::weight_scratch_bytes(context, *linear, rows));
  return most;
}

template <class Device, class T>
std::string Encoder<Device, T>::attention_kernels(const Context<Device>& context) const {
  return attention_.path == AttentionPath::fused ? describe_kernels(context, weights_.layers, config_.max_seq()) : "";
}

template <class Device, class T>
std::string Encoder<Device, T>::deferred_state(const Context<Device>& context) const {
  return ftbert::deferred_state(context, limits_, weights_);
}

template <class Device, class T>
auto Encoder<Device, T>::carve(Workspace& ws, const Batch& batch, const Schedule& schedule, bool has_head) const
    -> Buffers {
  const ModelConfig& c = config_;
  const int64_t tokens = batch.tokens();
  // Chosen rows go through the last layer all together, and may be more than tokens.
  const bool choose = batch.rows.kind != RowKind::all;
  const int64_t chosen = choose ? batch.output_rows() : 0;
  int64_t width = c.hidden;
  for (const LayerConfig& layer : c.layers) width = std::max(width, layer.attention.heads.width());
  Buffers b;
  if (batch.slots.index) b.places = take_places(ws, batch);
  if (has_head) b.read = ws.take<T>(rows_with_slack<Device>(batch.output_rows()) * c.hidden);
  if (choose) b.x = ws.take<T>(rows_with_slack<Device>(tokens) * c.hidden);
  if (choose) b.chosen = ws.take<T>(rows_with_slack<Device>(chosen) * width);
  if (c.embedding_projection) b.embedded = ws.take<T>(rows_with_slack<Device>(tokens) * c.embedding);
  if (c.token_dropout && c.stage.first()) b.factors = ws.take<float>(tokens);
  if (const Rotary* const rotary = c.stretched()) {
    b.angles = ws.take<float>(tokens * rotary->dims);
    b.angle_rows = ws.take<int32_t>(tokens);
  }
  LayerBuffers<T> of_batch;
  layers_.carve(ws, std::max(tokens, chosen), of_batch);
  if (tokens <= limits_.by_moments)
    of_batch.deferred_moments = ws.take<long long>(2 * kMomentWords * rows_with_slack<Device>(tokens));

  const auto carve_run = [&](int64_t most_rows, AttentionUse use) {
    LayerBuffers<T> made = carve_layer_buffers<Device, T>(
        ws, c, {most_rows, batch.sequences.count, batch.sequences.max_k, attention_.path, use});
    made.normed = of_batch.normed;
    made.deferred_moments = of_batch.deferred_moments;
    return made;
  };
  const size_t shared = ws.mark();
  for (const std::vector<Run>& runs : schedule.alone)
    b.alone.push_back(carve_run(Schedule::most_tokens(runs), AttentionUse::alone));
  const size_t alone_end = ws.bytes();
  ws.release(shared);
  const bool decode = batch.cache && batch.sequences.max_q == 1;
  b.layers = carve_run(std::max(Schedule::most_tokens(schedule.together), chosen),
                       decode ? AttentionUse::decode : AttentionUse::together);
  if (ws.bytes() < alone_end) ws.release(alone_end);
  return b;
}

template <class Device, class T>
auto Encoder<Device, T>::plan(const Context<Device>& context, const Batch& batch, const Linear<T>* head) const -> Plan {
  // Behind a shared prefix a sequence's layer follows the prefix's, and ranks add up the same rows in the same order.
  const bool may_work_alone =
      attention_.path == AttentionPath::fused && batch.shared_prefix == 0 && config_.shard.whole();
  Plan plan{make_schedule(context, batch.sequences, may_work_alone)};
  Workspace measure;
  carve(measure, batch, plan.schedule, head);
  plan.bytes = measure.bytes();
  return plan;
}

// x = the stream before the first layer: the embeddings, or in a later stage batch.hidden. The first product's operand
// lies beside it, where that is not x.
template <class Device, class T>
void Encoder<Device, T>::embed(Context<Device>& context, const Batch& batch, const Buffers& b, T* x) const {
  const ModelConfig& c = config_;
  const EmbeddingTables<T> tables{.word = weights_.word,
                                  .position = weights_.position,
                                  .token_type = weights_.token_type,
                                  .vocab = c.vocab,
                                  .max_positions = c.max_positions,
                                  .token_types = c.token_types,
                                  .norm = weights_.embedding_norm,
                                  .scale = static_cast<float>(c.embedding_scale)};
  const Operand copy = layers_.read_first(b.layers);
  const auto quantised = [&] {
    if (copy) quantise<Device, T>(context, x, batch.tokens(), c.hidden, copy);
  };
  if (!c.stage.first()) {
    copy_on_device(context, batch.hidden, x, batch.tokens() * c.hidden * sizeof(T));
    return quantised();
  }
  if (c.token_dropout)
    token_factors<Device>(context, batch.ids, batch.to_padded, batch.sequences.cu_q, batch.sequences.count,
                          c.token_dropout->mask_id, c.token_dropout->kept, batch.tokens(), b.factors);
  const auto sums = [&](T* out, const Operand& beside) {
    embeddings_layernorm<Device, T>(context, tables, batch.ids, batch.types, batch.to_padded, batch.positions,
                                    batch.tokens(), c.embedding, out, beside, b.factors);
  };
  if (!b.embedded) return sums(x, copy);
  sums(b.embedded, {});
  linear_into(context, weights_.embedding_projection, b.embedded, batch.tokens(), Activation::none, x);
  if (weights_.projection_norm)
    add_bias_input_layernorm<Device, T>(context, x, nullptr, nullptr, weights_.projection_norm, batch.tokens(),
                                        c.hidden, {.normed = x});
  quantised();
}

template <class Device, class T>
void Encoder<Device, T>::forward(Context<Device>& context, const Batch& given, const Plan& plan, Workspace workspace,
                                 T* out, const HiddenStateHook<T>& hook, const Linear<T>* head) const {
  Batch batch = given;
  const bool choose = batch.rows.kind != RowKind::all;
  Buffers b = carve(workspace, batch, plan.schedule, head);
  const Sequences& sequences = batch.sequences;
  if (batch.slots.index) {
    cache_places(context, batch.slots, sequences.cu_q, sequences.count, batch.tokens(), b.places);
    put_at(b.places, batch);
  }
  FTBERT_CHECK(
      batch.cache ? batch.cache_rows && attention_.path == AttentionPath::fused : sequences.cu_q == sequences.cu_k,
      "keys of earlier tokens lie in a cache, which the fused attention path reads");
  FTBERT_CHECK(config_.shard.whole() || (context.communicator && context.communicator->shard() == config_.shard),
               "these weights are rank ", config_.shard.rank, "'s of ", config_.shard.size,
               ", which compute together alone: load them with parallel=\"tensor\"");
  T* const read = head ? b.read : out;
  if (batch.tokens() > 0 && batch.output_rows() > 0) {
    FTBERT_CHECK(batch.positions, "a batch lacks its positions (layers/positions.h)");
    FTBERT_CHECK(config_.stage.first() || batch.hidden, "these weights are stage ", config_.stage.index, " of ",
                 config_.stage.count,
                 ", which goes on from what the one before has left: load them with parallel=\"pipeline\"");
    T* const x = choose ? b.x : read;
    if (b.layers.zeros) clear_on_device(context, b.layers.zeros, b.layers.zero_bytes);
    if (const Rotary* const rotary = config_.stretched()) {
      FTBERT_CHECK(!batch.cache, "rotary positions that follow a sequence's length go with no cache of its beginning");
      rotary_angles<Device>(context, rotary->frequencies.data(), rotary->dims / 2, rotary->amplitude, *rotary->stretch,
                            batch.places(), sequences.cu_q, sequences.count, batch.tokens(), b.angles, b.angle_rows);
      batch.angles = b.angles, batch.angle_rows = b.angle_rows;
    }
    embed(context, batch, b, x);
    const int64_t layers = config_.depth() - (choose && config_.depth() > 0);
    if (b.alone.size() > 1 && !hook) {
      each_alone(context, static_cast<int64_t>(b.alone.size()), [&](Context<Device>& alone, int64_t i) {
        layers_.run(alone, batch, plan.schedule.alone[i], layers, b.alone[i], x, nullptr);
      });
    } else {
      const NormedBy by = hook || layers == 0
                              ? NormedBy::kernels
                              : normed_by(context, limits_, weights_, batch.tokens(), batch.cache != nullptr);
      layers_.run(context, batch, plan.schedule.together, layers, b.layers, x, hook, by);
    }
    if (choose) layers_.run_chosen_rows(context, batch, plan.schedule.together, b.layers, x, b.chosen, read);
  }
  if (choose && batch.rows.kind != RowKind::any)
    zero_empty_rows<Device, T>(context, sequences.cu_q, sequences.count, config_.hidden, read);
  if (head) linear_into(context, *head, read, batch.output_rows(), Activation::none, out);
  // Last: after an error the slots hold what they held.
  if (batch.slots.index) cache_grow(context, batch.slots, sequences.count, b.places);
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
