#include "layers/attention.h"

#include <algorithm>

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
    const Product scores{.m = seq, .n = seq, .k = heads.size, .a = t, .b = t, .c = DType::fp32, .batch = batch};
    const Product sums{
        .m = seq, .n = heads.size, .k = seq, .a = t, .b = t, .c = t, .batch = batch, .b_transposed = false};
    add_qkv_bias<Device, T>(context, heads, qkv, bias, some, b.q, b.k, b.v);
    gemm<Device, T, float>(context, scores, b.q, b.k, b.scores);
    softmax<Device, T>(context, heads, b.scores, some, policy, b.probabilities);
    gemm<Device, T, T>(context, sums, b.probabilities, b.v, b.q);
    transpose<Device, T>(context, heads, b.q, some, b.attended);
  }
}

}  // namespace

template <class Device, class T>
AttentionChoice choose_attention(const Context<Device>& context, const EncoderConfig& config,
                                 std::optional<AttentionPath> asked) {
  for (const LayerConfig& layer : config.layers) {
    const AttentionConfig& c = layer.attention;
    if (c.soft_cap > 0) {
      FTBERT_CHECK(asked != AttentionPath::fused,
                   "the fused attention path has no soft caps of scores; use the general path");
      return {AttentionPath::general, asked ? "asked for" : "the fused path has no soft caps of scores"};
    }
    if (attention_supports<Device, T>(context, c.heads)) continue;
    FTBERT_CHECK(asked != AttentionPath::fused, "the fused attention path does not support head size ", c.heads.size,
                 " in ", to_string(kDType<T>), " on this device; use the general path");
    return {AttentionPath::general,
            asked ? "asked for" : "the fused path has no kernel for this head size, dtype and device"};
  }
  return {asked.value_or(AttentionPath::fused), asked ? "asked for" : "supports this head size, dtype and device"};
}

template <class Device, class T>
Operand attend(Context<Device>& context, const Layer<T>& layer, const Batch& batch, const Run& run,
               const Stream<Device, T>& stream, Queries queries, AttentionPath path, const LayerBuffers<T>& b,
               const Operand& out) {
  const bool fused = path == AttentionPath::fused;
  const AttentionConfig& c = layer.config.attention;
  const ScorePolicy<T> policy{c.window, {layer.relative_bias, batch.columns, layer.relative_span}, c.soft_cap};
  Sequences sequences = batch.of(run);
  const bool one_each = sequences.max_q == 1 && batch.shared_prefix == 0;
  if (queries != Queries::all) sequences.max_q = 1;
  const Operand wished{b.qkv, fused && !batch.cache ? attention_operand<Device, T>(layer.qkv.weight.dtype) : kDType<T>};
  const HeadRules<T> rules{layer.q_norm, layer.k_norm, layer.rotation, batch.turns() + run.first_token};
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
  if (fused && one_each && !turned && qkv.dtype == kDType<T> &&
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
    last_rows_to_first<Device, T>(context, sequences, qkv.dtype, c.heads.width(), c.heads.qkv_width(), qkv.data);
  QueriesKeysValues found = QueriesKeysValues::side_by_side(qkv, c.heads);
  if (cache) found.k = {cache.keys, c.heads.kv_width()}, found.v = {cache.values, c.heads.kv_width()};
  if (fused) return attention<Device, T>(context, c.heads, found, sequences, policy, b.attention_scratch, out);
  attend_general(context, c.heads, qkv.as<T>(), biased ? nullptr : layer.qkv.bias, sequences, policy, b);
  return Operand::of(b.attended);
}

#define FTBERT_INSTANTIATE(D, T)                                                                                \
  template AttentionChoice choose_attention<D, T>(const Context<D>&, const EncoderConfig&,                      \
                                                  std::optional<AttentionPath>);                                \
  template Operand attend(Context<D>&, const Layer<T>&, const Batch&, const Run&, const Stream<D, T>&, Queries, \
                          AttentionPath, const LayerBuffers<T>&, const Operand&);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
