// The fused path's kernels of warpgroups as the registry has them: in 16 bits, without a bias. Rules give microseconds.
#pragma once
#include "device/tensor_map.h"
#include "kernels/attention/attention_launch.cuh"
#include "kernels/attention/attention_pipeline.cuh"
#include "kernels/attention/attention_short.cuh"
#include "kernels/attention/attention_wgmma.cuh"

namespace ftbert {
namespace {

// Of several blocks on a multiprocessor most find the offsets in its cache, if the first have waited for them: 64x64
// 4.85 us, past the cache 6.5. Where all does not fit L2 it is the other way round, 64x128 with 16 heads 23.1 and 22.3
// (12 heads of 64 but for that, H200): blocks then do not ask for their tiles all at once.
template <class T>
OffsetReads offset_reads(const Call<T>& call, const Grid& grid, int head_size) {
  const int64_t bytes = 8 * call.sequences.rows * call.heads.count * head_size;  // qkv and what is written
  if (!grid.room && bytes <= call.context.l2_bytes) return OffsetReads::kCached;
  return call.sequences.early ? OffsetReads::kEarly : OffsetReads::kUncached;
}

// In boxes of 64 rows.
template <class Shape, class T>
CUtensorMap rows_map(const Call<T>& call, const Rows& of, int64_t rows, int64_t columns, int box_rows = kTileKeys) {
  if (rows == 0) return {};  // there is no map of nothing
  return tensor_map(of.data, call.from.dtype, rows, columns, box_rows, Shape::kBox, of.stride);
}

// tile_keys: of a tile.
template <class Shape, class T>
WindowMaps window_maps(const Call<T>& call, const Window& window, int tile_keys = kTileKeys) {
  const auto& [dtype, q, k, v] = call.from;
  const Heads& heads = call.heads;
  const Sequences& s = call.sequences;
  check_rows(call.from);
  const int64_t shared = heads.count / heads.kv, bytes = 2 * s.max_k * heads.size * bytes_of(dtype);
  // Where sequences are short, blocks of one head run side by side. The first block brings keys to L2 for the rest, and
  // some blocks wait for memory while others compute. 64x256 64.2 -> 53.7 us, 64x256 with heads of 128 100.9 -> 89.6;
  // causal 16x1024 78.9 and 83.2 (12 heads, H100).
  const int64_t near =
      s.max_k <= 512 ? 1 : std::clamp<int64_t>(call.context.l2_bytes / 2 / bytes * shared, 1, heads.count * s.count);
  const bool keys = s.rows_k > 0;  // else nobody reads the maps, which are q's
  return {.k = rows_map<Shape>(call, keys ? k : q, keys ? s.rows_k : s.rows, heads.kv_width(), tile_keys),
          .v = rows_map<Shape>(call, keys ? v : q, keys ? s.rows_k : s.rows, heads.kv_width(), tile_keys),
          .first_k = s.first_k,
          .begin_k = s.cu_k,
          .end_k = s.end_of_keys(),
          .shared = static_cast<int>(shared),
          .near = static_cast<int>(near),
          .window = window};
}

// kernel: of attention_wgmma.cuh or attention_short.cuh; columns: of the rows of q that its map has.
template <class Shape, class T, class Kernel, class... Parameters>
void launch_hopper(const Call<T>& call, Kernel kernel, int64_t columns, const Parameters&... parameters) {
  const Grid grid(call, Shape::kQueries);
  if (call.sequences.rows == 0) return;
  launch_overlapped(call.context, "kernel attention", kernel, grid.ctas, Shape::kThreads, Shape::kBytes, 1,
                    rows_map<Shape>(call, call.from.q, call.sequences.rows, columns), call.sequences.first_q,
                    call.sequences.cu_q, offset_reads(call, grid, Shape::kHeadSize), call.heads.count,
                    grid.query_blocks, scale_log2(call), native(call.plain_out()), parameters...);
}

// ---- whole sequences, heads of up to 64 ----

struct WholeOnHopper {
  static constexpr ScoreMembers kReads{};
  static constexpr bool has(int64_t head_size) { return head_size <= 64; }
  static bool supports(const AttentionSize& size) { return size.hopper && size.whole; }
  // Else attention_mma is faster.
  static bool guess(const AttentionSize& size) { return size.max_k > 32 || size.room(); }
};

template <int kTiles>
struct ShortKernel : WholeOnHopper {
  static constexpr const char* kName = kTiles == 1 ? "attention_short, 64 keys" : "attention_short, 128 keys";
  static bool supports(const AttentionSize& size) {
    return WholeOnHopper::supports(size) && size.max_k <= kTiles * kTileKeys;
  }
  template <int kHeadSize, class T, class Scores, class... Out>
  static void launch(const Call<T>& call, const Scores&, const Out&... out) {
    using Shape = ShortAttention<kHeadSize, kTiles>;
    launch_hopper<Shape>(call, attention_short<native_t<T>, Shape, Out...>, call.from.q.stride, out...);
  }
};

template <int kGroups, int kStages, int kParts, int kSteps>
struct WholeByWarpgroups : WholeOnHopper {
  template <int kHeadSize, class T, class Scores, class... Out>
  static void launch(const Call<T>& call, const Scores&, const Out&... out) {
    using Shape = WgmmaAttention<kHeadSize, kGroups, kStages, kParts, kSteps>;
    launch_hopper<Shape>(call, attention_wgmma<native_t<T>, Shape, NoMaps, Out...>, call.from.q.stride, NoMaps(),
                         out...);
  }
};

// Two steps a tile need fewer registers, so more warpgroups fit on a multiprocessor. With heads of 32 that is faster
// where there are many blocks: 32x512 55.6 -> 49.2, 64x192 26.0 -> 19.2; but up to 128 keys only where half is padding,
// 128x128 15.8 -> 13.9, full 20.4 and 21.6. With heads of 64 only above 128 keys and where half is padding, since a
// block of two warpgroups then often has queries for one: 64x384 41.4 -> 38.0, full 85.0 and 84.9. 6 blocks a
// multiprocessor gain nothing, 8x512 with heads of 32 16.2 and 16.4, half padding 10.3 and 11.9; 9 do, 16x384 11.8 ->
// 10.6 (12 heads, H200).
struct WholeInSteps : WholeByWarpgroups<1, 2, 1, 2> {
  static constexpr const char* kName = "attention_wgmma, 64 queries, two steps";
  static bool guess(const AttentionSize& size) {
    if (!WholeOnHopper::guess(size) || size.blocks(64) <= 8 * size.sm_count) return false;
    const bool sparse = 4 * size.rows < 3 * size.sequences * size.max_k;
    return size.head_size == 32 ? sparse || size.max_k > 128 : sparse && size.max_k > 128;
  }
};
// Without room for all blocks at once two warpgroups share keys; with room there is one up to 192 keys, above that two
// divide the keys: 1x192 4.0 with one, 4.6 sharing, 4.4 dividing; 1x512 8.3, 8.7 and 7.0 (12 heads of 64, H200).
struct WholeSharing : WholeByWarpgroups<2, 5, 1, 1> {
  static constexpr const char* kName = "attention_wgmma, 128 queries";
  static bool guess(const AttentionSize& size) { return WholeOnHopper::guess(size) && !size.room(); }
};
struct WholeAlone : WholeByWarpgroups<1, 2, 1, 1> {
  static constexpr const char* kName = "attention_wgmma, 64 queries";
  static bool guess(const AttentionSize& size) { return WholeOnHopper::guess(size) && size.max_k <= 192; }
};
struct WholeDividing : WholeByWarpgroups<1, 6, 2, 1> {
  static constexpr const char* kName = "attention_wgmma, 64 queries, keys divided";
};

// ---- windows, heads of keys that serve several of queries, heads above 64 ----

template <int kLeast, int kMost>
struct WindowOnHopper {
  static constexpr ScoreMembers kReads{ScoreMember::window};
  static constexpr bool has(int64_t head_size) { return kLeast <= head_size && head_size <= kMost; }
  static bool supports(const AttentionSize& size) { return size.hopper; }
  // Else kernels of whole sequences are faster.
  static bool guess(const AttentionSize& size) { return !size.whole || size.head_size > 64; }
};
// Where 64 queries see few keys, small blocks, of which more are there at once; else many queries that share keys, for
// which L2 is the limit otherwise.
template <int kLeast, int kMost, int kGroups, int kStages, int kSteps>
struct WindowByWarpgroups : WindowOnHopper<kLeast, kMost> {
  template <int kHeadSize, class T, class Scores, class... Out>
  static void launch(const Call<T>& call, const Scores& scores, const Out&... out) {
    using Shape = WgmmaAttention<kHeadSize, kGroups, kStages, 1, kSteps>;
    launch_hopper<Shape>(call, attention_wgmma<native_t<T>, Shape, WindowMaps, Out...>, call.heads.width(),
                         window_maps<Shape>(call, scores.template get<ScoreMember::window>()), out...);
  }
};
// Of one tile of keys.
template <int kLeast, int kMost, int kSteps>
struct WindowOfOneTile : WindowByWarpgroups<kLeast, kMost, 1, 1, kSteps> {
  static constexpr const char* kName = "attention_wgmma, window, 64 keys";
  static bool supports(const AttentionSize& size) { return size.hopper && size.max_k <= kTileKeys; }
};

// Under a causal mask small blocks are faster at all lengths: 64x256 42.9 and 44.7, 2x8192 428 and 440 (12 heads of 64,
// H100).
struct SmallHeadsFewKeys : WindowByWarpgroups<1, 64, 1, 2, 2> {
  static constexpr const char* kName = "attention_wgmma, window, 64 queries, two steps";
  static bool guess(const AttentionSize& size) {
    return WindowByWarpgroups::guess(size) && (size.reach() <= 256 || size.room() || size.causal());
  }
};
struct SmallHeads : WindowByWarpgroups<1, 64, 2, 5, 1> {
  static constexpr const char* kName = "attention_wgmma, window, 128 queries";
};

struct MiddleHeadsRoom : WindowByWarpgroups<65, 128, 1, 4, 1> {
  static constexpr const char* kName = "attention_wgmma, window, 64 queries";
  static bool guess(const AttentionSize& size) { return size.room(); }
};
// Up to 128 keys, and causally up to 256, many small blocks are a little faster: 128x128 76.6 and 78.0, causal 64x256
// 77.1 and 82.8 (12 heads of 128, H100). Of windows they go through fewer tiles.
struct PipelineKernel : WindowOnHopper<128, 128> {
  static constexpr const char* kName = "attention_pipeline";
  static bool guess(const AttentionSize& size) {
    const bool small = size.causal() ? size.reach() <= 256 : size.max_k <= 128;
    return size.window.left == Window::kAll && (size.causal() || size.window.right == Window::kAll) && !small;
  }
  template <int kHeadSize, class T, class Scores, class... Out>
  static void launch(const Call<T>& call, const Scores& scores, const Out&... out) {
    using Shape = PipelinedAttention<kHeadSize, 2, 2>;
    const Sequences& s = call.sequences;
    const Grid grid(call, Shape::kQueries);
    if (s.rows == 0) return;
    const unsigned blocks = std::min(grid.ctas, static_cast<unsigned>(call.context.sm_count));
    launch_overlapped(call.context, "kernel attention", attention_pipeline<native_t<T>, Shape, Out...>, blocks,
                      Shape::kThreads, Shape::kBytes, 1, rows_map<Shape>(call, call.from.q, s.rows, call.heads.width()),
                      s.first_q, s.cu_q, static_cast<int>(s.count * call.heads.count), call.heads.count,
                      grid.query_blocks, scale_log2(call), native(call.plain_out()),
                      window_maps<Shape>(call, scores.template get<ScoreMember::window>(), Shape::kKeys), out...);
  }
};
struct MiddleHeadsFewKeys : WindowByWarpgroups<65, 128, 2, 2, 2> {
  static constexpr const char* kName = "attention_wgmma, window, 128 queries, two steps";
  static bool guess(const AttentionSize& size) { return size.reach() <= 256; }
};
struct MiddleHeads : WindowByWarpgroups<65, 128, 3, 5, 1> {
  static constexpr const char* kName = "attention_wgmma, window, 192 queries";
};

struct LargeHeads : WindowByWarpgroups<129, 256, 2, 2, 1> {
  static constexpr const char* kName = "attention_wgmma, window, 128 queries";
};

template <class... Kernels>
struct KernelList {};
using HopperKernels =
    KernelList<ShortKernel<1>, WholeInSteps, ShortKernel<2>, WholeSharing, WholeAlone, WholeDividing, SmallHeadsFewKeys,
               SmallHeads, WindowOfOneTile<65, 128, 2>, MiddleHeadsRoom, PipelineKernel, MiddleHeadsFewKeys,
               MiddleHeads, WindowOfOneTile<129, 256, 1>, LargeHeads>;

}  // namespace
}  // namespace ftbert
