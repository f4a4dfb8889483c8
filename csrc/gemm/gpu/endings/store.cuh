// Sums to C: rounded to 16 bits and laid out in shared memory, then with activation and gate to memory, 16 bytes at a
// time. So the activation is a loop: written out for every register it was 2,200 instructions a tile (erf GELU,
// 512x3072x768 on an H200: 11.3 us against 9.5).
//
// An Ending is what a main loop does with the sums of a tile. It is an object of a warp's threads and has
//   Arguments, with which the kernel is launched;
//   kVectors, how many vectors [n] of floats it reads beside its sums (the main loop brings them to shared memory);
//   Ending(arguments, m, n), of a product whose sums are [m, n], and vector(i), where kVectors is not 0;
//   look_ahead(row0, column0), before `finish`, by warpgroups before the products: there the inputs are not waited for.
//     16 rows and all columns of Staging are the warp's;
//   finish(sums, vectors, memory, further), which may change the sums: those of the 16 rows from row0 + further on. The
//     warp has Staging::kBytes of shared memory at `memory`, of vectors those columns that are its own.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/fragment.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "gemm/gpu/endings/bias.cuh"
#include "gemm/gpu/endings/gate.cuh"

namespace ftbert {
namespace {

// How 16 rows of a warp lie in shared memory. stage(shared, sums) puts them there, rounded to E; each(shared, f) runs
// f(row, column, packs) of all, where packs are kPacks * 8 sums of the row from `column` on.

// Rows apart, so that lanes of different rows meet different banks.
template <int kEights_>
struct PaddedRows {
  static constexpr int kEights = kEights_, kRowBytes = 16 * (kEights | 1), kBytes = 16 * kRowBytes;
  // At a time, where several become one access.
  static constexpr int kMostPacks = kEights % 2 == 0 ? 2 : 1;

  template <class E>
  static __device__ void stage(char* shared, float (&sums)[kEights][4]) {
    Fragment::each_pair(sums, [&](int j, int r, float x, float y) {
      *reinterpret_cast<uint32_t*>(shared + (Fragment::row() + 8 * r) * kRowBytes + j * 16 + Fragment::column() * 2) =
          pack_pair<E>(x, y);
    });
  }

  template <class E, class C, int kPacks, class F>
  static __device__ void each(const char* shared, const F& f) {
    constexpr int kAcross = kEights / kPacks;
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < 16 * kAcross; i += 32) {
      const int row = i / kAcross, first = i % kAcross * kPacks * 8;
      Packed<E, 8> packs[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
        packs[p] = Packed<E, 8>::load(reinterpret_cast<const E*>(shared + row * kRowBytes) + first + p * 8);
      f(row, first, packs);
    }
  }
};

// 128 columns, in blocks of 64: [16][8] chunks of 16 bytes, xor-ed with the row.
struct SwizzledRows {
  static constexpr int kEights = 16, kMostPacks = 2, kBytes = 16 * 128 * 2;

  template <class E>
  static __device__ void stage(char* memory, const float (&sum)[kEights][4]) {
    const uint32_t shared = shared_address(memory);
    const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int j = 0; j < kEights; j += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float (&s)[4] = sum[j + i];
        packed[2 * i] = pack_pair<E>(s[0], s[1]);
        packed[2 * i + 1] = pack_pair<E>(s[2], s[3]);
      }
      const int chunk = j + lane / 16;
      store_matrices(shared + chunk / 8 * (16 * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16, packed[0], packed[1],
                     packed[2], packed[3]);
    }
  }

  template <class E, class C, int kPacks, class F>
  static __device__ void each(const char* shared, const F& f) {
    const int lane = threadIdx.x % 32;
    if constexpr (kPacks == 1) {
      // Of a block four rows of 128 bytes at a time, twice two of them so that what depends on row % 8 is worked out
      // once.
#pragma unroll 1
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int chunk = (lane % 8) ^ (lane / 8 + 4 * i);
          const Packed<E, 8> packs[1] = {
              Packed<E, 8>::load(reinterpret_cast<const E*>(shared + (2 * step + i) * (4 * 128) + lane * 16))};
          f(step % 2 * 8 + lane / 8 + 4 * i, step / 2 * 64 + chunk * 8, packs);
        }
    } else {
      // Eight lanes that load together have chunks of two rows of a block, in banks of their own. Of C in E4M3 four
      // whole rows at a time, else eight rows of a block.
      constexpr bool kWhole = sizeof(C) == 1;
#pragma unroll 1
      for (int step = 0; step < 4; ++step) {
        const int block = kWhole ? lane / 8 % 2 : step / 2, chunk = lane % 4 * 2;
        const int row = kWhole ? step * 4 + lane / 16 * 2 + lane / 4 % 2 : step % 2 * 8 + lane / 4;
        Packed<E, 8> packs[2];
#pragma unroll
        for (int p = 0; p < 2; ++p)
          packs[p] = Packed<E, 8>::load(
              reinterpret_cast<const E*>(shared + block * (16 * 128) + row * 128 + ((chunk + p) ^ (row % 8)) * 16));
        f(row, block * 64 + chunk * 8, packs);
      }
    }
  }
};

// C, in E4M3 with 1 / its scale: of sums [m, n], with a gate [m, n / 2].
template <class C, Gate kGate>
struct Result {
  static constexpr int kOfOne = kGate == Gate::pairs ? 2 : 1;  // sums

  void* c;
  int64_t m;
  int n;
  float inverse = 1;

  __device__ int width() const { return n / kOfOne; }
  // Where row `row` begins.
  __device__ C* row(int64_t row) const { return static_cast<C*>(c) + row * width(); }
  // Sums of 8 * kPacks columns, to row `row` of `rows` that begin at `first`.
  template <class E, Activation kActivation, int kPacks>
  __device__ void put(const Packed<E, 8> (&packs)[kPacks], C* first, int row, int rows, int column) const {
    const auto stored = finished<E, C, kActivation, kGate>(packs, inverse);
    if (row < rows && column < n)
      *reinterpret_cast<std::remove_cv_t<decltype(stored.bits)>*>(first + (int64_t{row} * width() + column / kOfOne)) =
          stored.bits;
  }
};

// 16 rows that a warp has staged, from (row0, column0) on. kMostPacks: that become one access.
template <class Staging, class E, class C, Activation kActivation, Gate kGate, int kMostPacks = Staging::kMostPacks>
__device__ void store_staged(const char* shared, const Result<C, kGate>& to, int64_t row0, int column0) {
  constexpr int kPacks = std::is_same_v<C, E> && kGate == Gate::none ? 1 : kMostPacks;
  const int rows = static_cast<int>(min(int64_t{16}, to.m - row0));
  C* const first = to.row(row0);
  __syncwarp();
  Staging::template each<E, C, kPacks>(shared, [&](int row, int column, const Packed<E, 8>(&packs)[kPacks]) {
    to.template put<E, kActivation>(packs, first, row, rows, column0 + column);
  });
}

// Two sums of a row side by side from registers, not rounded before: `at` in c without a gate.
template <class E>
__device__ void store_pair(float2 x, Activation activation, Gate gate, E* c, int64_t at, bool there) {
  const bool gated = gate == Gate::pairs;
  with_activation(activation, [&](auto kind) {
    x.x = activate<decltype(kind)::value, E>(x.x);
    if (!gated) x.y = activate<decltype(kind)::value, E>(x.y);
  });
  if (!there) return;
  if (gated)
    c[at / 2] = from_float<E>(x.x * x.y);
  else
    Packed<E, 2>::from_floats({x.x, x.y}).store(c + at);
}

template <class Bias, class Activations>
struct StoreArguments {
  Bias bias;
  Activations activations;
  void* c;
  const float* c_scale;  // one, where C is E4M3
};

// The Ending of a product alone: bias, activation, gate. Bias: of bias.cuh. E: as the sums are rounded before the
// activation; C: as the result is stored, E or E4M3.
template <class E, class C, Gate kGate, class Bias, class Activations, class Staging_>
struct Store {
  using Element = E;
  using Staging = Staging_;
  using Arguments = StoreArguments<typename Bias::Arguments, Activations>;
  static constexpr int kVectors = 0;

  const Arguments& arguments;
  Result<C, kGate> to;
  int64_t row0 = 0;
  int column0 = 0;
  Bias bias;

  __device__ Store(const Arguments& arguments, int64_t m, int n) : arguments(arguments), to{arguments.c, m, n} {}

  __device__ void look_ahead(int64_t row, int column) {
    row0 = row, column0 = column;
    if constexpr (std::is_same_v<C, e4m3_t>) to.inverse = 1 / *arguments.c_scale;
    bias.look_ahead(arguments.bias, column0, to.n);
    if constexpr (requires { bias.look_at_rows(arguments.bias, row0, to.m); })
      bias.look_at_rows(arguments.bias, row0, to.m);
  }

  __device__ void finish(float (&sums)[Staging::kEights][4], const float*, char* memory, int further = 0) {
    bias.add(sums);
    stage_and_store(sums, memory, further);
  }
  // Of products in int8.
  __device__ void finish(int32_t (&sums)[Staging::kEights][4], const float*, char* memory) {
    float values[Staging::kEights][4];
    bias.add(sums, values);
    stage_and_store(values, memory, 0);
  }

 private:
  __device__ void stage_and_store(float (&sums)[Staging::kEights][4], char* memory, int further) {
    Staging::template stage<E>(memory, sums);
    arguments.activations.with([&](auto kind) {
      store_staged<Staging, E, C, decltype(kind)::value, kGate>(memory, to, row0 + further, column0);
    });
  }
};

}  // namespace
}  // namespace ftbert
