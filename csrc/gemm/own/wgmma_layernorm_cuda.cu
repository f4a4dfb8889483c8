// A product for many rows whose blocks finish the residual LayerNorm behind it: persistent and warp-specialised like
// gemm_hopper_cuda.cu. The sums of a tile stay in registers. Bias and residual are added there; then who has the tiles
// beside it in the same rows is told the mean and the squared deviations of its columns (through global memory: a
// cluster of them would leave a tenth of a GPU's multiprocessors without work), and when all have said theirs each
// writes its columns normalised. So the sums are not written, read again and added, and a kernel less is launched.
//
// Blocks wait for each other, so all must be there at once: the launch is cooperative, a block to a multiprocessor.
#include <algorithm>

#include "core/check.h"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/tensor_map.h"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "gemm/own/row_moments.cuh"
#include "gemm/own/wgmma_layernorm.h"

namespace ftbert {
namespace {

constexpr int kStep = 64;      // a row of a stage: 64 elements, 128 bytes
constexpr int kThreads = 384;  // a warpgroup that loads, two that multiply

// The two warpgroups that multiply take turns, each with a tile of kRows rows, so that one's epilogue hides behind the
// other's products; or, together, the two halves of one tile, so that an epilogue is half as long.
template <int kTileN_, int kRows_, bool kTogether_, int kBuffers_>
struct NormShape {
  static constexpr int kTileN = kTileN_, kRows = kRows_, kHalves = kRows / 64, kTileM = kTogether_ ? 2 * kRows : kRows;
  static constexpr bool kTogether = kTogether_;
  static constexpr int kBytesA = kTileM * kStep * 2, kStageBytes = kBytesA + kTileN * kStep * 2;
  // The residual's tile, and then the result on its way out.
  static constexpr int kTileBytes = kTileM * kTileN * 2, kBuffers = kBuffers_;
  static constexpr int kTurns = kTogether ? 1 : 2;     // a block's tiles belong to its warpgroups in turns
  static constexpr int kVectorBytes = 3 * kTileN * 4;  // bias, gamma, beta: float
  static constexpr int kOther = 1024 + kBuffers * kTileBytes + kVectorBytes + 256;
  static constexpr int kStages = (227 * 1024 - kOther) / kStageBytes;
  static constexpr int kBytes = kOther + kStages * kStageBytes;
  static constexpr int kWarps = kTogether ? 8 : 4;  // that read a stage
  static_assert(kHalves * 64 == kRows && kWarps * kTurns == 8);
  static_assert(16 * kStages + 8 * (kBuffers + kTurns) <= 256 && kBytes <= 227 * 1024);
};

struct Work {
  int k_steps, columns, row_tiles;  // tiles of C: `columns` of them side by side
  float eps, row_inverse;           // 1 / n
  const void* bias;
  const void* gamma;
  const void* beta;
  uint64_t* moments;
  uint32_t mark;
};

template <class E>
__device__ float2 unpack_pair(uint32_t bits) {
  typename PairOf<E>::type pair;
  memcpy(&pair, &bits, 4);
  return pair_to_float(pair);
}

// sum += residual for 16 rows of a warp, and the mean and the squared deviations of each of a thread's two.
template <class E, class Shape>
__device__ void add_residual(float (&sum)[Shape::kTileN / 8][4], uint32_t tile, float (&mean)[2], float (&squares)[2]) {
  constexpr int kTileN = Shape::kTileN;
  const uint32_t row = matrix_row(tile);
  uint32_t bits[2][4];  // 16 columns, and the next ones on their way
  const auto load = [&](int j) {
    load_matrices(bits[j / 2 % 2], (row ^ (j % 8 * 16)) + j / 8 * (Shape::kTileM * 128));
  };
  float total[2] = {};
  load(0);
#pragma unroll
  for (int j = 0; j < kTileN / 8; j += 2) {
    if (j + 2 < kTileN / 8) load(j + 2);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 r = unpack_pair<E>(bits[j / 2 % 2][p]);
      float* const s = sum[j + p / 2] + p % 2 * 2;
      s[0] += r.x, s[1] += r.y;
      total[p % 2] += s[0] + s[1];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) mean[r] = reduce<4>(total[r], Sum()) * (1.0f / kTileN);
  float partial[2][2] = {};
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float d = sum[j][i] - mean[i / 2];
      partial[i / 2][i % 2] += d * d;
    }
#pragma unroll
  for (int r = 0; r < 2; ++r) squares[r] = reduce<4>(partial[r][0] + partial[r][1], Sum());
}

// (sum - mean) * scale * gamma + beta, rounded, to shared memory; store(block) when 64 columns are there. vectors: for
// two columns both gammas, both betas.
template <class E, class Shape, class Store>
__device__ void normalize(const float (&sum)[Shape::kHalves][Shape::kTileN / 8][4], const float4* vectors,
                          const float (&mean)[Shape::kHalves][2], const float (&scale)[Shape::kHalves][2],
                          uint32_t tile, const Store& store) {
  constexpr int kHalves = Shape::kHalves;
  const uint32_t row = matrix_row(tile);
  float shift[kHalves][2];
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[half][r] = -mean[half][r] * scale[half][r];
#pragma unroll
  for (int j = 0; j < Shape::kTileN / 8; j += 2) {
    uint32_t packed[kHalves][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 v = vectors[(j + i) * 4 + threadIdx.x % 4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const s = sum[half][j + i] + 2 * r;
          packed[half][2 * i + r] = pack_pair<E>((s[0] * scale[half][r] + shift[half][r]) * v.x + v.z,
                                                 (s[1] * scale[half][r] + shift[half][r]) * v.y + v.w);
        }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      store_matrices((row ^ (j % 8 * 16)) + j / 8 * (Shape::kTileM * 128) + half * (64 * 128), packed[half][0],
                     packed[half][1], packed[half][2], packed[half][3]);
    if (j % 8 == 6) store(j / 8);
  }
}

template <class E, class Shape>
__global__ void __launch_bounds__(kThreads, 1)
    norm_gemm_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                     const __grid_constant__ CUtensorMap map_in, const __grid_constant__ CUtensorMap map_out,
                     const Work work) {
#ifdef FTBERT_WGMMA
  constexpr int kTileN = Shape::kTileN, kStages = Shape::kStages, kBuffers = Shape::kBuffers;
  constexpr int kTurns = Shape::kTurns;
  constexpr bool kTogether = Shape::kTogether;
  extern __shared__ char unaligned_memory[];
  char* const memory = unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024;
  const uint32_t base = shared_address(memory), tiles = base + kStages * Shape::kStageBytes;
  float4* const vectors =
      reinterpret_cast<float4*>(memory + kStages * Shape::kStageBytes + kBuffers * Shape::kTileBytes);
  float2* const bias = reinterpret_cast<float2*>(vectors + kTileN / 2);
  const uint32_t full = tiles + kBuffers * Shape::kTileBytes + Shape::kVectorBytes, empty = full + 8 * kStages;
  const uint32_t arrived = empty + 8 * kStages, gone = arrived + 8 * kTurns;
  // As the compiler sees, the same for all lanes: what follows from it stays in uniform registers.
  const int all_warps = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = all_warps / 4;
  // A block's tiles all have the same columns.
  const int column_tile = static_cast<int>(blockIdx.x) % work.columns, column = column_tile * kTileN;
  const int first = static_cast<int>(blockIdx.x) / work.columns,
            step_tiles = static_cast<int>(gridDim.x) / work.columns;

  if (threadIdx.x == 0) {
    prefetch_map(map_a);
    prefetch_map(map_b);
    prefetch_map(map_in);
    prefetch_map(map_out);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, Shape::kWarps);
    }
    for (int t = 0; t < kTurns; ++t) barrier_init(arrived + 8 * t, 1);
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
    bias[i] = pair(work.bias);
  }
  __syncthreads();

  if (warpgroup == 0) {
    fewer_registers<24>();
    const auto bring_residual = [&](int index, int tile) {
      const uint32_t barrier = arrived + 8 * (index % kTurns), to = tiles + index % kBuffers * Shape::kTileBytes;
      barrier_expect(barrier, Shape::kTileBytes);
      for (int c = 0; c < kTileN / 64; ++c)
        tma_load(to + c * (Shape::kTileM * 128), map_in, column + c * 64, tile * Shape::kTileM, barrier);
    };
    const auto prefetch_residual = [&](int tile) {
      for (int c = 0; tile < work.row_tiles && c < kTileN / 64; ++c)
        tma_prefetch(map_in, column + c * 64, tile * Shape::kTileM);
    };
    if (threadIdx.x == 0) {
      const int own = (work.row_tiles - first + step_tiles - 1) / step_tiles,
                at_once = min(own * work.k_steps, kStages);
      const auto load_b = [&](int stage, int step) {
        barrier_expect(full + 8 * stage, Shape::kStageBytes);
        tma_load(base + stage * Shape::kStageBytes + Shape::kBytesA, map_b, step * kStep, column, full + 8 * stage);
      };
      for (int s = 0; s < at_once; ++s) load_b(s, s % work.k_steps);
      prefetch_residual(first);
      wait_for_inputs();
      int stage = 0, loads = 0;
      uint32_t parity = 1;  // a fresh stage is empty
      for (int tile = first; tile < work.row_tiles; tile += step_tiles) {
        for (int step = 0; step < work.k_steps; ++step, ++loads) {
          if (loads >= kStages) {
            barrier_wait(empty + 8 * stage, parity);
            load_b(stage, step);
          }
          tma_load(base + stage * Shape::kStageBytes, map_a, step * kStep, tile * Shape::kTileM, full + 8 * stage);
          if (loads == at_once - 1) bring_residual(0, first);  // the products begin without it
          if (++stage == kStages) stage = 0, parity ^= 1;
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
  const int turn = 1 + group, other_turn = 2 - group;  // named barriers
  if (!kTogether && group == 1) named_barrier_arrive(other_turn, 256);
  int index = kTogether ? 0 : group;  // of the tile among this block's
  for (int tile = first + index * step_tiles; tile < work.row_tiles;) {
    const int64_t from = int64_t{index} * work.k_steps;
    int stage = static_cast<int>(from % kStages), before = 0;
    uint32_t parity = from / kStages % 2;
    float sum[kHalves][kTileN / 8][4];
    const auto release = [&](int s) {
      if (lane == 0) barrier_arrive(empty + 8 * s);
    };

    // While it waits for its turn or the inputs.
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const float2 b = bias[j * 4 + lane % 4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        sum[half][j][0] = sum[half][j][2] = b.x, sum[half][j][1] = sum[half][j][3] = b.y;
    }
    if (!kTogether) named_barrier_wait(turn, 256);
    for (int step = 0; step < work.k_steps; ++step) {
      barrier_wait(full + 8 * stage, parity);
      const uint32_t at = base + stage * Shape::kStageBytes;
      // A descriptor counts its address in units of 16 bytes.
      const uint64_t a = matrix_descriptor<128>(at + (kTogether ? group * 64 * 128 : 0));
      const uint64_t b = matrix_descriptor<128>(at + Shape::kBytesA);
      warpgroup_fence();
#pragma unroll
      for (int d = 0; d < kStep / 16; ++d)
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          warpgroup_multiply_nt<E>(sum[half], a + (half * 64 * 128 + d * 32) / 16, b + d * 32 / 16, true);
      warpgroup_commit();
      if (step > 0) {
        warpgroup_wait<1>();
        release(before);
      }
      before = stage;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    if (!kTogether) named_barrier_arrive(other_turn, 256);
    warpgroup_wait();
    release(before);

    const int buffer = index % kBuffers, row0 = (kTogether ? group * 64 : 0) + warp * 16;  // in the tile
    const uint32_t shared = tiles + buffer * Shape::kTileBytes + row0 * 128;
    uint64_t* const row_moments = work.moments + (int64_t{tile} * Shape::kTileM + row0 + lane / 4) * work.columns;
    barrier_wait(arrived + 8 * (index % kTurns), index / kTurns % 2);
    float mean[kHalves][2], scale[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      warpgroup_keep(sum[half]);
      add_residual<E, Shape>(sum[half], shared + half * (64 * 128), mean[half], scale[half]);
      if (lane % 4 < 2)
        tell(row_moments + (half * 64 + lane % 4 * 8) * work.columns + column_tile,
             lane % 4 ? pack_moments(mean[half][1], scale[half][1], work.mark)
                      : pack_moments(mean[half][0], scale[half][0], work.mark));
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      row_moments_of<kTileN, kMostNormTiles / 4>(work, row_moments + half * 64 * work.columns, mean[half], scale[half]);
    normalize<E, Shape>(sum, vectors, mean, scale, shared, [&](int block) {
      fence_shared_for_async();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          tma_store(map_out, column + block * 64, tile * Shape::kTileM + row0 + half * 64,
                    shared + half * (64 * 128) + block * (Shape::kTileM * 128));
        tma_store_commit();
      }
    });
    if (lane == 0) {
      tma_store_wait_read();
      barrier_arrive(gone + 8 * buffer);
    }
    index += kTurns;
    tile = first + index * step_tiles;
  }
#else
  no_warpgroups();
#endif
}

template <class E, class Shape>
void launch(const Context<Cuda>& context, const NormGemm& g) {
  const auto kernel = norm_gemm_kernel<E, Shape>;
  FTBERT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes));
  const int columns = static_cast<int>(g.n / Shape::kTileN);
  const int row_tiles = static_cast<int>((g.m + Shape::kTileM - 1) / Shape::kTileM);
  FTBERT_CHECK(columns <= context.sm_count, "norm_gemm: a row of ", columns, " tiles needs as many multiprocessors");
  const uint32_t turn = static_cast<uint32_t>(g.turn) % kMarks, mark = turn + 1;
  if (turn == 0)
    FTBERT_CUDA_CHECK(
        cudaMemsetAsync(g.moments, 0, g.moment_count * sizeof(*g.moments), static_cast<cudaStream_t>(context.stream)));
  const Work work{static_cast<int>((g.k + kStep - 1) / kStep),
                  columns,
                  row_tiles,
                  g.eps,
                  1.0f / static_cast<float>(g.n),
                  g.bias,
                  g.gamma,
                  g.beta,
                  g.moments,
                  (mark >> 7) << 31 | (mark & 0x7f)};
  const int blocks = std::min(row_tiles, context.sm_count / columns) * columns;
  launch_overlapped(context, "kernel norm_gemm", kernel, blocks, kThreads, Shape::kBytes, Presence(1, true),
                    tensor_map(g.a, g.dtype, g.m, g.k, Shape::kTileM),
                    tensor_map(g.b, g.dtype, g.n, g.k, Shape::kTileN),
                    tensor_map(g.x, g.dtype, g.m, g.n, Shape::kTileM), tensor_map(g.x, g.dtype, g.m, g.n, 16), work);
}

struct Size {
  int columns, rows;
};
constexpr Size kSizes[] = {{192, 128}, {192, 128}, {192, 64}, {128, 128}, {128, 128}, {128, 64}, {256, 128}};

template <class E>
void run(const Context<Cuda>& context, int variant, const NormGemm& g) {
  switch (variant) {
    case 0: return launch<E, NormShape<192, 128, false, 1>>(context, g);
    case 1: return launch<E, NormShape<192, 64, true, 1>>(context, g);
    case 2: return launch<E, NormShape<192, 64, false, 2>>(context, g);
    case 3: return launch<E, NormShape<128, 128, false, 2>>(context, g);
    case 4: return launch<E, NormShape<128, 128, false, 1>>(context, g);
    case 5: return launch<E, NormShape<128, 64, false, 2>>(context, g);
    case 6: return launch<E, NormShape<256, 64, true, 1>>(context, g);
    default: fail("there is no product with LayerNorm ", variant);
  }
}

}  // namespace

int norm_gemm_variants() { return static_cast<int>(std::size(kSizes)); }

FusedTile norm_gemm_tile(int variant) { return {kSizes[variant].rows, kSizes[variant].columns, 1}; }

bool norm_gemm_supports(int capability, int variant, const NormGemm& g) {
  if (variant < 0 || variant >= norm_gemm_variants() || !has_warpgroups(capability)) return false;
  const int64_t columns = kSizes[variant].columns;
  return g.dtype != DType::fp32 && g.m > 0 && g.n > 0 && g.k > 0 && g.n % columns == 0 && g.k % 8 == 0 &&
         g.n / columns <= kMostNormTiles && std::max(g.m, g.k) < (int64_t{1} << 30);
}

void run_norm_gemm(const Context<Cuda>& context, int variant, const NormGemm& g) {
  FTBERT_CHECK(norm_gemm_supports(context.capability, variant, g), "the product with LayerNorm ", variant,
               " cannot do m=", g.m, " n=", g.n, " k=", g.k);
  FTBERT_CHECK(g.moment_count >= norm_gemm_moments(g.m), "a product with LayerNorm of ", g.m, " rows needs ",
               norm_gemm_moments(g.m), " moments, got ", g.moment_count);
  for (const void* p : {g.a, g.b, g.bias, g.gamma, g.beta, static_cast<const void*>(g.x)})
    FTBERT_CHECK(reinterpret_cast<uintptr_t>(p) % 16 == 0,
                 "a product with LayerNorm needs operands aligned to 16 bytes");
  g.dtype == DType::fp16 ? run<__half>(context, variant, g) : run<__nv_bfloat16>(context, variant, g);
}

}  // namespace ftbert
