// wgmma_q8_0: c [m, n] = epilogue(a [m, k] @ b [n, k]^T) on Hopper for a weight b in Q8_0, as core/format.h lays it
// out.
//
// The numbers come from memory as they are, and become 16-bit ones, rounded as dequantise_q8_0 rounds them, in the
// registers of the warps that multiply: a register operand of a warpgroup has 64 rows, so that these are b's, and a's
// are the columns. While a step of k is multiplied, the next one's numbers are converted. A block stays and takes the
// tiles of c by turns; one of its warps asks for the memory that all read.
#pragma once
#include <type_traits>

#include "core/format.h"
#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/named_barrier.cuh"
#include "device/ring.cuh"
#include "device/tensor_map.h"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "gemm/gpu/endings/store.cuh"
#include "gemm/product.h"

namespace ftbert {
namespace {

constexpr int kQ8Step = static_cast<int>(kQ8TileDepth);  // of k; 128 bytes of a row of a
constexpr int kQ8Numbers = 8 * kQ8Step, kQ8Scales = 32;  // bytes of eight rows of b and of a step

// kGroups warpgroups have 64 rows of b each, and all of them the same rows of a. kBlocks share a multiprocessor.
template <int kTokens_, int kGroups_, int kBlocks_>
struct Q8Shape {
  static constexpr int kTokens = kTokens_, kGroups = kGroups_, kBlocks = kBlocks_;
  static constexpr int kRows = 64 * kGroups, kReaders = 128 * kGroups;
  // The asking warp is one of four where readers need its registers.
  static constexpr bool kGivesRegisters = kTokens == 256;
  static constexpr int kThreads = kReaders + (kGivesRegisters ? 128 : 32);
  static constexpr int kTokenBytes = kTokens * 128, kNumberBytes = kRows * kQ8Step, kScaleBytes = kRows / 8 * kQ8Scales;
  static constexpr int kStageBytes = kTokenBytes + kNumberBytes + kScaleBytes;
  // Of a warpgroup: rows of 64 results, which begin in different banks.
  static constexpr int kStagedTokens = kTokens < 128 ? kTokens : 128, kStagedRow = 144;
  static constexpr int kStagedBytes = kStagedTokens * kStagedRow;
  static constexpr int kMostStages = 12;
  static constexpr int kRoom = 226 * 1024 / kBlocks - 1024 * kBlocks - kGroups * kStagedBytes - 16 * kMostStages;
  static constexpr int kStages = kRoom / kStageBytes < kMostStages ? kRoom / kStageBytes : kMostStages;
  static constexpr int kBytes = 1024 + kStages * kStageBytes + kGroups * kStagedBytes + 16 * kStages;
  static_assert(kStages >= 3);
};

template <class E>
struct Q8Work {
  const E* bias;  // [n], or nullptr
  E* c;           // [m, n], with a gate [m, n / 2]
  Activation activation;
  Gate gate;
  int m, n, k;
};

// Two of a word's four signed bytes, chosen by the lane, times a scale.
template <class E>
struct TwoNumbers {
  uint32_t pair, first, second;  // for __byte_perm

  // upper: bytes 2 and 3.
  __device__ explicit TwoNumbers(bool upper)
      : pair(upper ? 0x4342 : 0x4140), first(upper ? 0x7442 : 0x7440), second(first + 1) {}

  __device__ uint32_t times(uint32_t four, __half scale) const {
    four ^= 0x80808080u;  // 128 is added to each
    if constexpr (std::is_same_v<E, __half>) {
      const uint32_t beyond = __byte_perm(four, 0x64646464u, pair);  // to each 1024
      __half2 x = __hsub2(reinterpret_cast<const __half2&>(beyond), __half2half2(__ushort_as_half(0x6480)));  // 1152
      x = __hmul2(x, __half2half2(scale));
      return reinterpret_cast<const uint32_t&>(x);
    } else {
      const float by = __half2float(scale);
      const auto number = [&](uint32_t chosen) {
        return (__uint_as_float(__byte_perm(four, 0x4B000000u, chosen)) - 8388736.0f) * by;  // 2^23 + 128
      };
      return pack_pair<E>(number(first), number(second));
    }
  }
};

template <class E, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    wgmma_q8_0_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_numbers,
                      const __grid_constant__ CUtensorMap map_scales, const Q8Work<E> work) {
#ifdef FTBERT_WGMMA
  constexpr int kTokens = Shape::kTokens, kStages = Shape::kStages, kGroups = Shape::kGroups;
  extern __shared__ char unaligned_memory[];
  char* const memory = unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024;
  char* const numbers = memory + kStages * Shape::kTokenBytes;
  char* const scales = numbers + kStages * Shape::kNumberBytes;
  char* const staged = scales + kStages * Shape::kScaleBytes;
  Ring<kStages, 4 * kGroups> ring{shared_address(staged + kGroups * Shape::kStagedBytes)};
  const int steps = work.k / kQ8Step, across = (work.m + kTokens - 1) / kTokens;
  const int tiles = across * ((work.n + Shape::kRows - 1) / Shape::kRows), mine = static_cast<int>(blockIdx.x);
  // As the compiler sees, the same for all lanes.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == Shape::kReaders) {
    ring.init();
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= Shape::kReaders / 32) {
    if constexpr (Shape::kGivesRegisters) fewer_registers<40>();
    if (threadIdx.x != Shape::kReaders) return;
    const auto ask_b = [&](int stage, int tile, int step) {
      const int eights = tile / across * (Shape::kRows / 8);
      barrier_expect(ring.full(stage), Shape::kStageBytes);
      tma_load(shared_address(numbers) + stage * Shape::kNumberBytes, map_numbers, 0, step, eights, ring.full(stage));
      tma_load(shared_address(scales) + stage * Shape::kScaleBytes, map_scales, 0, step, eights, ring.full(stage));
    };
    const auto ask_a = [&](int stage, int tile, int step) {
      tma_load(shared_address(memory) + stage * Shape::kTokenBytes, map_a, step * kQ8Step, tile % across * kTokens,
               ring.full(stage));
    };
    const int at_once = min(steps, kStages);
    // Weights do not change while a model runs.
    for (int step = 0; step < at_once; ++step) ask_b(step, mine, step);
    wait_for_inputs();
    for (int step = 0; step < at_once; ++step) ask_a(step, mine, step);
    ring.stage = at_once % kStages, ring.parity = at_once == kStages ? 0 : 1;
    for (int tile = mine, step = at_once; tile < tiles; tile += static_cast<int>(gridDim.x), step = 0) {
      for (; step < steps; ++step) {
        barrier_wait(ring.empty(ring.stage), ring.parity);
        ask_b(ring.stage, tile, step);
        ask_a(ring.stage, tile, step);
        ring.next();
      }
    }
    return;
  }

  if constexpr (Shape::kGivesRegisters) more_registers<232>();
  const int group = kGroups == 1 ? 0 : warp / 4, g = lane / 4, t = lane % 4, eights = group * 8 + warp % 4 * 2;
  const TwoNumbers<E> two(t % 2 != 0);
  // Of a row's 16 columns a lane has 2 t and 2 t + 1, and those 8 further on: in core/format.h's lanes t / 2 and
  // 2 + t / 2 of the row.
  const char* const own_numbers = numbers + eights * kQ8Numbers + (g * 4 + t / 2) * 16;
  const char* const own_scales = scales + eights * kQ8Scales + g * 2;
  const auto convert = [&](int stage, uint32_t (&to)[4][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* const from = own_numbers + stage * Shape::kNumberBytes + r * kQ8Numbers;
      const uint4 near = *reinterpret_cast<const uint4*>(from), far = *reinterpret_cast<const uint4*>(from + 32);
      const auto* const by = reinterpret_cast<const __half*>(own_scales + stage * Shape::kScaleBytes + r * kQ8Scales);
      const __half scale[2] = {by[0], by[8]};
      const uint32_t n[4] = {near.x, near.y, near.z, near.w}, f[4] = {far.x, far.y, far.z, far.w};
#pragma unroll
      for (int q = 0; q < 4; ++q)
        to[q][r] = two.times(n[q], scale[q / 2]), to[q][r + 2] = two.times(f[q], scale[q / 2]);
    }
  };

  const uint64_t tokens = matrix_descriptor<128>(shared_address(memory));
  float sum[kTokens / 8][4];
  uint32_t b[2][4][4];
  for (int tile = mine; tile < tiles; tile += static_cast<int>(gridDim.x)) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[j][c] = 0;
    ring.wait_full();
    convert(ring.stage, b[0]);
    for (int first = 0; first < steps; first += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = first + i;
        if (step >= steps) break;
        warpgroup_fence();
#pragma unroll
        for (int q = 0; q < 4; ++q)  // a descriptor counts in units of 16 bytes
          warpgroup_multiply_add<E, 0>(sum, b[i][q], tokens + (ring.stage * Shape::kTokenBytes + q * 32) / 16);
        warpgroup_commit();
        const int now = ring.stage;
        ring.next();
        if (step + 1 < steps) {
          ring.wait_full();
          convert(ring.stage, b[i ^ 1]);
        }
        warpgroup_wait();
        warpgroup_keep(b[i]);
        __syncwarp();
        if (lane == 0) ring.release(now);
      }
    }
    warpgroup_keep(sum);

    const int token0 = tile % across * kTokens, row0 = tile / across * Shape::kRows + group * 64;
    float bias[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (const int row = row0 + warp % 4 * 16 + r * 8 + g; work.bias && row < work.n)
        bias[r] = to_float(work.bias[row]);
    char* const own = staged + group * Shape::kStagedBytes;
    // Of a warp's eight by eight results, turned: a token's row; matrix i has rows 8 (i % 2) on and tokens 8 (i / 2)
    // on.
    const uint32_t to = shared_address(own) + (lane / 16 * 8 + lane % 8) * Shape::kStagedRow +
                        (warp % 4 * 16 + lane / 8 % 2 * 8) * static_cast<int>(sizeof(E));
#pragma unroll
    for (int chunk = 0; chunk < kTokens; chunk += Shape::kStagedTokens) {
      named_barrier_wait(1 + group, 128);  // who stores what was there before
#pragma unroll
      for (int j = 0; j < Shape::kStagedTokens / 8; j += 2) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&s)[4] = sum[chunk / 8 + j + i / 2];
          pairs[i] = pack_pair<E>(s[i % 2 * 2] + bias[i % 2], s[i % 2 * 2 + 1] + bias[i % 2]);
        }
        store_matrices_turned(to + j * 8 * Shape::kStagedRow, pairs[0], pairs[1], pairs[2], pairs[3]);
      }
      named_barrier_wait(1 + group, 128);
      with_activation(work.activation, [&](auto kind) {
        constexpr Activation kActivation = decltype(kind)::value;
        const auto store = [&]<Gate kGate>() {
          constexpr int kPacks = kGate == Gate::pairs ? 2 : 1, kPieces = 8 / kPacks;
          const Result<E, kGate> to_c{work.c, work.m, work.n};
          E* const first = to_c.row(token0 + chunk);
          const int tokens = work.m - token0 - chunk;
          for (int i = threadIdx.x % 128; i < Shape::kStagedTokens * kPieces; i += 128) {
            const int token = i / kPieces, column = i % kPieces * 8 * kPacks;
            const auto* const from = reinterpret_cast<const E*>(own + token * Shape::kStagedRow) + column;
            Packed<E, 8> packs[kPacks];
#pragma unroll
            for (int p = 0; p < kPacks; ++p) packs[p] = Packed<E, 8>::load(from + p * 8);
            to_c.template put<E, kActivation>(packs, first, token, tokens, row0 + column);
          }
        };
        if (work.gate == Gate::pairs)
          store.template operator()<Gate::pairs>();
        else
          store.template operator()<Gate::none>();
      });
    }
  }
#else
  no_warpgroups();
#endif
}

}  // namespace
}  // namespace ftbert
