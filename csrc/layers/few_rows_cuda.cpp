// The products of a call of up to eight tokens, with the norms and sums around them.
#include <algorithm>

#include "core/dispatch.h"
#include "gemm/hopper/few_rows.h"
#include "kernels/kernels.h"
#include "layers/few_rows.h"

namespace ftbert {
namespace {

template <class T>
Norm<void> untyped(const Norm<T>& norm) {
  return {norm.kind, norm.gamma, norm.beta, norm.eps, norm.offset, norm.rounding};
}

template <class T>
class FewRowsCall : public DeferredCall<Cuda, T> {
 public:
  // stream [rows, cols]; a: what the first product reads.
  FewRowsCall(const EncoderConfig& config, int64_t rows, T* stream, const LayerBuffers<T>& b, bool begins_normed)
      : config_(config),
        rows_(rows),
        stream_(stream),
        normed_(b.normed),
        counts_(b.tile_counts),
        a_(begins_normed ? b.normed : stream) {}

  Operand project(Context<Cuda>& context, const Linear<T>& linear, Activation activation, const Operand& out) override {
    const Gate gate = in_ffn_ && config_.layers[layer_].ffn.gated ? Gate::pairs : Gate::none;
    run(context, linear, Operand::of(a_), {.bias = true, .activation = activation, .gate = gate}, pending_,
        out.template as<T>(), /*add=*/false);
    return out;
  }

  void add(Context<Cuda>& context, const Linear<T>& linear, const Operand& a, const Norm<T>& after,
           const Norm<T>& before_next) override {
    run(context, linear, a, {.bias = true}, {}, stream_, /*add=*/true);
    a_ = stream_;
    of_stream_ = static_cast<bool>(after);
    pending_ = after ? after : before_next;
    layer_ += in_ffn_;
    in_ffn_ = !in_ffn_;
  }

  void settle(Context<Cuda>& context, int64_t tokens, T* x) override {
    if (!pending_) return;
    Output<T> out;
    if (of_stream_)
      out.normed = x;
    else
      out.copy = Operand::of(normed_);
    add_bias_input_layernorm<Cuda, T>(context, stream_, nullptr, nullptr, pending_, tokens, config_.hidden, out);
  }

 private:
  void run(Context<Cuda>& context, const Linear<T>& linear, const Operand& a, Epilogue epilogue, const Norm<T>& norm,
           T* c, bool add) {
    const Product product = product_of(linear, rows_, epilogue);
    const ProductData data{.a = a.template as<T>(),
                           .b = linear.weight.data,
                           .bias = product.epilogue.bias ? linear.bias : nullptr,
                           .c = c};
    run_few_rows(context, product, data, untyped(norm), add, counts_ ? counts_ + runs_++ % kTileCounts : nullptr);
  }

  const EncoderConfig& config_;
  const int64_t rows_;
  T *const stream_, *const normed_;
  uint32_t* const counts_;
  int64_t runs_ = 0;
  const T* a_;
  Norm<T> pending_;         // on a_
  bool of_stream_ = false;  // it follows the sum, and does not come before the next block alone
  int64_t layer_ = 0;       // whose product comes next
  bool in_ffn_ = false;
};

template <class T>
bool has_a_product(const Context<Cuda>& context, const Linear<T>& linear, int64_t rows) {
  return !linear.input && reinterpret_cast<uintptr_t>(linear.bias) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(linear.weight.data) % 16 == 0 &&
         few_rows_supports(gpu_of(context), kDType<T>, rows, linear.weight);
}

template <class T>
bool is_read(const Norm<T>& norm) {
  const auto aligned = [](const T* vector) { return reinterpret_cast<uintptr_t>(vector) % 16 == 0; };
  return norm.gamma && aligned(norm.gamma) && aligned(norm.beta);
}

// Before each block one norm with a gamma, or none before the first, and none behind its result.
template <class T>
bool norms_fit(const Layer<T>& layer, bool first) {
  const Norm<T>&before = layer.attention_norms.before, &between = layer.ffn_norms.before;
  return layer.config.norm_place == NormPlace::pre && !layer.attention_norms.result && !layer.ffn_norms.result &&
         (before ? is_read(before) : first) && between && is_read(between);
}

template <class T>
class FewRowsNorm : public DeferredNorm<Cuda, T> {
 public:
  FewRowsNorm(const EncoderConfig& config, const Weights<T>& weights, int64_t most)
      : config_(config), weights_(weights), most_(most) {}

  void carve(Workspace&, int64_t, LayerBuffers<T>&) const override {}

  std::unique_ptr<DeferredCall<Cuda, T>> start(const Context<Cuda>&, int64_t tokens, int64_t, const LayerBuffers<T>& b,
                                               T* x) const override {
    if (tokens > most_) return nullptr;
    const bool normed = static_cast<bool>(weights_.layers.front().attention_norms.before);
    return std::make_unique<FewRowsCall<T>>(config_, tokens, x, b, normed);
  }

  std::string sizes(const Context<Cuda>&) const override { return "1 to " + std::to_string(most_); }

 private:
  const EncoderConfig& config_;
  const Weights<T>& weights_;
  const int64_t most_;
};

}  // namespace

template <class T>
std::shared_ptr<const DeferredNorm<Cuda, T>> make_few_rows(const Context<Cuda>& context, const EncoderConfig& config,
                                                           const Weights<T>& weights, AttentionPath path) {
  if constexpr (sizeof(T) != 2) return nullptr;
  if (path != AttentionPath::fused || weights.layers.empty() || most_deferred_tokens() == 0) return nullptr;
  if (!config.shard.whole()) return nullptr;  // a part of a sum is no result to add to the stream
  int64_t most = kMostFewRows;
  for (const Layer<T>& layer : weights.layers) {
    if (!norms_fit(layer, &layer == &weights.layers.front())) return nullptr;
    for (const Linear<T>* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down})
      while (most > 0 && !has_a_product(context, *linear, most)) --most;
  }
  return most > 0 ? std::make_shared<FewRowsNorm<T>>(config, weights, most) : nullptr;
}

#define FTBERT_INSTANTIATE(T)                                                                                     \
  template std::shared_ptr<const DeferredNorm<Cuda, T>> make_few_rows(const Context<Cuda>&, const EncoderConfig&, \
                                                                      const Weights<T>&, AttentionPath);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
