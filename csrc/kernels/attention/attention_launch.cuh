// Which kernel runs a call of the fused path, and its launch. Out: nothing, or E4m3Rows, which then get the result.
#pragma once
#include <algorithm>
#include <type_traits>

#include "core/check.h"
#include "device/e4m3_rows.cuh"
#include "device/launch.cuh"
#include "device/tensor_map.h"
#include "kernels/attention/attention_mma.cuh"
#include "kernels/attention/attention_pipeline.cuh"
#include "kernels/attention/attention_short.cuh"
#include "kernels/attention/attention_simt.cuh"
#include "kernels/attention/attention_wgmma.cuh"
#include "kernels/kernels.h"

namespace ftbert {

struct AttentionCall {
  const Context<Cuda>& context;
  const Heads& heads;
  const QueriesKeysValues& from;
  const Sequences& sequences;
  const Window& window;
  const void* bias_table;  // nullptr: none
  const int32_t* bias_columns;
  int bias_span;
  void* out;
  float scale_log2;  // scale * log2(e): the kernels work with powers of 2
  bool hopper;       // this GPU and this build have warpgroup instructions
};

// attention_e4m3_cuda.cu: the call, its result as out says. False, and nothing runs, where no kernel for it stores
// that.
template <class T>
bool attention_e4m3(const AttentionCall& call, const Operand& out);

// attention_decode_cuda.cu: the call by the kernel for one query a sequence. False, and nothing runs, where it is none.
template <class T>
bool attention_decode(const AttentionCall& call, const AttentionScratch& scratch);

namespace {

using Call = AttentionCall;

// Query blocks of each sequence and head, and all of them as one grid dimension (y and z end at 65535).
struct Grid {
  int query_blocks;
  unsigned ctas;
  bool room;  // for each block a multiprocessor of its own
  Grid(const Call& call, int block)
      : query_blocks(static_cast<int>((std::min(call.sequences.max_q, call.sequences.max_k) + block - 1) / block)) {
    const int64_t all = query_blocks * call.sequences.count * call.heads.count;
    FTBERT_CHECK(all <= INT32_MAX, "attention: ", all,
                 " blocks are more than one launch can have; pass fewer sequences");
    ctas = static_cast<unsigned>(all);
    room = all <= call.context.sm_count;
  }
};

template <class E>
BiasTables<E> bias_of(const Call& call) {
  return {static_cast<const E*>(call.bias_table), call.bias_columns, call.bias_span};
}

// Whether each token is a query and a key with as many heads, q, k and v lie side by side, and every query sees all
// keys. There are kernels compiled for this by itself, with the parameters and the machine code that they would have
// without the rest: with more they were 2.4 % slower.
bool whole_sequences(const Call& call) {
  const auto& [dtype, q, k, v] = call.from;
  const int64_t stride = 3 * call.heads.width(), bytes = call.heads.width() * bytes_of(dtype);
  const auto* const at = static_cast<const char*>(q.data);
  return call.window == Window() && call.heads.kv == call.heads.count && k.data == at + bytes &&
         v.data == at + 2 * bytes && q.stride == stride && k.stride == stride && v.stride == stride &&
         call.sequences.cu_q == call.sequences.cu_k && !call.sequences.end_k &&
         call.sequences.first_q == call.sequences.first_k;
}

void check_rows(const QueriesKeysValues& from) {
  const int64_t in_chunk = 16 / bytes_of(from.dtype);
  for (const Rows& rows : {from.q, from.k, from.v})
    FTBERT_CHECK(reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride % in_chunk == 0,
                 "attention on a GPU reads 16 bytes at a time: rows must begin at multiples of that");
}

template <class E>
WindowParameters<E> window_parameters(const Call& call) {
  const auto& [dtype, q, k, v] = call.from;
  check_rows(call.from);
  return {static_cast<const E*>(k.data),
          static_cast<const E*>(v.data),
          q.stride,
          k.stride,
          v.stride,
          call.sequences.first_k,
          call.sequences.cu_k,
          call.sequences.end_of_keys(),
          static_cast<int>(call.heads.count / call.heads.kv),
          call.window};
}

// parameters: none, or WindowParameters.
template <class E, class Kernel, class... Parameters>
void launch_simple(const Call& call, Kernel kernel, const Grid& grid, unsigned threads, size_t shared,
                   const Parameters&... parameters) {
  launch_overlapped(call.context, "kernel attention", kernel, grid.ctas, threads, shared, 1,
                    static_cast<const E*>(call.from.q.data), call.sequences.first_q, call.sequences.cu_q,
                    call.heads.count, grid.query_blocks, call.scale_log2, bias_of<E>(call), static_cast<E*>(call.out),
                    parameters...);
}

template <class E, int kHeadSize, int kWarps, int kRowTiles, bool kBias = false, class... Parameters>
void launch_mma(const Call& call, const Parameters&... parameters) {
  constexpr int kQueries = 16 * kWarps * kRowTiles, kBytes = attention_shared_bytes<kHeadSize, kQueries>();
  launch_simple<E>(call, attention_mma<E, kHeadSize, kWarps, kRowTiles, kBias, Parameters...>, Grid(call, kQueries),
                   32 * kWarps, kBytes, parameters...);
}

// Of 16 queries a warp: two of 128 elements do not fit the registers.
constexpr int row_tiles(int head_size) { return head_size <= 64 ? 2 : 1; }

template <int kHeadSize, class... Parameters>
void launch_simt(const Call& call, const Parameters&... parameters) {
  launch_simple<float>(call, attention_simt<kHeadSize, Parameters...>,
                       Grid(call, kSimtThreads / kThreadsPerSimtQuery<kHeadSize>), kSimtThreads, 0, parameters...);
}

// Of several blocks on a multiprocessor most find the offsets in its cache, if the first have waited for them: 64x64
// 4.85 us, past the cache 6.5. Where all does not fit L2 it is the other way round, 64x128 with 16 heads 23.1 and 22.3
// (12 heads of 64 but for that, H200): blocks then do not ask for their tiles all at once.
OffsetReads offset_reads(const Call& call, const Grid& grid, int head_size) {
  const int64_t bytes = 8 * call.sequences.rows * call.heads.count * head_size;  // qkv and what is written
  if (!grid.room && bytes <= call.context.l2_bytes) return OffsetReads::kCached;
  return call.sequences.early ? OffsetReads::kEarly : OffsetReads::kUncached;
}

// True where the kernel of two steps a tile is faster: it needs fewer registers, so more warpgroups fit on a
// multiprocessor. With heads of 32 it is where there are many blocks: 32x512 55.6 -> 49.2 us, 64x192 26.0 -> 19.2; but
// up to 128 keys only where half is padding, 128x128 15.8 -> 13.9, full 20.4 and 21.6. With heads of 64 only above 128
// keys and where half is padding, since a block of two warpgroups then often has queries for one: 64x384 41.4 -> 38.0,
// full 85.0 and 84.9. 6 blocks a multiprocessor gain nothing, 8x512 with heads of 32 16.2 us and 16.4, half padding
// 10.3 and 11.9; 9 do, 16x384 11.8 -> 10.6 (12 heads, H200). Rows, sequences and the longest may be upper bounds
// (binding/replay.cpp).
bool two_steps_are_faster(const Call& call, const Grid& blocks, int head_size) {
  if (blocks.ctas <= 8u * call.context.sm_count) return false;
  const bool sparse = 4 * call.sequences.rows < 3 * call.sequences.count * call.sequences.max_k;
  return head_size == 32 ? sparse || call.sequences.max_k > 128 : sparse && call.sequences.max_k > 128;
}

// In boxes of 64 rows.
template <class Shape>
CUtensorMap rows_map(const Call& call, const Rows& of, int64_t rows, int64_t columns, int box_rows = kTileKeys) {
  if (rows == 0) return {};  // there is no map of nothing
  return tensor_map(of.data, call.from.dtype, rows, columns, box_rows, Shape::kBox, of.stride);
}

// tile_keys: of a tile.
template <class Shape>
WindowMaps window_maps(const Call& call, int tile_keys = kTileKeys) {
  const auto& [dtype, q, k, v] = call.from;
  const Heads& heads = call.heads;
  const Sequences& s = call.sequences;
  check_rows(call.from);
  const int64_t shared = heads.count / heads.kv, bytes = 2 * s.max_k * heads.size * bytes_of(dtype);
  // Where sequences are short, blocks of one head side by side: the first reads what the others find in L2, and of the
  // blocks that run together some wait for memory while others compute. 64x256 64.2 -> 53.7 us, 64x256 with heads of
  // 128 100.9 -> 89.6; causal 16x1024 78.9 and 83.2 (12 heads, H100).
  const int64_t near =
      s.max_k <= 512 ? 1 : std::clamp<int64_t>(call.context.l2_bytes / 2 / bytes * shared, 1, heads.count * s.count);
  const bool keys = s.rows_k > 0;  // else nobody reads the maps, which are q's
  return {rows_map<Shape>(call, keys ? k : q, keys ? s.rows_k : s.rows, heads.kv_width(), tile_keys),
          rows_map<Shape>(call, keys ? v : q, keys ? s.rows_k : s.rows, heads.kv_width(), tile_keys),
          s.first_k,
          s.cu_k,
          s.end_of_keys(),
          static_cast<int>(shared),
          static_cast<int>(near),
          call.window};
}

// kernel: of attention_wgmma.cuh or attention_short.cuh; columns: of the rows of q that its map has.
template <class E, class Shape, class Kernel, class... Parameters>
void launch_hopper(const Call& call, Kernel kernel, int64_t columns, const Parameters&... parameters) {
  const Grid grid(call, Shape::kQueries);
  if (call.sequences.rows == 0) return;
  launch_overlapped(call.context, "kernel attention", kernel, grid.ctas, Shape::kThreads, Shape::kBytes, 1,
                    rows_map<Shape>(call, call.from.q, call.sequences.rows, columns), call.sequences.first_q,
                    call.sequences.cu_q, offset_reads(call, grid, Shape::kHeadSize), call.heads.count,
                    grid.query_blocks, call.scale_log2, static_cast<E*>(call.out), parameters...);
}

template <class E, int kHeadSize, int kTiles, class... Out>
void launch_short(const Call& call, const Out&... out) {
  using Shape = ShortAttention<kHeadSize, kTiles>;
  launch_hopper<E, Shape>(call, attention_short<E, Shape, Out...>, call.from.q.stride, out...);
}

template <class E, int kHeadSize, int kGroups, int kStages, int kParts = 1, int kSteps = 1, class... Out>
void launch_wgmma(const Call& call, const Out&... out) {
  using Shape = WgmmaAttention<kHeadSize, kGroups, kStages, kParts, kSteps>;
  launch_hopper<E, Shape>(call, attention_wgmma<E, Shape, NoMaps, Out...>, call.from.q.stride, NoMaps(), out...);
}

template <class E, int kHeadSize, int kGroups, int kStages, int kSteps, class... Out>
void launch_window_shape(const Call& call, const Out&... out) {
  using Shape = WgmmaAttention<kHeadSize, kGroups, kStages, 1, kSteps>;
  launch_hopper<E, Shape>(call, attention_wgmma<E, Shape, WindowMaps, Out...>, call.heads.width(),
                          window_maps<Shape>(call), out...);
}

template <class E, class... Out>
void launch_pipeline(const Call& call, const Out&... out) {
  using Shape = PipelinedAttention<128, 2, 2>;
  const Grid grid(call, Shape::kQueries);
  if (call.sequences.rows == 0) return;
  const unsigned blocks = std::min(grid.ctas, static_cast<unsigned>(call.context.sm_count));
  launch_overlapped(call.context, "kernel attention", attention_pipeline<E, Shape, Out...>, blocks, Shape::kThreads,
                    Shape::kBytes, 1, rows_map<Shape>(call, call.from.q, call.sequences.rows, call.heads.width()),
                    call.sequences.first_q, call.sequences.cu_q,
                    static_cast<int>(call.sequences.count * call.heads.count), call.heads.count, grid.query_blocks,
                    call.scale_log2, static_cast<E*>(call.out), window_maps<Shape>(call, Shape::kKeys), out...);
}

// Windows, heads of keys that serve several of queries, and all heads above 64. Where 64 queries see few keys, small
// blocks, of which more are there at once; else many queries that share keys, for which L2 is the limit otherwise.
template <class E, int kHeadSize, class... Out>
void launch_window(const Call& call, const Out&... out) {
  const int64_t reach = std::min(call.sequences.max_k, int64_t{64} + call.window.left + call.window.right);
  const bool room = Grid(call, 64).room;
  if constexpr (kHeadSize <= 64) {
    // Under a causal mask small blocks are faster at all lengths: 64x256 42.9 us and 44.7, 2x8192 428 and 440 (12
    // heads of 64, H100).
    if (reach <= 256 || room || call.window.right == 0) return launch_window_shape<E, kHeadSize, 1, 2, 2>(call, out...);
    launch_window_shape<E, kHeadSize, 2, 5, 1>(call, out...);
  } else if constexpr (kHeadSize <= 128) {
    if (call.sequences.max_k <= 64) return launch_window_shape<E, kHeadSize, 1, 1, 2>(call, out...);
    if (room) return launch_window_shape<E, kHeadSize, 1, 4, 1>(call, out...);
    // Up to 128 keys, and causally up to 256, many small blocks are a little faster: 128x128 76.6 us and 78.0, causal
    // 64x256 77.1 and 82.8 (12 heads of 128, H100). Of windows they go through fewer tiles.
    const bool causal = call.window.right == 0, small = causal ? reach <= 256 : call.sequences.max_k <= 128;
    const bool all = call.window.left == Window::kAll && (causal || call.window.right == Window::kAll);
    if constexpr (kHeadSize == 128)
      if (all && !small) return launch_pipeline<E>(call, out...);
    if (reach <= 256) return launch_window_shape<E, kHeadSize, 2, 2, 2>(call, out...);
    launch_window_shape<E, kHeadSize, 3, 5, 1>(call, out...);
  } else {
    if (call.sequences.max_k <= 64) return launch_window_shape<E, kHeadSize, 1, 1, 1>(call, out...);
    launch_window_shape<E, kHeadSize, 2, 2, 1>(call, out...);
  }
}

// Whole sequences on Hopper, with heads of up to 64 and no bias. False where attention_mma is faster.
//
// Above 128 keys, without room for all blocks at once two warpgroups that share keys; with room one up to 192, above
// that two that divide the keys: 1x192 4.0 us with one, 4.6 sharing, 4.4 dividing; 1x512 8.3, 8.7 and 7.0 (12 heads of
// 64, H200).
template <class E, int kHeadSize, class... Out>
bool launch_whole_hopper(const Call& call, const Out&... out) {
  const int64_t longest = call.sequences.max_k;
  const Grid blocks(call, 64);
  const bool room = blocks.room;
  if (longest <= 32 && !room) return false;
  if (longest <= 64) return launch_short<E, kHeadSize, 1>(call, out...), true;
  if (two_steps_are_faster(call, blocks, kHeadSize)) return launch_wgmma<E, kHeadSize, 1, 2, 1, 2>(call, out...), true;
  if (longest <= 128) return launch_short<E, kHeadSize, 2>(call, out...), true;
  if (!room) return launch_wgmma<E, kHeadSize, 2, 5>(call, out...), true;
  if (longest <= 192) return launch_wgmma<E, kHeadSize, 1, 2>(call, out...), true;
  return launch_wgmma<E, kHeadSize, 1, 6, 2>(call, out...), true;
}

}  // namespace
}  // namespace ftbert
