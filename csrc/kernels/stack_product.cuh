// The products of layer_stack_kernel: out = f(in @ weight^T). A weight's rows take the place of the 64 rows that the
// warpgroup instructions insist on, and tokens that of the columns: with few tokens their number is the one to choose.
#pragma once
#include "kernels/activation.cuh"
#include "kernels/stack_worker.cuh"

namespace ftbert {
namespace {

// The weights of this block's units, stage by stage, in the order in which the workers take them.
template <class E>
struct WeightStages {
  const Block<E>& block;
  int product = 0, step = 0, row = 0, column = 0;  // product: of all layers

  __device__ explicit WeightStages(const Block<E>& of) : block(of) { find_unit(); }
  __device__ bool over() const { return product == block.p.layer_count * kStackProducts; }
  __device__ const Tiling& tiling() const { return block.plan().phases[product % kStackProducts].tiling; }
  __device__ const CUtensorMap& map() const {
    return block.p.weights[product / kStackProducts][product % kStackProducts];
  }
  __device__ void find_unit() {
    for (; !over(); ++product) {
      if (!block.has_unit(tiling())) continue;
      const Unit unit(tiling());
      row = unit.column * kTileColumns;
      column = unit.part * tiling().steps * kStep;
      return;
    }
  }
  __device__ void next() {
    column += kStep;
    if (++step < tiling().steps) return;
    step = 0;
    ++product;
    find_unit();
  }
};

// By one thread. What comes as many stages later is asked for already, to the L2 cache.
template <class E>
__device__ void bring_weights(const Block<E>& block) {
  WeightStages<E> now(block), later(block);
  for (int i = 0; i < block.p.stages && !later.over(); ++i) later.next();
  uint32_t parity = 1;  // of the round before: the first finds all stages empty
  for (int s = 0; !now.over(); now.next()) {
    barrier_wait(block.empty(s), parity);
    barrier_expect(block.full(s), kStageBytes);
    tma_load(block.stage_address(s), now.map(), now.column, now.row, block.full(s));
    if (!later.over()) {
      tma_prefetch(later.map(), later.column, later.row);
      later.next();
    }
    if (++s == block.p.stages) s = 0, parity ^= 1;
  }
}

// 64 rows of the weight by kRows tokens, over this warpgroup's chunks. The sums go to shared memory: [warpgroup][row]
// [kSumStride].
template <int kRows, class E>
__device__ void multiply(const Block<E>& block, const int steps, const int chunks) {  // chunks: that a barrier counts
  const Thread me;
  const int group = me.warp / 4;
  int stage = block.stage + group, last = 0, box = -1, rest = chunks + group;  // rest: chunks from the box's first
  uint32_t parity = block.stage_parity;
  float sum[kRows / 8][4] = {};
  for (int i = group; i < steps; i += kStackGroups) {
    while (stage >= block.p.stages) stage -= block.p.stages, parity ^= 1;
    if (rest >= chunks) {
      for (; rest >= chunks; rest -= chunks) ++box;
      barrier_wait(block.box_ready(box), block.box_parity >> box & 1);
    }
    barrier_wait(block.full(stage), parity);
    const uint64_t weights = matrix_descriptor<128>(block.stage_address(stage));
    const uint64_t tokens = matrix_descriptor<128>(shared_address(block.work()) + i * kRows * 128);
    warpgroup_fence();
#pragma unroll
    for (int d = 0; d < kStep / 16; ++d)
      warpgroup_multiply_nt<E>(sum, weights + d * 2, tokens + d * 2, i > group || d > 0);
    warpgroup_commit();
    if (i > group) {
      warpgroup_wait<1>();
      if (me.lane == 0) barrier_arrive(block.empty(last));
      __syncwarp();
    }
    last = stage;
    stage += kStackGroups, rest += kStackGroups;
  }
  warpgroup_wait();
  warpgroup_keep(sum);
  if (group < steps && me.lane == 0) barrier_arrive(block.empty(last));
  __syncwarp();
  block.meet();  // nobody reads the rows any more

  float* const to = reinterpret_cast<float*>(block.work()) + (group * kRows + me.lane % 4 * 2) * kSumStride +
                    me.warp % 4 * 16 + me.lane / 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) to[(8 * j + c % 2) * kSumStride + c / 2 * 8] = sum[j][c];
}

template <class E>
__device__ void activate_pack(Activation activation, float (&v)[4]) {
  const auto apply = [&](auto kind) {
#pragma unroll
    for (int w = 0; w < 4; ++w) v[w] = activate<decltype(kind)::value, E>(v[w]);
  };
  switch (activation) {
    case Activation::none: return;
    case Activation::gelu_erf: return apply(std::integral_constant<Activation, Activation::gelu_erf>());
    case Activation::gelu_tanh: return apply(std::integral_constant<Activation, Activation::gelu_tanh>());
    case Activation::relu: return apply(std::integral_constant<Activation, Activation::relu>());
    case Activation::silu: return apply(std::integral_constant<Activation, Activation::silu>());
    case Activation::tanh: return apply(std::integral_constant<Activation, Activation::tanh>());
  }
}

// Four neighbouring columns of a row of a tile: the share of a thread, which has up to kPieces of them.
constexpr int kPieces = kMostTileRows * kTileColumns / 4 / kWorkers, kRowPieces = kTileColumns / 4;
static_assert(kPieces == 2 && kRowPieces == 16);

struct Piece {
  int row, column;

  __device__ explicit Piece(int i) {
    const int index = i * kWorkers + Thread().index;
    row = index / kRowPieces, column = index % kRowPieces * 4;
  }
};

__device__ inline void add_floats(float (&v)[4], const float* from) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  v[0] += x.x, v[1] += x.y, v[2] += x.z, v[3] += x.w;
}

// v += `count` (1, 2 or 4) floats4 at `from` and every `stride` floats further, always in that order.
__device__ inline void add_shares(float (&v)[4], const float* from, int stride, int count) {
  add_floats(v, from);
  if (count > 1) add_floats(v, from + stride);
  if (count > 2) add_floats(v, from + 2 * stride), add_floats(v, from + 3 * stride);
}

// v += what the warpgroups have of a piece.
__device__ inline void add_warpgroups(const float* sums, int rows, const Piece& piece, float (&v)[4]) {
  add_shares(v, sums + piece.row * kSumStride + piece.column, rows * kSumStride, kStackGroups);
}

// Where units divide a tile's k, each finishes some of its rows. What the block has of the tile goes to those who
// finish it: [unit][row of the share][column]. They wait for it. What they received before, a layer ago, they have
// read: all blocks have waited for each other since.
template <class E>
__device__ void exchange_sums(Block<E>& block, const Tiling& tiling) {
  const int rows = tiling.rows, split = tiling.split, share = rows / split;
  const int part = block.rank % split, first = block.rank - part;
  if (threadIdx.x == 0) barrier_expect(block.sums_ready(), rows * kTileColumns * 4);
#pragma unroll 1
  for (int i = 0; i < kPieces; ++i) {
    const Piece piece(i);
    if (piece.row >= rows) break;
    float v[4] = {};
    add_warpgroups(reinterpret_cast<const float*>(block.work()), rows, piece, v);
    const int owner = piece.row / share, at = (part * share + piece.row - owner * share) * kTileColumns + piece.column;
    store_async(shared_address(block.received() + at), make_float4(v[0], v[1], v[2], v[3]), block.sums_ready(),
                first + owner);
  }
  barrier_wait(block.sums_ready(), block.splits % 2);
  ++block.splits;
}

// To shared memory, by a warp and a half: a tile's vectors. To be waited for before a meet().
template <class E>
__device__ void bring_vectors(const Block<E>& block, int layer, int product, int column0) {
  const StackVectors<E>& from = block.plan().vectors[layer];
  TileVectors<E>& to = block.vectors();
  const bool residual = block.plan().phases[product].residual;
  const int next = product + 1 == kStackProducts ? layer + 1 : layer;  // has the LayerNorm that follows
  const E* const gamma =
      residual ? block.plan().vectors[next].gamma[(product + 1) % kStackProducts] : from.gamma[product];
  const auto copy = [&](auto* there, const auto* vector, int first) {
    constexpr int kPack = 16 / sizeof(*there);
    const int i = static_cast<int>(threadIdx.x) - first;
    if (vector && i >= 0 && i < kTileColumns / kPack)
      copy_async16(shared_address(there + i * kPack), vector + column0 + i * kPack, true);
  };
  copy(to.add, from.add[product], 0);
  copy(to.slope, from.slope[product], 16);
  if (residual || column0 < block.p.hidden) copy(to.gamma, gamma, 32);
  if (column0 < block.p.hidden) copy(to.beta, from.beta[product], 40);
  copy_async_commit();
}

// What a thread adds to a row's piece, four columns of a tile, and writes of it, beside the product's result.
template <class E>
struct Finish {
  const Block<E>& block;
  const StackPhase<E>& now;
  const Piece piece;
  const int row, column0;  // in the result
  const bool norm, keeps;  // keeps: what the LayerNorm before made of its input goes to p.rows, for the residual

  __device__ int at(int columns) const { return row * columns + column0 + piece.column; }

  __device__ void store(float (&v)[4], const Packed<E, 4>& loaded, float2 scale) const {
    const StackArguments<E>& p = block.p;
    const TileVectors<E>& of = block.vectors();
    float x[4];
    loaded.to_floats(x);
    if (norm) {
#pragma unroll
      for (int w = 0; w < 4; ++w) v[w] = v[w] * (scale.x / kHeadroom) + scale.y * of.slope[piece.column + w];
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) v[w] += of.add[piece.column + w];
    if (now.residual) {
#pragma unroll
      for (int w = 0; w < 4; ++w) v[w] += x[w];
    }
    activate_pack<E>(now.activation, v);
    const auto result = Packed<E, 4>::from_floats(v);
    result.store(now.out + at(now.n));
    if (!now.residual && !keeps) return;
    float gamma[4], beta[4];
    Packed<E, 4>::load(of.gamma + piece.column).to_floats(gamma);
    if (now.residual) {
      result.to_floats(v);
#pragma unroll
      for (int w = 0; w < 4; ++w) x[w] = v[w] * (gamma[w] * kHeadroom);
      Packed<E, 4>::from_floats(x).store(p.scaled + at(p.hidden));
      store_moments(v, p.moments + column0 / kTileColumns * p.tokens + row);
      return;
    }
    Packed<E, 4>::load(of.beta + piece.column).to_floats(beta);
#pragma unroll
    for (int w = 0; w < 4; ++w) x[w] = (x[w] * scale.x + scale.y) * gamma[w] + beta[w];
    Packed<E, 4>::from_floats(x).store(p.rows + at(p.hidden));
  }

  // By the sixteen lanes that have a row's 64 columns.
  __device__ void store_moments(const float (&v)[4], Moments* to) const {
    const int lane = Thread().lane;
    const uint32_t who = 0xffffu << (lane & 16);
    const float mean = add_lanes<kRowPieces>(v[0] + v[1] + v[2] + v[3], who) / kTileColumns;
    float squares = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) squares += (v[w] - mean) * (v[w] - mean);
    squares = add_lanes<kRowPieces>(squares, who);
    if (lane % kRowPieces == 0) *reinterpret_cast<float2*>(to) = make_float2(mean, squares);
  }
};

// This block's unit of one product of a layer, by the workers. Few values are kept in registers over the product: what
// the plan says is read again.
template <class E>
__device__ void run_unit(Block<E>& block, const int layer, const int product) {
  const StackArguments<E>& p = block.p;
  const StackPhase<E>& now = block.plan().phases[product];
  const Tiling& tiling = now.tiling;
  const Unit unit(tiling);
  const int column0 = unit.column * kTileColumns;
  const bool norm = block.plan().vectors[layer].slope[product] != nullptr, keeps = norm && column0 < p.hidden;

  // What does not depend on what other blocks write, before the wait for them.
  const int part_rows = tiling.rows / tiling.split;  // that this block finishes
  int row[kPieces];                                  // in the result: where a piece goes, -1: nowhere
  int at[kPieces];  // where it has what comes while the product runs: the residual, or the LayerNorm's input
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const Piece piece(i);
    row[i] = unit.row0 + unit.part * part_rows + piece.row;
    if (piece.row >= part_rows || row[i] >= p.tokens) row[i] = -1;
    at[i] = row[i] >= 0 && (now.residual || keeps) ? row[i] * p.hidden + column0 + piece.column : -1;
  }
  bring_vectors(block, layer, product, column0);
  block.start_phase();

  const E* const from = now.residual ? p.rows : p.sum;
  Packed<E, 4> loaded[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) loaded[i] = at[i] >= 0 ? load_written<4>(from + at[i]) : Packed<E, 4>::zero();
  const int chunks = tiling.by_box() ? tiling.chunks() : tiling.steps;
  switch (tiling.rows) {
    case 8: multiply<8>(block, tiling.steps, chunks); break;
    case 16: multiply<16>(block, tiling.steps, chunks); break;
    case 24: multiply<24>(block, tiling.steps, chunks); break;
    case 32: multiply<32>(block, tiling.steps, chunks); break;
    case 48: multiply<48>(block, tiling.steps, chunks); break;
    default: multiply<64>(block, tiling.steps, chunks);
  }
  block.stage += tiling.steps;
  while (block.stage >= p.stages) block.stage -= p.stages, block.stage_parity ^= 1;
  block.box_parity ^= (1u << tiling.barriers()) - 1;
  copy_async_wait<0>();
  if (norm)
    named_barrier_wait(kScales, kWithWaiting);
  else
    block.meet();

  if (tiling.split > 1) exchange_sums(block, tiling);
#pragma unroll 1
  for (int i = 0; i < kPieces; ++i) {
    if (row[0] < 0) break;
    const Piece piece(i);
    float v[4] = {};
    if (tiling.split > 1) {
      add_shares(v, block.received() + piece.row * kTileColumns + piece.column, part_rows * kTileColumns, tiling.split);
    } else {
      add_warpgroups(reinterpret_cast<const float*>(block.work()), tiling.rows, piece, v);
    }
    const Finish<E> finish{block, now, piece, row[0], column0, norm, keeps};
    finish.store(v, loaded[0], norm ? block.scales()[piece.row] : make_float2(1, 0));
    row[0] = row[1], loaded[0] = loaded[1];
  }
  ++block.units;
}

// The workers' part of one product of a layer, from barrier to barrier.
template <class E>
__device__ void run_product(Block<E>& block, int layer, int product) {
  if (block.has_unit(block.plan().phases[product].tiling))
    run_unit(block, layer, product);
  else
    block.start_phase();
  block.end_phase();
}

}  // namespace
}  // namespace ftbert
