// Products for many rows: persistent, warp-specialised, ping-pong. A block stays on its multiprocessor and computes one
// 128-row tile of C after another. One warp asks the tensor memory accelerator for tiles of A and B, a ring of stages
// ahead; two warpgroups multiply in turns (wgmma), each a whole tile: while one multiplies, the other adds the bias,
// applies the activation and stores. So the tensor cores need not wait for an epilogue, if it takes less time than a
// tile's products.
#include <algorithm>

#include "gemm/own/guessed_time.h"
#include "gemm/own/wgmma_persistent.cuh"

namespace ftbert {
namespace {

// 16 rows of a warp: with the bias and rounded, as cuBLASLt would leave them, in shared memory, so that the activation
// is a loop. Written out for every register it was 2,200 instructions a tile (erf GELU, 512x3072x768 on an H200: 11.3
// us against 9.5). There they are blocks of 64 columns, [16][8] chunks of 16 bytes, xor-ed with the row.
template <class E>
__device__ void stage_sums(const float (&sum)[kTileN / 8][4], const E* bias, uint32_t shared) {
  const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
  for (int j = 0; j < kTileN / 8; j += 2) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float b[2];
      Packed<E, 2>::load(bias + (j + i) * 8 + lane % 4 * 2).to_floats(b);
      const float (&s)[4] = sum[j + i];
      packed[2 * i] = pack_pair<E>(s[0] + b[0], s[1] + b[1]);
      packed[2 * i + 1] = pack_pair<E>(s[2] + b[0], s[3] + b[1]);
    }
    const int chunk = j + lane / 16;
    store_matrices(shared + chunk / 8 * (16 * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16, packed[0], packed[1],
                   packed[2], packed[3]);
  }
}

// The activation, and to memory: of a block four rows of 128 bytes at a time, twice two of them so
// that what depends on row % 8 is worked out once.
template <class E, Activation kActivation>
__device__ void store_sums(const char* shared, const PersistentWork& work, int64_t row0, int column0) {
  const int lane = threadIdx.x % 32, rows = static_cast<int>(min(int64_t{16}, work.m - row0));
  const int64_t n = work.n;
#pragma unroll 1
  for (int step = 0; step < kTileN / 32; ++step) {
    const int row = step % 2 * 8 + lane / 8, block = step / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int chunk = (lane % 8) ^ (lane / 8 + 4 * i), column = column0 + block * 64 + chunk * 8;
      const auto pack = activate_pack<kActivation>(
          Packed<E, 8>::load(reinterpret_cast<const E*>(shared + (2 * step + i) * (4 * 128) + lane * 16)));
      if (row + 4 * i < rows && column < work.n)
        pack.store(static_cast<E*>(work.c) + (row0 + row + 4 * i) * n + column);
    }
  }
}

// With a gate: of two chunks 16 bytes. Eight rows of a block at a time, so that eight lanes that load together have
// chunks of two rows, in banks of their own.
template <class E, Activation kActivation>
__device__ void store_gated_sums(const char* shared, const PersistentWork& work, int64_t row0, int column0) {
  const int lane = threadIdx.x % 32, rows = static_cast<int>(min(int64_t{16}, work.m - row0));
  const int64_t cols = work.n / 2;
#pragma unroll 1
  for (int step = 0; step < kTileN / 32; ++step) {
    const int row = step % 2 * 8 + lane / 4, block = step / 2, chunk = lane % 4 * 2;
    const int column = column0 + block * 64 + chunk * 8;  // of the sums
    Packed<E, 8> packs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      packs[i] = Packed<E, 8>::load(
          reinterpret_cast<const E*>(shared + block * (16 * 128) + row * 128 + ((chunk + i) ^ (row % 8)) * 16));
    float v[16];
    to_floats(packs, v);
    const auto gated = gate_pairs<kActivation, E, 8>(v);
    if (row < rows && column < work.n) gated.store(static_cast<E*>(work.c) + (row0 + row) * cols + column / 2);
  }
}

// Bias, activation and gate.
template <class E, Activation kActivation, Gate kGate>
struct Plain {
  using Work = PersistentWork;

  __device__ Plain(const Work&, int, int) {}

  __device__ void finish(const float (&sums)[kTileN / 8][4], const E* bias, char* memory, const Work& work, int row,
                         int column0, int) const {
    stage_sums<E>(sums, bias, shared_address(memory));
    __syncwarp();
    if constexpr (kGate == Gate::pairs)
      store_gated_sums<E, kActivation>(memory, work, row, column0);
    else
      store_sums<E, kActivation>(memory, work, row, column0);
  }
};

template <class E, Activation kActivation, Gate kGate = Gate::none>
void launch(const Context<Cuda>& context, const Product& p, const ProductData& data) {
  launch_persistent<E, Plain<E, kActivation, kGate>>(context, "kernel wgmma_persistent", p, data,
                                                     work_of(p, data, context.sm_count));
}

template <class E>
void run_type(const Context<Cuda>& context, const Product& p, const ProductData& data) {
  if (p.epilogue.gate == Gate::pairs)
    return with_activation(p.epilogue.activation,
                           [&](auto kind) { launch<E, decltype(kind)::value, Gate::pairs>(context, p, data); });
  if (p.epilogue.activation == Activation::none) return launch<E, Activation::none>(context, p, data);
  return launch<E, Activation::gelu_erf>(context, p, data);
}

void run(const Context<Cuda>& context, int, const Product& p, const ProductData& data) {
  p.a == DType::fp16 ? run_type<__half>(context, p, data) : run_type<__nv_bfloat16>(context, p, data);
}

bool supports(const Gpu& gpu, int, const Product& p) {
  const Epilogue& e = p.epilogue;
  const bool gated = e.gate == Gate::pairs;
  return has_warpgroups(gpu.capability) && is_16_bit_linear(p) && !e.residual_norm &&
         (gated || e.activation == Activation::none || e.activation == Activation::gelu_erf) &&
         p.n % (gated ? 16 : 8) == 0 && p.k % 8 == 0 && std::max({p.m, p.n, p.k}) < (int64_t{1} << 30);
}

// In waves; half of one counts.
OwnGuess guess(const Gpu& gpu, const Product& p) {
  constexpr TimeLine kLine{0, 2.80, 0.350, 0.323, 1.07, 0};
  if (!supports(gpu, 0, p)) return {};
  const PersistentWork work = work_of(p, {}, gpu.sm_count);
  const double waves = static_cast<double>(over(work.whole, gpu.sm_count)) + (work.items > work.whole ? 0.5 : 0.0);
  return {0, microseconds(kLine, waves, p)};
}

constexpr Tile kTile{kTileM, kTileN, 1};
constexpr OwnVariant kVariants[] = {OwnVariant(kTile)};

}  // namespace

const OwnKernel wgmma_persistent{"wgmma_persistent", kVariants, supports, guess, run};

}  // namespace ftbert
