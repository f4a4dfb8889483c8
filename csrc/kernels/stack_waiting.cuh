// What the waiting warp of layer_stack_kernel does: it waits for the other blocks, brings rows and works out their
// scales.
#pragma once
#include "kernels/stack_worker.cuh"

namespace ftbert {
namespace {

// This block's share of a unit's rows, box by box, to all blocks that read the same. A chunk of 64 columns is a tile of
// [rows, 64] in the 128-byte swizzle; zeros past the last token. What can be worked out before the wait for the rows
// is.
struct RowCopy {
  const CUtensorMap* map = nullptr;  // nullptr: nothing to copy
  int boxes, bytes, mine, shared;    // bytes: of a box; mine: the first box that this block brings
  int barriers;
  int row, chunk, chunks;
  uint32_t to, ready, ranks;  // ranks: a bit for each block that gets what this one brings

  __device__ RowCopy() {}
  template <class E>
  __device__ RowCopy(const Block<E>& block, int layer, int product) {
    const Tiling& tiling = block.plan().phases[product].tiling;
    if (!block.has_unit(tiling)) return;
    const Unit unit(tiling);
    map = product == kQkv && layer == 0 ? &block.p.first : &block.p.inputs[product];
    prefetch_map(*map);
    boxes = tiling.boxes(), bytes = tiling.box_bytes(), shared = tiling.shared, barriers = tiling.barriers();
    mine = block.rank / tiling.split % shared;
    row = unit.row0, chunk = unit.part * tiling.steps, chunks = tiling.chunks();
    to = shared_address(block.work()), ready = block.box_ready(0), ranks = 0;
    for (int i = 0; i < shared; ++i) ranks |= 1u << (block.rank + (i - mine) * tiling.split);
  }

  // By one thread, when the workers have all that came before.
  __device__ void expect() const {
    if (!map) return;
    for (int i = 0; i < barriers; ++i) barrier_expect(ready + 8 * i, boxes / barriers * bytes);
  }

  // By one thread, which has seen that others have written the rows.
  __device__ void start() const {
    if (!map) return;
    fence_global_for_async();
    for (int box = mine; box < boxes; box += shared) {
      const uint32_t barrier = ready + (barriers > 1 ? 8 * box : 0);
      if (shared == 1)
        tma_load_chunks(to + box * bytes, *map, row, chunk + box * chunks, barrier);
      else
        tma_load_chunks_shared(to + box * bytes, *map, row, chunk + box * chunks, barrier, ranks);
    }
  }
};

// From the moments of a row's tiles, what LayerNorm multiplies the row by and then adds, before gamma and beta.
template <class E>
__device__ float2 row_scale(const StackArguments<E>& p, int row) {
  const int tiles = p.hidden / kTileColumns;
  float mean[kMostSteps] = {}, squares[kMostSteps] = {}, sum = 0, total = 0;
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    if (i >= tiles) continue;
    const uint2 bits = load_written(reinterpret_cast<const uint2*>(p.moments + i * p.tokens + row));
    mean[i] = __uint_as_float(bits.x), squares[i] = __uint_as_float(bits.y);
  }
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) sum += mean[i];
  sum /= tiles;
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i)
    if (i < tiles) total += squares[i] + kTileColumns * (mean[i] - sum) * (mean[i] - sum);
  const float scale = rsqrtf(total / p.hidden + p.eps);
  return {scale, -sum * scale};
}

// The waiting warp's part of all phases: the rows are on their way before the workers start, and it works out their
// scales while they multiply.
template <class E>
__device__ void wait_for_others(const Block<E>& block) {
  const StackArguments<E>& p = block.p;
  const int products = p.layer_count * kStackProducts;
  RowCopy copy(block, 0, kQkv);
  int phase = 0;
  for (int i = 0; i < products; ++i) {
    const int layer = i / kStackProducts, product = i % kStackProducts;
    if (product == kOut) {
      block.let_start(phase++, [] {});
      block.wait_for_end();
    }
    if (Thread().lane == 0) copy.expect();
    block.let_start(phase++, [&] { copy.start(); });
    if (copy.map && block.plan().vectors[layer].slope[product]) {
      for (int row = Thread().lane; row < block.plan().phases[product].tiling.rows; row += 32)
        if (copy.row + row < p.tokens) block.scales()[row] = row_scale(p, copy.row + row);
      named_barrier_arrive(kScales, kWithWaiting);
    }
    if (i + 1 < products) copy = RowCopy(block, (i + 1) / kStackProducts, (i + 1) % kStackProducts);
    block.wait_for_end();
  }
  block.let_start(phase, [] {});
}

}  // namespace
}  // namespace ftbert
