// One query a sequence over keys in a cache.
#include <array>

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

template <class Shape, class T>
void launch_decode(const AttentionCall<T>& call, const Window& window, const NewTokens<native_t<T>>& added) {
  using E = native_t<T>;
  const auto& [dtype, q, k, v] = call.from;
  const Sequences& s = call.sequences;
  const int64_t shared = call.heads.count / call.heads.kv, blocks_a_head = (shared + Shape::kHeads - 1) / Shape::kHeads;
  const int64_t pairs = call.heads.kv * blocks_a_head * s.count;
  // Of the keys that a query sees, at most.
  const int64_t reach = std::min(s.max_k, int64_t{1} + window.left + window.right);
  constexpr bool kClusters = sizeof(E) == 2;  // in float, whose speed counts less, one kernel is enough
  const auto [splits, cluster] =
      splits_of(call.context, pairs, reach, Shape::kStep, kClusters && call.context.capability >= 90);
  const DecodeParameters<E> parameters{.q = static_cast<const E*>(q.data),
                                       .k = static_cast<const E*>(k.data),
                                       .v = static_cast<const E*>(v.data),
                                       .q_stride = q.stride,
                                       .k_stride = k.stride,
                                       .v_stride = v.stride,
                                       .out_stride = call.heads.width(),
                                       .cu_q = s.cu_q,
                                       .begin_k = s.cu_k,
                                       .end_k = s.end_of_keys(),
                                       .first_q = s.first_q,
                                       .first_k = s.first_k,
                                       .early = s.early,
                                       .window = window,
                                       .scale_log2 = scale_log2(call),
                                       .shared = static_cast<int>(shared),
                                       .blocks_a_head = static_cast<int>(blocks_a_head),
                                       .splits = static_cast<float*>(call.scratch.memory),
                                       .arrivals = call.scratch.arrivals,
                                       .added = added,
                                       .out = native(call.plain_out())};
  const auto launch = [&, splits = splits, blocks = cluster ? splits : 1](const auto& kernel) {
    launch_overlapped(call.context, "kernel attention_decode", kernel,
                      dim3(static_cast<unsigned>(splits), static_cast<unsigned>(call.heads.kv * blocks_a_head),
                           static_cast<unsigned>(s.count)),
                      kDecodeThreads, LaneRing<Shape>::bytes(call.context.capability >= 80), Presence(blocks),
                      parameters);
  };
  cluster ? launch(attention_decode_kernel<Shape, kClusters>) : launch(attention_decode_kernel<Shape, false>);
}

struct Decode {
  static constexpr const char* kName = "attention_decode";
  static constexpr ScoreMembers kReads{ScoreMember::window};
  static constexpr bool has(int64_t) { return true; }
  static bool supports(const AttentionSize& size) {
    return size.arrivals && size.max_q == 1 && size.sequences <= kMostDecodeSequences;
  }
  static bool guess(const AttentionSize&) { return true; }
  template <int kHeadSize, class T, class Scores>
  static void launch(const AttentionCall<T>& call, const Scores& scores, const NewTokens<native_t<T>>& added = {}) {
    using E = native_t<T>;
    check_rows(call.from);
    const Window& window = scores.template get<ScoreMember::window>();
    heads_a_block(call.heads.count / call.heads.kv) == 1
        ? launch_decode<DecodeShape<E, kHeadSize, 1>>(call, window, added)
        : launch_decode<DecodeShape<E, kHeadSize, kMostDecodeHeads>>(call, window, added);
  }
};

}  // namespace

template <class T>
std::span<const AttentionKernel<T>> decode_kernels() {
  static constexpr std::array kAll{registered<Decode, T>()};
  return kAll;
}

template <class T>
bool attention_of_new_tokens(Context<Cuda>& context, const Heads& heads, const HeadRules<T>& rules, const T* qkv,
                             const Sequences& sequences, const CacheRows<T>& cache, const ScorePolicy<T>& policy,
                             const AttentionScratch& scratch, T* out) {
  constexpr int kUnit = 2 * kWidth<T>;
  const auto& [q_norm, k_norm, rotation, positions] = rules;
  const AttentionSize size{.head_size = heads.size,
                           .scores = policy.set(),
                           .arrivals = scratch.arrivals != nullptr,
                           .sequences = sequences.count,
                           .max_q = sequences.max_q};
  if (!cache || sequences.count == 0 || sequences.max_k == 0 || !decode_kernels<T>().front().fits(size) ||
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
  const Operand to = Operand::of(out);
  const AttentionCall<T> call{.context = context,
                              .heads = heads,
                              .from = from,
                              .sequences = sequences,
                              .policy = policy,
                              .scratch = scratch,
                              .out = to};
  const auto scores = policy.template read<Decode::kReads>(Decode::kName);
  FusedHeads::with(heads.size, [&]<int kHeadSize>() { Decode::launch<kHeadSize>(call, scores, added); });
  return true;
}

template <class Device>
int64_t attention_arrivals() {
  return kMostSplitBlocks;
}

template <class Device, class T>
size_t attention_scratch_bytes(const Heads& heads, int64_t, AttentionUse use, int64_t) {
  if (use != AttentionUse::decode) return 0;
  return kMostSplitBlocks * heads_a_block(heads.count / heads.kv) * (heads.size + kBesideSums) * sizeof(float);
}

FTBERT_INSTANTIATE_CUDA(decode_kernels)
FTBERT_INSTANTIATE_CUDA(attention_scratch_bytes, Cuda)
#define FTBERT_INSTANTIATE(T)                                                                                          \
  template bool attention_of_new_tokens(Context<Cuda>&, const Heads&, const HeadRules<T>&, const T*, const Sequences&, \
                                        const CacheRows<T>&, const ScorePolicy<T>&, const AttentionScratch&, T*);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)
template int64_t attention_arrivals<Cuda>();

}  // namespace ftbert
