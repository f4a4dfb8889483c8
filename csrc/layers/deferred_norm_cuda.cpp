// Which products of a layer do the work of the norms between them, and what each hands to the next.
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/device_guard.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "gemm/gpu/deferred_norm.h"
#include "kernels/kernels.h"
#include "layers/deferred_norm.h"

namespace ftbert {
int64_t most_deferred_tokens() {
  const char* value = std::getenv("FTBERT_DEFERRED_NORM");
  if (!value || std::string_view(value) == "on") return 1024;
  const std::string_view words = value;
  if (words == "off") return 0;
  FTBERT_CHECK(!words.empty() && words.size() < 10 && words.find_first_not_of("0123456789") == words.npos,
               "FTBERT_DEFERRED_NORM is \"", words,
               "\"; expected off, on, or up to how many tokens LayerNorms are deferred");
  return std::atoll(value);
}

namespace {

// Why the norms of a layer cannot be deferred, or "". first: it is the model's first.
template <class T>
std::string refusal(const Layer<T>& layer, bool first) {
  const BlockNorms<T>&of_attention = layer.attention_norms, &of_ffn = layer.ffn_norms;
  if (of_attention.result || of_ffn.result) return "a block's result has a norm of its own";
  if (layer.config.norm_place == NormPlace::pre)
    return (of_attention.before || first) && of_ffn.before ? "" : "a block has no norm before it";
  for (const BlockNorms<T>* norms : {&of_attention, &of_ffn})
    if (!norms->after.is_layernorm_with_beta()) return "a norm is no LayerNorm with gamma and beta";
  return "";
}

// Products are chosen for one layer and run in all.
bool differ(const LayerConfig& one, const LayerConfig& other) {
  return one.attention.heads.width() != other.attention.heads.width() ||
         one.attention.heads.kv_width() != other.attention.heads.kv_width() || one.ffn.inter != other.ffn.inter ||
         one.ffn.activation != other.ffn.activation || one.ffn.gated != other.ffn.gated ||
         one.norm_place != other.norm_place;
}

template <class T>
std::string refusal(const Context<Cuda>& context, const EncoderConfig& c, const Weights<T>& weights,
                    AttentionPath path) {
  if (path != AttentionPath::fused || c.relative_span > 0) return "attention has a bias or takes the general path";
  if (context.capability != 90) return "needs a GPU of capability 9.0";
  if (most_deferred_tokens() == 0) return "switched off";
  if (c.layers.empty()) return "there are no layers";
  if (!c.shard.whole()) return "products are parts of sums over several ranks";
  for (const Layer<T>& layer : weights.layers)
    if (const std::string why_not = refusal(layer, &layer == &weights.layers.front()); !why_not.empty()) return why_not;
  const LayerConfig& first = c.layers.front();
  if (first.norm_place == NormPlace::post && weights.final_norm) return "a norm follows the last layer's";
  if (c.hidden > kMostColumns) return "hidden is more than " + std::to_string(kMostColumns);
  for (const LayerConfig& layer : c.layers)
    if (differ(layer, first)) return "its layers differ";
  for (const Layer<T>& layer : weights.layers) {
    if (c.hidden % 8 != 0 || layer.config.attention.heads.width() % 8 != 0 || layer.config.ffn.inter % 8 != 0)
      return "hidden and inter must be multiples of 8";
    for (const Linear<T>* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down}) {
      const Matrix& weight = linear->weight;
      if (weight.dtype != kDType<T> || weight.per != Granularity::none || linear->input)
        return "a matrix is stored as " + std::string(to_string(weight.dtype)) + " or has scales";
      for (const void* pointer : {weight.data, static_cast<const void*>(linear->bias)})
        if (!weight.data || reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
          return "a weight is missing or does not begin at 16 bytes";
    }
  }
  return "";
}

// What gammas, betas and biases of the norms on both sides of a product make of it (gemm/gpu/deferred_norm.h).
struct CorrectionVectors {
  float *add, *slope;
};
struct SumVectors {
  float *add, *gamma, *unscale;
};
struct LayerVectors {
  CorrectionVectors qkv, up;
  SumVectors out, down, last_down;  // last_down: where this layer is the last to run
};

// The variant of wgmma_tile that each product of a layer runs, and whether that of `up` has a gate.
struct Variants {
  int qkv, out, up, down;
  Gate gate;
};

// a_ is what a block's first product reads: before the first sum what it would read anyway, then sum_, which holds the
// stream times the gamma of the norm that is pending. Where norms follow sums that is all there is of the stream. Where
// they come before blocks, the stream itself is at stream_.
template <class T>
class DeferredCallCuda : public DeferredCall<Cuda, T> {
 public:
  // stream: nullptr where norms follow sums; a: of the first product.
  DeferredCallCuda(const std::vector<LayerVectors>& vectors, const Variants& variants, int64_t layers, int64_t rows,
                   int64_t cols, const LayerBuffers<T>& b, T* stream, const T* a)
      : vectors_(vectors),
        variants_(variants),
        layers_(layers),
        rows_(rows),
        cols_(cols),
        of_attention_{b.deferred_moments},
        of_ffn_{b.deferred_moments + rows * kMomentWords},
        stream_(stream),
        sum_(stream ? b.normed : b.projected),
        a_(a) {}

  Operand project(Context<Cuda>& context, const Linear<T>& linear, Activation activation, const Operand& out) override {
    const LayerVectors& v = vectors_[layer_];
    const CorrectionVectors& vectors = in_ffn_ ? v.up : v.qkv;
    const Epilogue epilogue{.activation = activation, .gate = in_ffn_ ? variants_.gate : Gate::none};
    run_corrected(context, in_ffn_ ? variants_.up : variants_.qkv, product_of(linear, rows_, epilogue),
                  {.a = a_, .b = linear.weight.data, .c = out.template as<T>()}, vectors.add, vectors.slope, pending_,
                  moments());
    return out;
  }

  void add(Context<Cuda>& context, const Linear<T>& linear, const Operand& a, const Norm<T>& after,
           const Norm<T>& before_next) override {
    const LayerVectors& v = vectors_[layer_];
    const SumVectors& vectors = !in_ffn_ ? v.out : layer_ + 1 < layers_ ? v.down : v.last_down;
    const Norm<T>& norm = after ? after : before_next;
    const int variant = in_ffn_ ? variants_.down : variants_.out;
    const Product product = product_of(linear, rows_, {});
    const ProductData data{.a = a.template as<T>(), .b = linear.weight.data, .c = sum_};
    if (stream_)
      run_keeping(context, variant, product, data, vectors.add, stream_, vectors.gamma, norm.kind == NormKind::layer,
                  moments());
    else
      run_summing(context, variant, product, data, vectors.add, a_, pending_, vectors.gamma, moments());
    a_ = sum_;
    pending_ = {vectors.gamma, vectors.unscale, moments(), norm.eps};
    norm_ = norm;
    of_stream_ = static_cast<bool>(after);
    layer_ += in_ffn_;
    in_ffn_ = !in_ffn_;
  }

  void settle(Context<Cuda>& context, int64_t tokens, T* x) override {
    if (!norm_) return;
    Output<T> out;
    if (of_stream_)
      out.normed = x;
    else
      out.copy = Operand::of(sum_);
    add_bias_input_layernorm<Cuda, T>(context, stream_ ? stream_ : sum_, nullptr, nullptr, norm_, tokens, cols_, out);
  }

 private:
  DeferredMoments moments() const { return in_ffn_ ? of_ffn_ : of_attention_; }

  const std::vector<LayerVectors>& vectors_;
  const Variants variants_;
  const int64_t layers_, rows_, cols_;
  const DeferredMoments of_attention_, of_ffn_;
  T* const stream_;  // [rows, hidden]
  T* const sum_;     // [rows, hidden]
  const T* a_;       // [rows, hidden]
  PendingNorm pending_;
  Norm<T> norm_;            // the same, for a kernel
  bool of_stream_ = false;  // it follows the sum, and does not come before the next block alone
  int64_t layer_ = 0;       // whose product comes next
  bool in_ffn_ = false;
};

template <class T>
class DeferredNormCuda : public DeferredNorm<Cuda, T> {
 public:
  DeferredNormCuda(const Context<Cuda>& context, const EncoderConfig& config, const Weights<T>& weights,
                   const AllocateFloats& allocate)
      : config_(config), weights_(weights), most_tokens_(most_deferred_tokens()) {
    const DeviceGuard guard(context.device);
    // left: by the sum on which a norm is pending; beta: of that norm.
    const auto corrected = [&](const Linear<T>& linear, const SumVectors& left, const T* beta) {
      const Matrix& w = linear.weight;
      const CorrectionVectors made{allocate(w.n), allocate(w.n)};
      make_correction_vectors(context, kDType<T>, w.data, linear.bias, left.gamma, beta, w.n, w.k, made.add,
                              made.slope);
      return made;
    };
    // beta: of the norm that is pending on the residual; next: the one that follows.
    const auto summing = [&](const Linear<T>& linear, const T* beta, const Norm<T>& next) {
      const int64_t n = linear.weight.n;
      const SumVectors made{allocate(n), allocate(n), allocate(1)};
      make_sum_vectors(context, kDType<T>, linear.bias, keeps_stream() ? nullptr : beta, next.gamma, next.offset,
                       keeps_stream(), n, made.add, made.gamma, made.unscale);
      return made;
    };
    const Norm<T> kernel;  // what follows the last sum
    SumVectors left{};
    Norm<T> pending;
    for (size_t i = 0; i < weights_.layers.size(); ++i) {
      const Layer<T>& layer = weights_.layers[i];
      const bool last = i + 1 == weights_.layers.size();
      const Norm<T>& behind_attention = keeps_stream() ? layer.ffn_norms.before : layer.attention_norms.after;
      const Norm<T>& behind_ffn = !keeps_stream() ? layer.ffn_norms.after
                                  : last          ? kernel
                                                  : weights_.layers[i + 1].attention_norms.before;
      LayerVectors made;
      made.qkv = corrected(layer.qkv, left, pending.beta);
      made.out = summing(layer.out, pending.beta, behind_attention);
      made.up = corrected(layer.up, made.out, behind_attention.beta);
      made.down = summing(layer.down, behind_attention.beta, behind_ffn);
      made.last_down = summing(layer.down, behind_attention.beta, kernel);
      left = made.down, pending = behind_ffn;
      vectors_.push_back(made);
    }
  }

  // The row moments of both of a layer's norms. Whether a call is deferred may depend on a table that changes
  // between this and the call.
  void carve(Workspace& workspace, int64_t tokens, LayerBuffers<T>& b) const override {
    if (tokens > most_tokens_) return;
    b.deferred_moments = workspace.take<long long>(2 * kMomentWords * rows_with_slack<Cuda>(tokens));
  }

  std::unique_ptr<DeferredCall<Cuda, T>> start(const Context<Cuda>& context, int64_t tokens, int64_t layers,
                                               const LayerBuffers<T>& b, T* x) const override {
    const std::optional<Variants> found = variants(context, tokens);
    if (!found) return nullptr;
    const bool normed = static_cast<bool>(weights_.layers.front().attention_norms.before);
    return std::make_unique<DeferredCallCuda<T>>(vectors_, *found, layers, gemm_rows(context, tokens), config_.hidden,
                                                 b, keeps_stream() ? x : nullptr, normed ? b.normed : x);
  }

  std::string sizes(const Context<Cuda>& context) const override {
    std::string all;
    for (int64_t tokens = 1, first = 0; tokens <= most_tokens_;) {
      const int64_t last = std::min(gemm_rows(context, tokens), most_tokens_);
      const bool taken = variants(context, tokens).has_value();
      if (taken && !first) first = tokens;
      if (first && (!taken || last == most_tokens_)) {
        all += (all.empty() ? "" : ", ") + std::to_string(first) + " to " + std::to_string(taken ? last : tokens - 1);
        first = 0;
      }
      tokens = last + 1;
    }
    return all;
  }

 private:
  // Norms come before blocks.
  bool keeps_stream() const { return config_.layers.front().norm_place == NormPlace::pre; }

  // The first layer speaks for all: their shapes are the same (refusal).
  std::optional<Variants> variants(const Context<Cuda>& context, int64_t tokens) const {
    if (tokens == 0 || tokens > most_tokens_) return std::nullopt;
    const Layer<T>& layer = weights_.layers.front();
    const int64_t rows = gemm_rows(context, tokens);
    const auto variant = [&](const Linear<T>& linear, Epilogue epilogue) {
      return wgmma_tile_variant(context, linear, rows, epilogue);
    };
    const Gate gate = layer.config.ffn.gated ? Gate::pairs : Gate::none;
    const Variants all{variant(layer.qkv, {.bias = true}), variant(layer.out, {}),
                       variant(layer.up, {.bias = true, .activation = layer.config.ffn.activation, .gate = gate}),
                       variant(layer.down, {}), gate};
    if (std::min({all.qkv, all.out, all.up, all.down}) < 0) return std::nullopt;
    return all;
  }

  const EncoderConfig& config_;
  const Weights<T>& weights_;
  int64_t most_tokens_;
  std::vector<LayerVectors> vectors_;
};

}  // namespace

template <class T>
DeferredNormChoice<Cuda, T> make_deferred_norm(const Context<Cuda>& context, const EncoderConfig& config,
                                               const Weights<T>& weights, AttentionPath path,
                                               const AllocateFloats& allocate) {
  if constexpr (sizeof(T) != 2) {
    return {};
  } else {
    const std::string why_not = refusal(context, config, weights, path);
    if (!why_not.empty()) return {nullptr, why_not};
    return {std::make_shared<DeferredNormCuda<T>>(context, config, weights, allocate), ""};
  }
}

#define FTBERT_INSTANTIATE(T)                                                                         \
  template DeferredNormChoice<Cuda, T> make_deferred_norm(const Context<Cuda>&, const EncoderConfig&, \
                                                          const Weights<T>&, AttentionPath, const AllocateFloats&);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
