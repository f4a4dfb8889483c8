// A product for many rows whose blocks add the residual behind it and finish the norm of the sum: persistent and
// warp-specialised like wgmma_persistent. The sums of a tile stay in registers, where bias and residual are added.
// Blocks of one row exchange mean and squared deviation of their columns, or for RMSNorm the squares, through global
// memory; then each normalises its own columns. (Exchange in a cluster would leave a tenth of a GPU's multiprocessors
// without work.) So the sums are not written, read again and added, and a kernel less is launched.
//
// Where the sum is kept, a tile's shared memory holds the residual, then the sum on its way out while the blocks
// exchange moments, then the norm.
//
// A and B may be E4M3, whose 128 elements are a row of a stage where 64 of 16 bits are. Their sums begin at zero;
// scales and bias come behind the last step. Bias, residual, sum and norm are of 16 bits; the norm as the next product
// reads it may be E4M3, and then it goes from registers to memory.
//
// Blocks wait for each other, so all must be there at once: the launch is cooperative, a block to a multiprocessor.
#pragma once
#include <string_view>
#include <type_traits>

#include "device/e4m3.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/named_barrier.cuh"
#include "device/ring.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "gemm/gpu/contained_norm.h"
#include "gemm/gpu/endings/bias.cuh"
#include "gemm/gpu/endings/norm.cuh"
#include "gemm/gpu/own.h"
#include "kernels/norm/norm_rule.cuh"

namespace ftbert {
namespace {

constexpr int kStepBytes = 128;  // of k, a row of a stage
constexpr int kThreads = 384;    // a warpgroup that loads, two that multiply

// The two warpgroups that multiply take turns, each with a tile of kRows rows, so that one's epilogue hides behind the
// other's products; or, together, the two halves of one tile, so that an epilogue is half as long.
// kScaled: A and B are E4M3.
template <int kTileN_, int kRows_, bool kTogether_, int kBuffers_, bool kScaled_ = false>
struct NormShape {
  static constexpr int kTileN = kTileN_, kRows = kRows_, kHalves = kRows / 64, kTileM = kTogether_ ? 2 * kRows : kRows;
  static constexpr int kSplit = 1;
  static constexpr bool kTogether = kTogether_, kScaled = kScaled_;
  static constexpr int kBytesA = kTileM * kStepBytes, kStageBytes = kBytesA + kTileN * kStepBytes;
  // The residual's tile, and then what is stored, on its way out.
  static constexpr int kTileBytes = kTileM * kTileN * 2, kBuffers = kBuffers_;
  static constexpr int kTilesAtOnce = kTogether ? 1 : 2;               // of a block: of both warpgroups, or of each
  static constexpr int kVectorBytes = (kScaled ? 4 : 3) * kTileN * 4;  // bias, gamma, beta, scales: float
  static constexpr int kOther = 1024 + kBuffers * kTileBytes + kVectorBytes + 256;
  static constexpr int kStages = (227 * 1024 - kOther) / kStageBytes;
  static constexpr int kBytes = kOther + kStages * kStageBytes;
  static constexpr int kWarps = kTogether ? 8 : 4;  // that read a stage
  // In the variant's name: how two of the same tile differ.
  static constexpr std::string_view kKind = kTogether ? "together" : kBuffers == 1 ? "single" : "";
  static_assert(kHalves * 64 == kRows && kWarps * kTilesAtOnce == 8);
  static_assert(16 * kStages + 8 * (kBuffers + kTilesAtOnce) <= 256 && kBytes <= 227 * 1024);
};

// Of A and B in E4M3, in the order of both kernels' first variants. Not 128x192 single, which would spill.
using ScaledShapes = ShapeList<NormShape<192, 64, true, 1, true>, NormShape<192, 64, false, 2, true>,
                               NormShape<128, 128, false, 2, true>, NormShape<256, 64, true, 1, true>>;

struct Work {
  int k_steps, columns, row_tiles;  // tiles of C: `columns` of them side by side
  float eps, row_inverse;           // 1 / n
  const void* bias;
  const void* gamma;
  const void* beta;
  uint64_t* moments;
  uint32_t mark;
  float offset;  // NormNumbers
};

// With A and B in E4M3.
struct ScaledWork : Work {
  E4m3Scales scales;
  uint8_t* copy;  // [rows, n] the norm in E4M3, or nullptr
  const float* copy_scale;
  int64_t rows;
};

template <class Shape>
using WorkOf = std::conditional_t<Shape::kScaled, ScaledWork, Work>;

// c is read in tiles, in, and written in a warp's rows, out.
struct ResultMaps {
  static constexpr bool kKeepSum = false;  // c becomes the norm
  CUtensorMap a, b, in, out;
};
struct SumMaps : ResultMaps {
  static constexpr bool kKeepSum = true;  // c becomes the sum, copy the norm, if it is of 16 bits
  CUtensorMap copy;
};

// 64 columns of a warp's rows, which `normalize` has put in the tile, to memory: asynchronous. column: the tile's
// first.
template <class Shape>
__device__ void send_block(const CUtensorMap& map, int column, int row, uint32_t shared, int block) {
  fence_shared_for_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int half = 0; half < Shape::kHalves; ++half)
      tma_store(map, column + block * 64, row + half * 64, shared + half * (64 * 128) + block * (Shape::kTileM * 128));
    tma_store_commit();
  }
}

template <class E, class Shape, class Rule, class Maps>
__global__ void __launch_bounds__(kThreads, 1)
    wgmma_norm_kernel(const __grid_constant__ Maps maps, const WorkOf<Shape> work) {
#ifdef FTBERT_WGMMA
  using A = std::conditional_t<Shape::kScaled, e4m3_t, E>;
  constexpr int kStep = kStepBytes / sizeof(A);
  constexpr int kTileN = Shape::kTileN, kStages = Shape::kStages, kBuffers = Shape::kBuffers;
  constexpr int kTilesAtOnce = Shape::kTilesAtOnce;
  constexpr bool kTogether = Shape::kTogether;
  extern __shared__ char unaligned_memory[];
  char* const memory = unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024;
  const uint32_t base = shared_address(memory), tiles = base + kStages * Shape::kStageBytes;
  float4* const vectors =
      reinterpret_cast<float4*>(memory + kStages * Shape::kStageBytes + kBuffers * Shape::kTileBytes);
  float2* const bias = reinterpret_cast<float2*>(vectors + kTileN / 2);
  float4* const factors = vectors + kTileN / 2;
  Ring<kStages, Shape::kWarps> ring{tiles + kBuffers * Shape::kTileBytes + Shape::kVectorBytes};
  const uint32_t arrived = ring.barriers + ring.kBytes, gone = arrived + 8 * kTilesAtOnce;  // of residuals
  // As the compiler sees, the same for all lanes: what follows from it stays in uniform registers.
  const int all_warps = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = all_warps / 4;
  // A block's tiles all have the same columns.
  const int column_tile = static_cast<int>(blockIdx.x) % work.columns, column = column_tile * kTileN;
  const int first = static_cast<int>(blockIdx.x) / work.columns,
            step_tiles = static_cast<int>(gridDim.x) / work.columns;

  if (threadIdx.x == 0) {
    prefetch_map(maps.a);
    prefetch_map(maps.b);
    prefetch_map(maps.in);
    prefetch_map(maps.out);
    if constexpr (Maps::kKeepSum) prefetch_map(maps.copy);
    ring.init();
    for (int t = 0; t < kTilesAtOnce; ++t) barrier_init(arrived + 8 * t, 1);
    for (int t = 0; t < kBuffers; ++t) barrier_init(gone + 8 * t, Shape::kWarps);
    barrier_init_fence();
  }
  // Weights do not change while a model runs.
  for (int i = threadIdx.x; i < kTileN / 2; i += kThreads) {
    const auto pair = [&](const void* vector) {
      if (vector == nullptr) return float2{};
      return unpack_pair<E>(*reinterpret_cast<const uint32_t*>(static_cast<const E*>(vector) + column + 2 * i));
    };
    const float2 gamma = pair(work.gamma), beta = pair(work.beta);
    vectors[i] = {gamma.x, gamma.y, beta.x, beta.y};
    if constexpr (Shape::kScaled) {
      float scale[2];
      load_scales(work.scales, column + 2 * i, scale);
      const float2 b = pair(work.bias);
      factors[i] = {scale[0], b.x, scale[1], b.y};
    } else {
      bias[i] = pair(work.bias);
    }
  }
  __syncthreads();

  if (warpgroup == 0) {
    fewer_registers<24>();
    const auto bring_residual = [&](int index, int tile) {
      const uint32_t barrier = arrived + 8 * (index % kTilesAtOnce), to = tiles + index % kBuffers * Shape::kTileBytes;
      barrier_expect(barrier, Shape::kTileBytes);
      for (int c = 0; c < kTileN / 64; ++c)
        tma_load(to + c * (Shape::kTileM * 128), maps.in, column + c * 64, tile * Shape::kTileM, barrier);
    };
    const auto prefetch_residual = [&](int tile) {
      for (int c = 0; tile < work.row_tiles && c < kTileN / 64; ++c)
        tma_prefetch(maps.in, column + c * 64, tile * Shape::kTileM);
    };
    if (threadIdx.x == 0) {
      const int own = (work.row_tiles - first + step_tiles - 1) / step_tiles,
                at_once = min(own * work.k_steps, kStages);
      const auto load_b = [&](int stage, int step) {
        barrier_expect(ring.full(stage), Shape::kStageBytes);
        tma_load(base + stage * Shape::kStageBytes + Shape::kBytesA, maps.b, step * kStep, column, ring.full(stage));
      };
      for (int s = 0; s < at_once; ++s) load_b(s, s % work.k_steps);
      prefetch_residual(first);
      wait_for_inputs();
      int loads = 0;
      ring.parity = 1;  // a fresh stage is empty
      for (int tile = first; tile < work.row_tiles; tile += step_tiles) {
        for (int step = 0; step < work.k_steps; ++step, ++loads) {
          if (loads >= kStages) {
            barrier_wait(ring.empty(ring.stage), ring.parity);
            load_b(ring.stage, step);
          }
          tma_load(base + ring.stage * Shape::kStageBytes, maps.a, step * kStep, tile * Shape::kTileM,
                   ring.full(ring.stage));
          if (loads == at_once - 1) bring_residual(0, first);  // the products begin without it
          ring.next();
        }
      }
    } else if (threadIdx.x == 32) {
      prefetch_residual(first + step_tiles);
      int index = 1;
      for (int tile = first + step_tiles; tile < work.row_tiles; tile += step_tiles, ++index) {
        barrier_wait(gone + 8 * (index % kBuffers), (index / kBuffers + 1) % 2);
        bring_residual(index, tile);
        prefetch_residual(tile + step_tiles);
      }
    }
    return;
  }

  more_registers<240>();
  constexpr int kHalves = Shape::kHalves;
  const int group = warpgroup - 1, warp = all_warps % 4, lane = threadIdx.x % 32;
  // Named barriers: a warpgroup multiplies when the other one has arrived at `mine`, and the first begins.
  const int mine = 1 + group, theirs = 2 - group;
  if (!kTogether && group == 1) named_barrier_arrive(theirs, 256);
  int index = kTogether ? 0 : group;  // of the tile among this block's
  for (int tile = first + index * step_tiles; tile < work.row_tiles;) {
    ring.go_to(int64_t{index} * work.k_steps);
    int before = 0;
    float sum[kHalves][kTileN / 8][4];
    const auto release = [&](int s) {
      if (lane == 0) ring.release(s);
    };

    // While it waits for its turn or the inputs.
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const float2 b = Shape::kScaled ? float2{} : bias[j * 4 + lane % 4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        sum[half][j][0] = sum[half][j][2] = b.x, sum[half][j][1] = sum[half][j][3] = b.y;
    }
    if constexpr (Shape::kScaled) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) warpgroup_keep(sum[half]);  // or they are made in between the products
    }
    if (!kTogether) named_barrier_wait(mine, 256);
    for (int step = 0; step < work.k_steps; ++step) {
      ring.wait_full();
      const uint32_t at = base + ring.stage * Shape::kStageBytes;
      // A descriptor counts its address in units of 16 bytes.
      const uint64_t a = matrix_descriptor<128>(at + (kTogether ? group * 64 * 128 : 0));
      const uint64_t b = matrix_descriptor<128>(at + Shape::kBytesA);
      warpgroup_fence();
#pragma unroll
      for (int d = 0; d < kStepBytes / 32; ++d)
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          warpgroup_multiply_nt<A>(sum[half], a + (half * 64 * 128 + d * 32) / 16, b + d * 32 / 16, true);
      warpgroup_commit();
      if (step > 0) {
        warpgroup_wait<1>();
        release(before);
      }
      before = ring.stage;
      ring.next();
    }
    if (!kTogether) named_barrier_arrive(theirs, 256);
    warpgroup_wait();
    release(before);

    const int buffer = index % kBuffers, row0 = (kTogether ? group * 64 : 0) + warp * 16;  // in the tile
    const uint32_t shared = tiles + buffer * Shape::kTileBytes + row0 * 128;
    uint64_t* const row_moments = work.moments + (int64_t{tile} * Shape::kTileM + row0 + lane / 4) * work.columns;
    barrier_wait(arrived + 8 * (index % kTilesAtOnce), index / kTilesAtOnce % 2);
    float mean[kHalves][2], scale[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      warpgroup_keep(sum[half]);
      if constexpr (Shape::kScaled) apply_factors(sum[half], factors);
      add_residual<E, Shape, Rule>(sum[half], shared + half * (64 * 128), mean[half], scale[half]);
      if (lane % 4 < 2)
        tell(row_moments + (half * 64 + lane % 4 * 8) * work.columns + column_tile,
             lane % 4 ? pack_moments(mean[half][1], scale[half][1], work.mark)
                      : pack_moments(mean[half][0], scale[half][0], work.mark));
    }
    const auto send = [&](const CUtensorMap& map, int block) {
      send_block<Shape>(map, column, tile * Shape::kTileM + row0, shared, block);
    };
    // A warp alone reads and writes its rows of the tile.
    if constexpr (Maps::kKeepSum)
      normalize<E, Shape>(NoRule(), sum, vectors, mean, scale, shared, [&](int block) { send(maps.out, block); });
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      row_moments_of<kTileN, kMostNormTiles / 4, Rule>(work, row_moments + half * 64 * work.columns, mean[half],
                                                       scale[half]);
    const auto send_norm = [&](int block) {
      if constexpr (Maps::kKeepSum)
        send(maps.copy, block);
      else
        send(maps.out, block);
    };
    const Rule rule{work.eps, work.offset};
    if constexpr (Maps::kKeepSum) {
      if (lane == 0) tma_store_wait_read();  // the sum has left
      __syncwarp();
    }
    if constexpr (Shape::kScaled) {
      apply_norm<E, Shape>(rule, sum, vectors, mean, scale);
      if (!Maps::kKeepSum || work.copy == nullptr)
        normalize<E, Shape>(NoRule(), sum, vectors, mean, scale, shared, send_norm);
    } else {
      normalize<E, Shape>(rule, sum, vectors, mean, scale, shared, send_norm);
    }
    if constexpr (Shape::kScaled) {
      if (work.copy != nullptr) {
        const int64_t row = int64_t{tile} * Shape::kTileM + row0 + lane / 4;
        store_e4m3_norm<Shape>(sum, 1.0f / *work.copy_scale, work.copy + row * (work.columns * kTileN) + column,
                               work.columns * kTileN, work.rows - row);
      }
    }
    if (lane == 0) {
      tma_store_wait_read();
      barrier_arrive(gone + 8 * buffer);
    }
    index += kTilesAtOnce;
    tile = first + index * step_tiles;
  }
#else
  no_warpgroups();
#endif
}

}  // namespace
}  // namespace ftbert
