// The registry's kernels that read products with positions: of whole sequences, in 16 bits, from Ampere on.
#include <array>

#include "core/dispatch.h"
#include "kernels/attention/attention_launch.cuh"
#include "kernels/attention/attention_positions.cuh"

namespace ftbert {
namespace {

template <class T>
PositionTables<native_t<T>> tables_of(const PositionProducts<T>& positions) {
  const auto places = reinterpret_cast<uintptr_t>(positions.keys) | reinterpret_cast<uintptr_t>(positions.queries);
  FTBERT_CHECK(places % 16 == 0,
               "attention on a GPU reads 16 bytes at a time: tables of positions must begin at multiples of that");
  return {native(positions.keys), native(positions.queries), positions.columns, static_cast<int>(positions.stride),
          static_cast<int>(positions.reach)};
}

// Four warps, of 16 queries each, or of 32, which read every row of keys, values and tables for twice as many.
template <int kRowTiles>
struct Positions {
  template <int kHeadSize>
  using Shape = PositionAttention<kHeadSize, 4, kRowTiles>;

  static constexpr const char* kName =
      kRowTiles == 1 ? "attention_positions, 64 queries" : "attention_positions, 128 queries";
  static constexpr ScoreMembers kReads{ScoreMember::positions};
  // Of 128 elements two times 16 queries do not fit the registers.
  static constexpr bool has(int64_t head_size) { return is_common_head(head_size) && kRowTiles * head_size <= 128; }
  static int64_t shared_bytes(int64_t head_size) {
    int64_t bytes = 0;
    FusedHeads::with(head_size, [&]<int kHeadSize>() {
      if constexpr (has(kHeadSize)) bytes = Shape<kHeadSize>::kBytes;
    });
    return bytes;
  }
  // Scores without these products are other kernels', which are faster.
  static bool supports(const AttentionSize& size) {
    return size.ampere && size.whole && size.scores.has(ScoreMember::positions) &&
           shared_bytes(size.head_size) <= size.shared_bytes;
  }
  // Many queries where sequences have them and blocks fill the GPU, two to a multiprocessor.
  static bool guess(const AttentionSize& size) {
    return kRowTiles == 1 || (size.max_k > 128 && size.blocks(Shape<64>::kQueries) >= 2 * size.sm_count);
  }
  template <int kHeadSize, class T, class Scores>
  static void launch(const Call<T>& call, const Scores& scores) {
    using E = native_t<T>;
    const Grid grid(call, Shape<kHeadSize>::kQueries);
    launch_overlapped(call.context, "kernel attention_positions", attention_positions<E, Shape<kHeadSize>>, grid.ctas,
                      Shape<kHeadSize>::kThreads, Shape<kHeadSize>::kBytes, 1, static_cast<const E*>(call.from.q.data),
                      call.sequences.first_q, call.sequences.cu_q, call.heads.count, grid.query_blocks,
                      scale_log2(call), tables_of(scores.template get<ScoreMember::positions>()),
                      native(call.plain_out()));
  }
};

}  // namespace

template <class T>
std::span<const AttentionKernel<T>> position_kernels() {
  if constexpr (std::is_same_v<T, float>) {
    return {};
  } else {
    static constexpr std::array kAll{registered<Positions<2>, T>(), registered<Positions<1>, T>()};
    return kAll;
  }
}

FTBERT_INSTANTIATE_CUDA(position_kernels)

}  // namespace ftbert
