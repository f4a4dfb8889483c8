// What wgmma_persistent does with a tile's sums: activation, gate, and to memory in the type of C.
#pragma once
#include <type_traits>

#include "gemm/hopper/wgmma_persistent.cuh"

namespace ftbert {

// A variant of wgmma_persistent with A and B in E4M3.
void run_persistent_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data);

namespace {

// Chunks `chunk` and the next of a row that stage_sums has staged.
template <class E>
__device__ void load_staged(const char* shared, int block, int row, int chunk, float (&v)[16]) {
  Packed<E, 8> packs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    packs[i] = Packed<E, 8>::load(
        reinterpret_cast<const E*>(shared + block * (16 * 128) + row * 128 + ((chunk + i) ^ (row % 8)) * 16));
  to_floats(packs, v);
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
    float v[16];
    load_staged<E>(shared, block, row, chunk, v);
    const auto gated = gate_pairs<kActivation, E, 8>(v);
    if (row < rows && column < work.n) gated.store(static_cast<E*>(work.c) + (row0 + row) * cols + column / 2);
  }
}

// C in E4M3: of two chunks 16 bytes, with a gate 8; four rows at a time. Eight lanes that load together have chunks of
// two rows of a block, in banks of their own. inverse: what the numbers are multiplied by before they are rounded.
template <class E, Activation kActivation, Gate kGate>
__device__ void store_e4m3_sums(const char* shared, const PersistentWork& work, int64_t row0, int column0,
                                float inverse) {
  constexpr int kCount = kGate == Gate::pairs ? 8 : 16;
  const int lane = threadIdx.x % 32, rows = static_cast<int>(min(int64_t{16}, work.m - row0));
  const int block = lane / 8 % 2, chunk = lane % 4 * 2, column = column0 + block * 64 + chunk * 8;  // of the sums
  const int64_t cols = work.n * kCount / 16;
#pragma unroll 1
  for (int step = 0; step < 4; ++step) {
    const int row = step * 4 + lane / 16 * 2 + lane / 4 % 2;
    float v[16];
    load_staged<E>(shared, block, row, chunk, v);
    const auto stored = pack_e4m3<E, kActivation, kGate>(v, inverse);
    if (row < rows && column < work.n)
      stored.store(
          reinterpret_cast<uint32_t*>(static_cast<char*>(work.c) + (row0 + row) * cols + column * kCount / 16));
  }
}

// Activation and gate. E: as the sums are rounded before; C: as C is stored, E or E4M3. Work: PersistentWork of 16-bit
// A and B, ScaledWork of E4M3.
template <class E, Activation kActivation, Gate kGate, class C = E, class Work_ = PersistentWork>
struct Plain {
  using Element = E;
  using Work = Work_;

  float inverse = 1;  // of C's scale

  __device__ Plain(const Work& work, int, int) {
    if constexpr (std::is_same_v<C, e4m3_t>) inverse = 1 / *work.c_scale;
  }

  __device__ void finish(const float (&sums)[kTileN / 8][4], char* memory, const Work& work, int row, int column0,
                         int) const {
    stage_sums<E>(sums, shared_address(memory));
    __syncwarp();
    if constexpr (std::is_same_v<C, e4m3_t>)
      store_e4m3_sums<E, kActivation, kGate>(memory, work, row, column0, inverse);
    else if constexpr (kGate == Gate::pairs)
      store_gated_sums<E, kActivation>(memory, work, row, column0);
    else
      store_sums<E, kActivation>(memory, work, row, column0);
  }
};

}  // namespace
}  // namespace ftbert
