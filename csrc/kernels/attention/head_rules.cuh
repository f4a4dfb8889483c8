// What HeadRules make of a head's numbers: the device code that the kernel `rotary` shares with the products that
// contain it (gemm/gpu/endings/turn.cuh). A thread holds both numbers of its pairs.
#pragma once
#include "device/vector.cuh"
#include "kernels/kernels.h"
#include "kernels/norm/norm_rule.cuh"

namespace ftbert {

// A norm as device code reads it.
template <class T>
Norm<native_t<T>> native(const Norm<T>& norm) {
  return {norm.kind, native(norm.gamma), native(norm.beta), norm.eps, norm.offset, norm.rounding};
}

// Numbers [low, low + W) and [high, high + W) of a head: W pairs, or numbers that pass.
template <int W>
struct Unit {
  int low, high;
  bool turned, whole;  // whole: not the single last number of an odd head, which W = 1 meets

  // pairs: that are turned, a multiple of W.
  __device__ Unit(int index, int pairs, bool interleaved, int size) {
    turned = index * W < pairs;
    const bool apart = turned && !interleaved;
    low = apart ? index * W : 2 * index * W;
    high = apart ? pairs + low : low + W;
    whole = W > 1 || high < size;
  }

  template <class E>
  __device__ void load(const E* head, float (&x)[2 * W]) const {
    float part[W];
    Packed<E, W>::load(head + low).to_floats(part);
#pragma unroll
    for (int w = 0; w < W; ++w) x[w] = part[w];
    if (!whole) return;
    Packed<E, W>::load(head + high).to_floats(part);
#pragma unroll
    for (int w = 0; w < W; ++w) x[W + w] = part[w];
  }
  template <class E>
  __device__ void store(const float (&x)[2 * W], E* head) const {
    float part[W];
#pragma unroll
    for (int w = 0; w < W; ++w) part[w] = x[w];
    Packed<E, W>::from_floats(part).store(head + low);
    if (!whole) return;
#pragma unroll
    for (int w = 0; w < W; ++w) part[w] = x[W + w];
    Packed<E, W>::from_floats(part).store(head + high);
  }
  // f over the numbers that there are.
  template <class F>
  __device__ void each(F&& f) const {
#pragma unroll
    for (int w = 0; w < 2 * W; ++w)
      if (w < W || whole) f(w);
  }
};

// Cosines and sines of W pairs, (c, s) side by side.
template <int W>
__device__ void load_angles(const float* from, float (&to)[2 * W]) {
  constexpr int kStep = W > 1 ? 4 : 2;
#pragma unroll
  for (int i = 0; i < 2 * W; i += kStep) {
    float part[kStep];
    Packed<float, kStep>::load(from + i).to_floats(part);
#pragma unroll
    for (int j = 0; j < kStep; ++j) to[i + j] = part[j];
  }
}

template <int W>
__device__ void turn(float (&x)[2 * W], const float (&angles)[2 * W], bool interleaved) {
  float y[2 * W];
#pragma unroll
  for (int w = 0; w < 2 * W; ++w) y[w] = x[w];
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const float c = angles[2 * i], s = angles[2 * i + 1];
    if (interleaved) {
      x[2 * i] = y[2 * i] * c - y[2 * i + 1] * s;
      x[2 * i + 1] = y[2 * i + 1] * c + y[2 * i] * s;
    } else {
      x[i] = y[i] * c - y[W + i] * s;
      x[W + i] = y[W + i] * c + y[i] * s;
    }
  }
}

// What a head's norm needs to know of it: x mean, y scale. G neighbouring threads have its numbers; all threads of a
// warp come, those without a head too. centred, normed: whether any head's norm is a LayerNorm, or a norm at all.
// each_unit(f): f of each unit that the thread has, whose numbers are then in `held`.
template <int G, class E, int kCount, class EachUnit>
__device__ float2 moments_of_head(const Norm<E>& norm, bool centred, bool normed, int size, const float (&held)[kCount],
                                  const EachUnit& each_unit) {
  float mean = 0, scale = 1;
  if (centred) {
    float total = 0;
    each_unit([&](const auto& unit) { unit.each([&](int w) { total += held[w]; }); });
    total = reduce<G>(total, Sum());
    if (norm.kind == NormKind::layer) mean = total / size;
  }
  if (normed) {
    float squares = 0;
    each_unit([&](const auto& unit) { unit.each([&](int w) { squares += (held[w] - mean) * (held[w] - mean); }); });
    scale = rsqrtf(reduce<G>(squares, Sum()) / size + norm.eps);
  }
  return {mean, scale};
}

// A norm's result, of numbers whose mean and scale are known.
template <int W, class E>
__device__ void normalise(const Unit<W>& unit, const Norm<E>& norm, float mean, float scale, float (&x)[2 * W]) {
  float gamma[2 * W] = {}, beta[2 * W] = {};
  unit.load(norm.gamma, gamma);
  if (norm.beta != nullptr) unit.load(norm.beta, beta);
  unit.each([&](int w) {
    x[w] = normed<E>(NormNumbers{norm.eps, norm.offset}, norm.rounding == NormRounding::before_gamma, x[w] - mean,
                     scale, gamma[w], beta[w]);
  });
}

}  // namespace ftbert
