#include "layers/attention.h"

#include <algorithm>
#include <type_traits>

#include "core/check.h"
#include "core/dispatch.h"
#include "layers/kv_cache.h"

namespace ftbert {
namespace {

// Where keys and values of a run go, beside those of earlier tokens.
template <class T>
CacheRows<T> cache_rows_of(const Layer<T>& layer, const Batch& batch, const Run& run) {
  if (!batch.cache) return {};
  return {batch.cache_rows + run.first_token, batch.cache->rows(), batch.cache->template keys<T>(layer.index),
          batch.cache->template values<T>(layer.index)};
}

std::string words_of(const Window& window) {
  const auto side = [](int keys) { return keys == Window::kAll ? "all" : std::to_string(keys); };
  return window.set() ? "window " + side(window.left) + ", " + side(window.right) : "all keys";
}

// "64 texts: NAME (16 to 32 tokens), ..."
template <class T>
std::string kernels_by_length(const Context<Cuda>& context, const Layer<T>& layer, int64_t texts, int64_t longest) {
  const auto name_at = [&](int64_t length) {
    return attention_kernel_name<T>(context, layer.config.attention.heads, policy_of(layer), texts, length);
  };
  std::string all = std::to_string(texts) + (texts == 1 ? " text: " : " texts: ");
  const int64_t shortest = std::min<int64_t>(16, longest);
  for (int64_t from = shortest, to = from; from <= longest; from = to = 2 * to) {
    while (2 * to <= longest && name_at(2 * to) == name_at(from)) to *= 2;
    all.append(from > shortest ? ", " : "").append(name_at(from)).append(" (").append(std::to_string(from));
    all.append(to > from ? " to " + std::to_string(to) : "").append(" tokens)");
  }
  return all;
}

// The general path, over as many sequences at a time as the buffers hold.
template <class Device, class T>
void attend_general(Context<Device>& context, const Heads& heads, const T* qkv, const T* bias,
                    const Sequences& sequences, const ScorePolicy<T>& policy, const LayerBuffers<T>& b) {
  for (int64_t first = 0; first < sequences.count; first += b.general_sequences) {
    Sequences some = sequences.from(first);
    some.count = std::min(b.general_sequences, sequences.count - first);
    if constexpr (kGeneralByLength<Device>) some.max_q = some.max_k = some.cu_q[1] - some.cu_q[0];
    const int64_t seq = some.max_k;
    if (seq == 0) continue;
    const DType t = kDType<T>;
    const int64_t batch = some.count * heads.count;
    const Product scores{
        .m = seq, .n = seq, .k = heads.size, .a = t, .b = kFormat<T>, .c = DType::fp32, .batch = batch};
    const Product sums{
        .m = seq, .n = heads.size, .k = seq, .a = t, .b = kFormat<T>, .c = t, .batch = batch, .b_transposed = false};
    add_qkv_bias<Device, T>(context, heads, qkv, bias, some, b.q, b.k, b.v);
    gemm<Device, T, float>(context, scores, b.q, b.k, b.scores);
    if (const PositionProducts<T>& positions = policy.template choose_by<ScoreMember::positions>(); positions.set())
      add_position_products<Device, T>(context, heads, b.q, b.k, some, positions, b.scores);
    softmax<Device, T>(context, heads, b.scores, some, policy.without_positions(), b.probabilities);
    gemm<Device, T, T>(context, sums, b.probabilities, b.v, b.q);
    transpose<Device, T>(context, heads, b.q, some, b.attended);
  }
}

}  // namespace

template <class Device, class T>
AttentionChoice choose_attention(const Context<Device>& context, const std::vector<Layer<T>>& layers,
                                 std::optional<AttentionPath> asked) {
  for (const Layer<T>& layer : layers) {
    const ScoreMembers set = policy_of(layer).set();
    const std::string lacks = why_no_fused_attention<Device, T>(context, layer.config.attention.heads, set);
    if (lacks.empty()) continue;
    FTBERT_CHECK(asked != AttentionPath::fused, "the fused attention path ", lacks, "; use the general path");
    return {AttentionPath::general, asked ? "asked for" : "the fused path " + lacks};
  }
  return {asked.value_or(AttentionPath::fused), asked ? "asked for" : "has kernels for these heads and scores"};
}

template <class Device, class T>
std::string describe_kernels(const Context<Device>& context, const std::vector<Layer<T>>& layers, int64_t longest) {
  std::string all;
  if constexpr (std::is_same_v<Device, Cuda>) {
    std::vector<std::string> kinds;  // of layers
    for (const Layer<T>& layer : layers) {
      const AttentionConfig& c = layer.config.attention;
      std::string kind = words_of(c.window) + ": " + kernels_by_length(context, layer, 1, longest) + "; " +
                         kernels_by_length(context, layer, 64, longest);
      if (c.window.right == 0)
        kind.append("; a token behind a cache: ")
            .append(attention_kernel_name<T>(context, c.heads, policy_of(layer), 1, longest, AttentionUse::decode));
      if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
    }
    for (const std::string& kind : kinds) all += (all.empty() ? "" : " | ") + kind;
  }
  return all;
}

template <class Device, class T>
Operand attend(Context<Device>& context, const Layer<T>& layer, const Batch& batch, const Run& run,
               const Stream<Device, T>& stream, Queries queries, AttentionPath path, const LayerBuffers<T>& b,
               const Operand& out) {
  const bool fused = path == AttentionPath::fused;
  const AttentionConfig& c = layer.config.attention;
  const ScorePolicy<T> policy = policy_of(layer, batch.columns);
  Sequences sequences = batch.of(run);
  const bool one_each = sequences.max_q == 1 && batch.shared_prefix == 0;
  if (queries != Queries::all) sequences.max_q = 1;
  // Tables of positions are of T, and so is what they are multiplied with.
  const Operand wished{b.qkv, fused && !batch.cache && !c.position_scores
                                  ? &plain_format(attention_operand<Device, T>(*layer.qkv.weight.format))
                                  : kFormat<T>};
  const HeadRules<T> rules{layer.q_norm, layer.k_norm, batch.turned_by(layer.rotation),
                           batch.turns() + run.first_token};
  // The general path adds the bias itself, in its own order, unless it belongs to what heads become.
  const bool biased = fused || rules;
  const CacheRows<T> cache = cache_rows_of(layer, batch, run);
  const HeadsWish<T> heads{c.heads, rules, static_cast<bool>(cache)};
  const Made<T> made = linear(
      context, layer.qkv, stream.read(layer.qkv, layer.attention_norms.before), run.tokens,
      {.bias = biased, .heads = rules ? &heads : nullptr, .deferral = stream.deferral(0, false), .in_one_piece = true},
      wished);
  const Operand& qkv = made.rows.rows;
  const bool turned = made.heads;
  if (fused && one_each && !turned && qkv.dtype() == kDType<T> &&
      attention_of_new_tokens(context, c.heads, rules, qkv.as<T>(), sequences, cache, policy, b.attention_scratch,
                              static_cast<T*>(out.data)))
    return Operand::of(static_cast<T*>(out.data));
  if (rules && !turned)
    rotary<Device, T>(context, c.heads, rules, run.tokens, qkv, cache);
  else if (cache)
    store_keys_values<Device, T>(context, c.heads, qkv.as<T>(), run.tokens, cache);
  if (batch.shared_prefix > 0)
    repeat_prefix<Device, T>(context, c.heads.kv_width(), batch.shared_prefix, sequences.cu_k, sequences.count,
                             cache.count, cache.keys, cache.values);
  if (queries == Queries::last)
    last_rows_to_first<Device, T>(context, sequences, qkv.dtype(), c.heads.width(), c.heads.qkv_width(), qkv.data);
  QueriesKeysValues found = QueriesKeysValues::side_by_side(qkv, c.heads);
  if (cache) found.k = {cache.keys, c.heads.kv_width()}, found.v = {cache.values, c.heads.kv_width()};
  if (fused) return attention<Device, T>(context, c.heads, found, sequences, policy, b.attention_scratch, out);
  attend_general(context, c.heads, qkv.as<T>(), biased ? nullptr : layer.qkv.bias, sequences, policy, b);
  return Operand::of(b.attended);
}

#define FTBERT_INSTANTIATE(D, T)                                                                                \
  template AttentionChoice choose_attention(const Context<D>&, const std::vector<Layer<T>>&,                    \
                                            std::optional<AttentionPath>);                                      \
  template std::string describe_kernels(const Context<D>&, const std::vector<Layer<T>>&, int64_t);              \
  template Operand attend(Context<D>&, const Layer<T>&, const Batch&, const Run&, const Stream<D, T>&, Queries, \
                          AttentionPath, const LayerBuffers<T>&, const Operand&);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
