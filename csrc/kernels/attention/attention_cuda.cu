// softmax(scale * q k^T + bias) v within each sequence, on packed tokens, without a score matrix in memory: the
// registry of kernels but for those of one query, of E4M3 and of products with positions, and the choice among all.
#include <array>
#include <type_traits>

#include "core/dispatch.h"
#include "kernels/attention/attention_hopper.cuh"
#include "kernels/attention/attention_mma.cuh"
#include "kernels/attention/attention_simt.cuh"

namespace ftbert {
namespace {

// ---- kernels of any GPU ----

// parameters: none, or WindowParameters.
template <class T, class Kernel, class Scores, class... Parameters>
void launch_simple(const Call<T>& call, Kernel kernel, const Scores& scores, const Grid& grid, unsigned threads,
                   size_t shared, const Parameters&... parameters) {
  using E = native_t<T>;
  launch_overlapped(call.context, "kernel attention", kernel, grid.ctas, threads, shared, 1,
                    static_cast<const E*>(call.from.q.data), call.sequences.first_q, call.sequences.cu_q,
                    call.heads.count, grid.query_blocks, scale_log2(call), bias_of(scores), native(call.plain_out()),
                    parameters...);
}

template <class T, class Scores>
WindowParameters<native_t<T>> window_parameters(const Call<T>& call, const Scores& scores) {
  using E = native_t<T>;
  const auto& [dtype, q, k, v] = call.from;
  check_rows(call.from);
  return {.k = static_cast<const E*>(k.data),
          .v = static_cast<const E*>(v.data),
          .q_stride = q.stride,
          .k_stride = k.stride,
          .v_stride = v.stride,
          .first_k = call.sequences.first_k,
          .begin_k = call.sequences.cu_k,
          .end_k = call.sequences.end_of_keys(),
          .shared = static_cast<int>(call.heads.count / call.heads.kv),
          .window = scores.template get<ScoreMember::window>()};
}

template <int kHeadSize, int kWarps, int kRowTiles, bool kBias, class T, class Scores, class... Parameters>
void launch_mma(const Call<T>& call, const Scores& scores, const Parameters&... parameters) {
  using Shape = MmaShape<kHeadSize, kWarps, kRowTiles>;
  launch_simple(call, attention_mma<native_t<T>, kHeadSize, kWarps, kRowTiles, kBias, Parameters...>, scores,
                Grid(call, Shape::kQueries), 32 * kWarps, Shape::kBytes, parameters...);
}

// Two tiles of 16 queries a warp share the fragments of keys and values, one makes twice as many blocks. Their time
// over one's, with 12 heads on an H200 that runs code for 8.0: heads of 64 2x8192 .94, 8x2048 .95, 32x512 1.02,
// 32x384 1.11; of 32 128x128 .90, 8x384 .91, 8x128 1.10; of 128 32x512 .87, 128x128 .95, 8x384 1.12. Under a causal
// mask: of 64 2x8192 1.00, 8x2048 1.05; of 32 2x8192 1.00; of 128 2x8192 .93, 8x2048 .97, 32x512 1.05. Of up to 64
// tokens the second half of 128 queries would be empty. Shared heads and other windows were not measured.
bool two_tiles_pay(const AttentionSize& size) {
  const bool large = size.head_size == 128;
  if (size.max_k <= 64 || size.blocks(128) < (large ? 4 : 2) * size.sm_count) return false;
  if (size.window.set()) return large && size.reach() >= 2048;
  return size.head_size != 64 || size.max_k >= 1024;
}

// Whole sequences: of up to 32 tokens as few warps as the longest needs, else four. kTiles: of 16 queries a warp.
template <int kWarps, int kTiles = 1>
struct WholeMma {
  static constexpr const char* kName = kWarps == 1   ? "attention_mma, 16 queries"
                                       : kWarps == 2 ? "attention_mma, 32 queries"
                                       : kTiles == 1 ? "attention_mma, 64 queries"
                                                     : "attention_mma, 128 queries";
  static constexpr ScoreMembers kReads{};
  static constexpr bool has(int64_t head_size) { return is_common_head(head_size); }
  static bool supports(const AttentionSize& size) {
    return size.mma && size.whole && (!size.hopper || (size.head_size <= 64 && kMmaOnHopper<64, kWarps, false>));
  }
  static bool guess(const AttentionSize& size) {
    return kWarps < 4 ? size.max_k <= 16 * kWarps : two_tiles_pay(size) == (kTiles == 2);
  }
  template <int kHeadSize, class T, class Scores>
  static void launch(const Call<T>& call, const Scores& scores) {
    launch_mma<kHeadSize, kWarps, kTiles, false>(call, scores);
  }
};

// The same with a bias.
template <int kTiles>
struct BiasMma {
  static constexpr const char* kName =
      kTiles == 1 ? "attention_mma, bias, 64 queries" : "attention_mma, bias, 128 queries";
  static constexpr ScoreMembers kReads{ScoreMember::bias};
  static constexpr bool has(int64_t head_size) { return is_common_head(head_size) && (kTiles == 1 || head_size == 64); }
  static bool supports(const AttentionSize& size) { return size.mma && size.whole; }
  static bool guess(const AttentionSize& size) { return kTiles == 1 || two_tiles_pay(size); }
  template <int kHeadSize, class T, class Scores>
  static void launch(const Call<T>& call, const Scores& scores) {
    launch_mma<kHeadSize, 4, kTiles, true>(call, scores);
  }
};

template <int kTiles>
struct WindowMma {
  static constexpr const char* kName =
      kTiles == 1 ? "attention_mma, window, 64 queries" : "attention_mma, window, 128 queries";
  static constexpr ScoreMembers kReads{ScoreMember::window};
  static constexpr bool has(int64_t head_size) { return kTiles == 1 || head_size == 128; }
  static bool supports(const AttentionSize& size) { return size.mma && !size.hopper; }
  static bool guess(const AttentionSize& size) { return kTiles == 1 || two_tiles_pay(size); }
  template <int kHeadSize, class T, class Scores>
  static void launch(const Call<T>& call, const Scores& scores) {
    launch_mma<kHeadSize, 4, kTiles, false>(call, scores, window_parameters(call, scores));
  }
};

struct WindowBiasMma {
  static constexpr const char* kName = "attention_mma, window and bias";
  static constexpr ScoreMembers kReads{ScoreMember::window, ScoreMember::bias};
  static constexpr bool has(int64_t) { return true; }
  static bool supports(const AttentionSize& size) { return size.mma; }
  static bool guess(const AttentionSize&) { return true; }
  template <int kHeadSize, class T, class Scores>
  static void launch(const Call<T>& call, const Scores& scores) {
    launch_mma<kHeadSize, 4, 1, true>(call, scores, window_parameters(call, scores));
  }
};

template <int kHeadSize, class T, class Scores, class... Parameters>
void launch_simt(const Call<T>& call, const Scores& scores, const Parameters&... parameters) {
  launch_simple(call, attention_simt<kHeadSize, Parameters...>, scores,
                Grid(call, kSimtThreads / kThreadsPerSimtQuery<kHeadSize>), kSimtThreads, 0, parameters...);
}

struct WholeSimt : BiasMma<1> {
  static constexpr const char* kName = "attention_simt, bias";
  static bool guess(const AttentionSize&) { return true; }
  template <int kHeadSize, class T, class Scores>
  static void launch(const Call<T>& call, const Scores& scores) {
    launch_simt<kHeadSize>(call, scores);
  }
};
struct WindowSimt : WindowBiasMma {
  static constexpr const char* kName = "attention_simt, window and bias";
  template <int kHeadSize, class T, class Scores>
  static void launch(const Call<T>& call, const Scores& scores) {
    launch_simt<kHeadSize>(call, scores, window_parameters(call, scores));
  }
};

using SimtKernels = KernelList<WholeSimt, WindowSimt>;
using MmaKernels = KernelList<WholeMma<1>, WholeMma<2>, WholeMma<4>, WholeMma<4, 2>, BiasMma<2>, BiasMma<1>,
                              WindowMma<2>, WindowMma<1>, WindowBiasMma>;

template <class T, class... Some, class... More>
constexpr auto list(KernelList<Some...>, KernelList<More...>) {
  return std::array{registered<Some, T>()..., registered<More, T>()...};
}

// ---- the choice ----

template <class T>
const AttentionKernel<T>* first_that_fits(std::span<const AttentionKernel<T>> kernels, const AttentionSize& size) {
  for (const AttentionKernel<T>& kernel : kernels)
    if (kernel.fits(size)) return &kernel;
  return nullptr;
}

template <class T>
const AttentionKernel<T>* choose(const AttentionSize& size) {
  if (const auto* kernel = first_that_fits(decode_kernels<T>(), size)) return kernel;
  if constexpr (sizeof(T) == 2)
    if (const auto* kernel = first_that_fits(e4m3_kernels<T>(), size)) return kernel;
  if (const auto* kernel = first_that_fits(position_kernels<T>(), size)) return kernel;
  return first_that_fits(attention_kernels<T>(), size);
}

// The choice for a size, kept by each thread for the last few: the layers of a call ask for the same ones in turns.
template <class T>
const AttentionKernel<T>* kept_choice(const AttentionSize& size) {
  struct Kept {
    AttentionSize size;
    const AttentionKernel<T>* kernel = nullptr;
  };
  thread_local std::array<Kept, 4> kept;
  thread_local size_t oldest = 0;
  for (const Kept& one : kept)
    if (one.kernel && one.size == size) return one.kernel;
  const AttentionKernel<T>* const kernel = choose<T>(size);
  kept[oldest++ % kept.size()] = {size, kernel};
  return kernel;
}

// Whether each token is a query and a key with as many heads, and q, k and v lie side by side. There are kernels
// compiled for this by itself, where every query sees all keys, with the parameters and the machine code that they
// would have without the rest: with more they were 2.4 % slower.
bool are_whole_sequences(const Heads& heads, const QueriesKeysValues& from, const Sequences& sequences) {
  const auto& [dtype, q, k, v] = from;
  const int64_t stride = 3 * heads.width(), bytes = heads.width() * bytes_of(dtype);
  const auto* const at = static_cast<const char*>(q.data);
  return heads.kv == heads.count && k.data == at + bytes && v.data == at + 2 * bytes && q.stride == stride &&
         k.stride == stride && v.stride == stride && sequences.cu_q == sequences.cu_k && !sequences.end_k &&
         sequences.first_q == sequences.first_k;
}

// What does not depend on the sequences.
template <class T>
AttentionSize size_of(const Context<Cuda>& context, const Heads& heads, const ScorePolicy<T>& policy, bool whole) {
  const Window& window = policy.template choose_by<ScoreMember::window>();
  return {.sm_count = context.sm_count,
          .mma = !std::is_same_v<T, bfloat16_t> || context.capability >= 80,
          .ampere = context.capability >= 80,
          .hopper = context.warpgroups == 1,
          .shared_bytes = context.shared_bytes,
          .heads = heads.count,
          .head_size = heads.size,
          .scores = policy.set(),
          .window = window,
          .whole = whole && !window.set()};
}

}  // namespace

template <class T>
std::span<const AttentionKernel<T>> attention_kernels() {
  if constexpr (std::is_same_v<T, float>) {
    static constexpr auto kAll = list<T>(SimtKernels(), KernelList<>());
    return kAll;
  } else {
    static constexpr auto kAll = list<T>(HopperKernels(), MmaKernels());
    return kAll;
  }
}

template <class Device, class T>
Operand attention(Context<Device>& context, const Heads& heads, const QueriesKeysValues& from,
                  const Sequences& sequences, const ScorePolicy<T>& policy, const AttentionScratch& scratch,
                  const Operand& out) {
  if (sequences.count == 0 || sequences.max_q == 0 || sequences.max_k == 0) return out;
  FTBERT_CHECK(from.dtype == kDType<T>, "attention on a GPU reads q, k and v in the stream's type");
  AttentionSize size = size_of(context, heads, policy, are_whole_sequences(heads, from, sequences));
  size.e4m3 = out.format == &formats::e4m3_tensor;
  size.arrivals = scratch.arrivals != nullptr;
  size.sequences = sequences.count, size.rows = sequences.rows;
  size.max_q = sequences.max_q, size.max_k = sequences.max_k;
  const AttentionKernel<T>* const kernel = kept_choice<T>(size);
  if (!kernel) {
    const std::string lacks = why_no_fused_attention<Device, T>(context, heads, size.scores);
    fail("attention: the fused path " +
         (lacks.empty() ? "reads the " + names_of(size.scores) + " of whole sequences alone" : lacks));
  }
  const AttentionCall<T> call{.context = context,
                              .heads = heads,
                              .from = from,
                              .sequences = sequences,
                              .policy = policy,
                              .scratch = scratch,
                              .out = out};
  FTBERT_CHECK(!kernel->stores_e4m3 || reinterpret_cast<uintptr_t>(out.data) % 16 == 0,
               "attention stores e4m3 from a multiple of 16 bytes on");
  kernel->run(call);
  return kernel->stores_e4m3 ? out : Operand::of(call.plain_out());
}

template <class Device, class T>
DType attention_operand(const Format&) {
  return kDType<T>;
}

template <class Device, class T>
std::string why_no_fused_attention(const Context<Device>& context, const Heads& heads, ScoreMembers set) {
  // The last kernel computes, and reads, all that another one does but for products with positions, which sequences
  // have whose tokens are all there: a cache is refused to their models (layers/kv_cache.cpp).
  const AttentionKernel<T>& last = attention_kernels<T>().back();
  if (!FusedHeads::has(heads.size)) return "has no kernel for head size " + std::to_string(heads.size);
  if (!last.supports(size_of(context, heads, ScorePolicy<T>(), false)))
    return "has no kernel in " + std::string(to_string(kDType<T>)) + " on a GPU of compute capability " +
           capability_text(context);
  AttentionSize whole = size_of(context, heads, ScorePolicy<T>(), true);
  whole.scores = set;
  for (const AttentionKernel<T>& kernel : position_kernels<T>())
    if (kernel.reads.has_all(set) && heads.kv == heads.count && kernel.supports(whole)) return "";
  const ScoreMembers unread = set.without(last.reads);
  return unread == ScoreMembers() ? "" : "has no kernel that reads the " + names_of(unread) + " of a score policy";
}

template <class T>
std::string_view attention_kernel_name(const Context<Cuda>& context, const Heads& heads, const ScorePolicy<T>& policy,
                                       int64_t sequences, int64_t length, AttentionUse use) {
  const bool decode = use == AttentionUse::decode;
  AttentionSize size = size_of(context, heads, policy, heads.kv == heads.count && !decode);
  size.arrivals = decode;
  size.max_q = decode ? 1 : length, size.max_k = length;
  size.sequences = sequences, size.rows = sequences * size.max_q;
  const AttentionKernel<T>* const kernel = choose<T>(size);
  return kernel ? kernel->name : "none";
}

FTBERT_INSTANTIATE_CUDA(attention_kernels)
FTBERT_INSTANTIATE_CUDA(attention, Cuda)
FTBERT_INSTANTIATE_CUDA(attention_operand, Cuda)
FTBERT_INSTANTIATE_CUDA(why_no_fused_attention, Cuda)
FTBERT_INSTANTIATE_CUDA(attention_kernel_name)

}  // namespace ftbert
