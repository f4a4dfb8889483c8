// The tables of a model's scores by position: its rows behind their norm and the projections of each layer.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"
#include "layers/buffers.h"
#include "layers/prepared.h"
#include "layers/residual.h"

namespace ftbert {
namespace {

template <class Device, class T>
class Tables {
 public:
  Tables(const Context<Device>& context, const ModelConfig& config, const Weights<T>& weights,
         const AllocateFloats& allocate)
      : context_(context), config_(config), allocate_(allocate), rows_(2 * config.position_span) {
    int64_t width = 0;
    size_t scratch = 0;
    for (const Layer<T>& layer : weights.layers) {
      width = std::max(width, layer.config.attention.heads.qkv_width());
      scratch = std::max(scratch, weight_scratch_bytes(context, layer.qkv, rows_));
    }
    const int64_t most = rows_with_slack<Device>(rows_);
    table_ = take(most * config.hidden);
    scaled_ = take(std::max(most * config.hidden, most * byte_row_bytes(config.hidden)));
    projected_ = take(most * width);
    if constexpr (std::is_same_v<Device, Cuda>)
      if (scratch > 0) context_.weight_scratch = allocate(floats(scratch)), context_.weight_scratch_bytes = scratch;
    if (weights.position_norm)
      add_bias_input_layernorm<Device, T>(context_, weights.positions, nullptr, nullptr, weights.position_norm, rows_,
                                          config.hidden, {.normed = table_});
    else
      copy_on_device(context_, weights.positions, table_, rows_ * config.hidden * sizeof(T));
    rows_of_distances();
  }

  PositionProducts<T> of(const Layer<T>& layer) {
    const PositionScores& scores = *layer.config.attention.position_scores;
    const Heads& heads = layer.config.attention.heads;
    PositionProducts<T> made = distances_;
    if (scores.shared) {
      const Operand a = scaled_for<Device, T>(context_, layer.qkv, Operand::of(table_), rows_, scaled_);
      const Made<T> all = linear(context_, layer.qkv, {a}, rows_, {.in_one_piece = true}, Operand::of(projected_));
      const T* const qkv = all.rows.rows.template as<T>();
      if (scores.keys) made.keys = table(heads, qkv + heads.width(), heads.qkv_width(), nullptr);
      if (scores.queries) made.queries = table(heads, qkv, heads.qkv_width(), nullptr);
      return made;
    }
    if (scores.keys) made.keys = projected(heads, layer.position_keys);
    if (scores.queries) made.queries = projected(heads, layer.position_queries);
    return made;
  }

 private:
  static int64_t floats(size_t bytes) { return static_cast<int64_t>((bytes + sizeof(float) - 1) / sizeof(float)); }
  T* take(int64_t count) { return reinterpret_cast<T*>(allocate_(floats(count * sizeof(T)))); }

  const T* table(const Heads& heads, const T* x, int64_t x_stride, const T* bias) {
    T* const made = take(heads.width() * distances_.stride);
    position_table<Device, T>(context_, heads, x, x_stride, bias, rows_, distances_, made);
    return made;
  }

  const T* projected(const Heads& heads, const Linear<T>& own) {
    const DType t = kDType<T>;
    const Product product{.m = rows_, .n = heads.width(), .k = config_.hidden, .a = t, .b = kFormat<T>, .c = t};
    gemm<Device, T, T>(context_, product, table_, static_cast<const T*>(own.weight.data), projected_);
    return table(heads, projected_, heads.width(), own.bias);
  }

  void rows_of_distances() {
    const std::vector<int32_t>& buckets = config_.position_buckets;
    distances_.reach = config_.position_reach();
    distances_.stride = position_stride<Device>(config_.position_span, distances_.reach);
    while (distances_.exact < std::min(distances_.reach, config_.position_span - 1) &&
           buckets[distances_.exact + 1] == distances_.exact + 1)
      ++distances_.exact;
    auto* const rows = reinterpret_cast<int32_t*>(allocate_(2 * distances_.reach + 1));
    position_rows<Device>(context_, buckets.data(), distances_.reach, config_.position_span, rows);
    distances_.rows = rows + distances_.reach;
  }

  Context<Device> context_;
  const ModelConfig& config_;
  const AllocateFloats& allocate_;
  const int64_t rows_;
  T *table_ = nullptr, *scaled_ = nullptr, *projected_ = nullptr;  // [rows, hidden] twice, [rows, qkv_width]
  PositionProducts<T> distances_;                                  // without tables
};

}  // namespace

template <class Device, class T>
Weights<T> with_position_products(const Context<Device>& context, const ModelConfig& config, Weights<T> weights,
                                  const AllocateFloats& allocate) {
  if (config.position_span == 0 || weights.layers.empty()) return weights;
  FTBERT_CHECK(allocate, "scores by position need memory for their tables");
  Tables<Device, T> tables(context, config, weights, allocate);
  for (Layer<T>& layer : weights.layers)
    if (layer.config.attention.position_scores) layer.positions = tables.of(layer);
  return weights;
}

#define FTBERT_INSTANTIATE(D, T) \
  template Weights<T> with_position_products(const Context<D>&, const ModelConfig&, Weights<T>, const AllocateFloats&);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
