// The Ending of a product behind a deferred norm (gemm/gpu/deferred_norm.h): its sums become those of the norm's rows,
// then activation and gate.
#pragma once
#include "device/launch.cuh"
#include "gemm/gpu/endings/moments.cuh"
#include "gemm/gpu/endings/store.cuh"

namespace ftbert {
namespace {

struct CorrectArguments {
  const float* add;    // [n]
  const float* slope;  // [n]
  const float* scale;  // [n], of operands in E4M3
  PendingNorm norm;
  RowMoments cleared;
  double inverse;  // 1 / k
  void* c;
  const float* c_scale;  // one, where c is E4M3
  AnyActivation activations;
};

inline CorrectArguments correct_arguments(const Product& p, const ProductData& data) {
  const MomentData& by = data.by_moments;
  return {.add = by.add,
          .slope = by.slope,
          .scale = by.scale,
          .norm = by.pending,
          .cleared = by.moments,
          .inverse = 1.0 / static_cast<double>(p.k),
          .c = data.c,
          .c_scale = data.c_scale,
          .activations = {p.epilogue.activation}};
}

// C: as the result is stored, E or E4M3. kScaled: the operands are E4M3.
template <class E, class Shape, Gate kGate, class C = E, bool kScaled = false>
struct Correct {
  using Arguments = CorrectArguments;
  using Staging = typename Shape::Staging;
  static constexpr int kVectors = 2 + kScaled;

  const Arguments& arguments;
  int64_t m;
  int n;
  int64_t row0 = 0;
  int column0 = 0;
  RowScales scales;
  float inverse = 1;

  __device__ Correct(const Arguments& arguments, int64_t m, int n) : arguments(arguments), m(m), n(n) {}
  __device__ const float* vector(int i) const {
    return i == 0 ? arguments.add : i == 1 ? arguments.slope : arguments.scale;
  }

  __device__ void look_ahead(int64_t row, int column) {
    row0 = row, column0 = column;
    const int lane = threadIdx.x % 32;
    if constexpr (!std::is_same_v<C, E>) inverse = 1 / *arguments.c_scale;
    wait_for_inputs();
    if (arguments.norm.gamma) scales.look(arguments.norm, row0 + Fragment::row(), m);
    if (column0 == 0 && lane < 16 && row0 + lane < m) {
      auto* const to = reinterpret_cast<longlong2*>(arguments.cleared.data + (row0 + lane) * kMomentWords);
      to[0] = to[1] = {0, 0};
    }
  }

  __device__ void finish(float (&sums)[Shape::kEights][4], const float* vectors, char* memory) {
    float2 scale[2] = {{1, 0}, {1, 0}};
    if (arguments.norm.gamma) scales.get(arguments.inverse, arguments.norm.eps, scale);
    Fragment::each_pair(sums, [&](int j, int r, float& x, float& y) {
      const float2 add = pair_of<0, Shape>(vectors, j), slope = pair_of<1, Shape>(vectors, j);
      if constexpr (kScaled) {
        const float2 by = pair_of<2, Shape>(vectors, j);
        x *= by.x, y *= by.y;
      }
      x = x * scale[r].x + (slope.x * scale[r].y + add.x);
      y = y * scale[r].x + (slope.y * scale[r].y + add.y);
    });
    Staging::template stage<E>(memory, sums);
    arguments.activations.with([&](auto kind) {
      // Gates in 16 bits one pack at a time: more lanes share those of few columns.
      constexpr int kPacks = std::is_same_v<C, E> ? 1 : Staging::kMostPacks;
      store_staged<Staging, E, C, decltype(kind)::value, kGate, kPacks>(memory, {arguments.c, m, n, inverse}, row0,
                                                                        column0);
    });
  }
};

template <class E, class Shape>
using Corrected = Correct<E, Shape, Gate::none>;
template <class E, class Shape>
using CorrectedGates = Correct<E, Shape, Gate::pairs>;
template <class E, class C, Gate kGate, class Shape>
using ScaledCorrected = Correct<E, Shape, kGate, C, true>;

}  // namespace
}  // namespace ftbert
