// One query a sequence over keys in a cache.
#include <cmath>

#include "core/dispatch.h"
#include "kernels/attention/attention_decode.cuh"
#include "kernels/attention/attention_launch.cuh"

namespace ftbert {
namespace {

int heads_a_block(int64_t shared) { return static_cast<int>(std::min<int64_t>(kMostDecodeHeads, shared)); }

// Among how many blocks a head's keys are divided.
struct Splits {
  int count;
  bool cluster;
};

// pairs: of sequences and heads. reach, step: keys that a query sees at most, and that a block takes at once.
Splits splits_of(const Context<Cuda>& context, int64_t pairs, int64_t reach, int64_t step, bool clusters) {
  // A block a multiprocessor has enough rounds in flight for the memory, and leaves room. Two, where keys would then
  // not be split, or each had many: on an H100 eight layers of Llama-2-7B behind 3,600 tokens took 1,014 us, not 1,059.
  constexpr int64_t kMany = 512;
  const int64_t one = std::max<int64_t>(1, context.sm_count / pairs), two = 2 * context.sm_count / pairs;
  const int64_t wished = one > 1 && reach <= kMany * one ? one : two, steps = (reach + step - 1) / step;
  const auto count = static_cast<unsigned>(
      std::max<int64_t>(1, std::min({steps, int64_t{kMostSplits}, kMostSplitBlocks / pairs, wished})));
  // Fewer, so that they are a cluster of a size that fits every GPU, as long as none has many.
  if (!clusters || count == 1 || reach > kMany * kMostInCluster) return {static_cast<int>(count), false};
  return {static_cast<int>(std::bit_floor(std::min(count, unsigned{kMostInCluster}))), true};
}

template <class E, int kHeadSize, int kHeads>
void launch_decode(const Call& call, const AttentionScratch& scratch, const NewTokens<E>& added) {
  const auto& [dtype, q, k, v] = call.from;
  const Sequences& s = call.sequences;
  const int64_t shared = call.heads.count / call.heads.kv, blocks_a_head = (shared + kHeads - 1) / kHeads;
  const int64_t pairs = call.heads.kv * blocks_a_head * s.count;
  // Of the keys that a query sees, at most.
  const int64_t reach = std::min(s.max_k, int64_t{1} + call.window.left + call.window.right);
  constexpr bool kClusters = sizeof(E) == 2;  // in float, whose speed counts less, one kernel is enough
  using Shape = DecodeShape<E, kHeadSize, kHeads>;
  const auto [splits, cluster] =
      splits_of(call.context, pairs, reach, Shape::kStep, kClusters && call.context.capability >= 90);
  const DecodeParameters<E> parameters{static_cast<const E*>(q.data),
                                       static_cast<const E*>(k.data),
                                       static_cast<const E*>(v.data),
                                       q.stride,
                                       k.stride,
                                       v.stride,
                                       call.heads.width(),
                                       s.cu_q,
                                       s.cu_k,
                                       s.end_of_keys(),
                                       s.first_q,
                                       s.first_k,
                                       s.early,
                                       call.window,
                                       call.scale_log2,
                                       static_cast<int>(shared),
                                       static_cast<int>(blocks_a_head),
                                       static_cast<float*>(scratch.memory),
                                       scratch.arrivals,
                                       added,
                                       static_cast<E*>(call.out)};
  const auto launch = [&, splits = splits, blocks = cluster ? splits : 1](const auto& kernel) {
    launch_overlapped(call.context, "kernel attention_decode", kernel,
                      dim3(static_cast<unsigned>(splits), static_cast<unsigned>(call.heads.kv * blocks_a_head),
                           static_cast<unsigned>(s.count)),
                      kDecodeThreads, LaneRing<Shape>::kBytes, Presence(blocks), parameters);
  };
  cluster ? launch(attention_decode_kernel<Shape, kClusters>) : launch(attention_decode_kernel<Shape, false>);
}

template <class E, int kHeadSize>
void launch_heads(const Call& call, const AttentionScratch& scratch, const NewTokens<E>& added) {
  heads_a_block(call.heads.count / call.heads.kv) == 1
      ? launch_decode<E, kHeadSize, 1>(call, scratch, added)
      : launch_decode<E, kHeadSize, kMostDecodeHeads>(call, scratch, added);
}

template <class E>
bool launch(const Call& call, const AttentionScratch& scratch, const NewTokens<E>& added) {
  const Sequences& s = call.sequences;
  if (!scratch.arrivals || s.max_q != 1 || call.bias_table || s.count > kMostDecodeSequences) return false;
  check_rows(call.from);
  switch (call.heads.size) {
    case 32: launch_heads<E, 32>(call, scratch, added); return true;
    case 64: launch_heads<E, 64>(call, scratch, added); return true;
    case 80: launch_heads<E, 80>(call, scratch, added); return true;
    case 96: launch_heads<E, 96>(call, scratch, added); return true;
    case 128: launch_heads<E, 128>(call, scratch, added); return true;
    case 256: launch_heads<E, 256>(call, scratch, added); return true;
    default: return false;
  }
}

}  // namespace

template <class T>
bool attention_decode(const AttentionCall& call, const AttentionScratch& scratch) {
  return launch<native_t<T>>(call, scratch, {});
}

template <class T>
bool attention_of_new_tokens(Context<Cuda>& context, const Heads& heads, const HeadRules<T>& rules, const T* qkv,
                             const Sequences& sequences, const CacheRows<T>& cache, const ScorePolicy<T>& policy,
                             const AttentionScratch& scratch, T* out) {
  constexpr int kUnit = 2 * kWidth<T>;
  const auto& [q_norm, k_norm, rotation, positions] = rules;
  if (!cache || sequences.count == 0 || sequences.max_k == 0 || policy.soft_cap > 0 || policy.bias.table ||
      (rotation && rotation.dims % kUnit != 0) ||
      !vectorizable(kWidth<T>, heads.size, q_norm.gamma, q_norm.beta, k_norm.gamma, k_norm.beta) ||
      !vectorizable(4, 0, rotation.table))
    return false;
  FTBERT_CHECK(!rotation || positions, "attention: there is a table of rotations, but no positions given");
  QueriesKeysValues from = QueriesKeysValues::side_by_side(Operand::of(qkv), heads);
  from.k = {cache.keys, heads.kv_width()}, from.v = {cache.values, heads.kv_width()};
  const NewTokens<native_t<T>> added{.q_norm = native(q_norm),
                                     .k_norm = native(k_norm),
                                     .rotation = rotation,
                                     .positions = positions,
                                     .keys_at = heads.width(),
                                     .values_at = heads.width() + heads.kv_width(),
                                     .rows = cache.count,
                                     .keys = native(cache.keys),
                                     .values = native(cache.values)};
  const AttentionCall call{.context = context,
                           .heads = heads,
                           .from = from,
                           .sequences = sequences,
                           .window = policy.window,
                           .bias_table = nullptr,
                           .bias_columns = nullptr,
                           .bias_span = 0,
                           .out = out,
                           .scale_log2 = static_cast<float>(M_LOG2E * static_cast<double>(heads.scale)),
                           .hopper = false};
  return launch<native_t<T>>(call, scratch, added);
}

template <class Device>
int64_t attention_arrivals() {
  return kMostSplitBlocks;
}

template <class Device, class T>
size_t attention_scratch_bytes(const Heads& heads, int64_t, AttentionUse use) {
  if (use != AttentionUse::decode) return 0;
  return kMostSplitBlocks * heads_a_block(heads.count / heads.kv) * (heads.size + kBesideSums) * sizeof(float);
}

#define FTBERT_INSTANTIATE(T)                                                                                          \
  template bool attention_decode<T>(const AttentionCall&, const AttentionScratch&);                                    \
  template bool attention_of_new_tokens(Context<Cuda>&, const Heads&, const HeadRules<T>&, const T*, const Sequences&, \
                                        const CacheRows<T>&, const ScorePolicy<T>&, const AttentionScratch&, T*);      \
  template size_t attention_scratch_bytes<Cuda, T>(const Heads&, int64_t, AttentionUse);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)
template int64_t attention_arrivals<Cuda>();

}  // namespace ftbert
