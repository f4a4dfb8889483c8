// Activation and gate of sums side by side in a row, which were rounded to 16 bits, and the type of C: 16 bits or E4M3.
#pragma once
#include <type_traits>

#include "core/types.h"
#include "device/activation.cuh"
#include "device/e4m3.cuh"
#include "device/vector.cuh"

namespace ftbert {
namespace {

// Which activations a kernel is compiled for. with(f): f of the product's, as an integral_constant.
template <Activation kActivation>
struct OneActivation {
  template <class F>
  __device__ void with(const F& f) const {
    f(std::integral_constant<Activation, kActivation>());
  }
};
struct GeluOrNone {
  Activation activation;

  template <class F>
  __device__ void with(const F& f) const {
    if (activation == Activation::none)
      f(std::integral_constant<Activation, Activation::none>());
    else
      f(std::integral_constant<Activation, Activation::gelu_erf>());
  }
};
struct AnyActivation {
  Activation activation;

  template <class F>
  __device__ void with(const F& f) const {
    with_activation(activation, f);
  }
};

// Elements of C that come of 8 * kPacks sums; with a gate half as many. inverse: 1 / the scale of C in E4M3.
template <class E, class C, Activation kActivation, Gate kGate, int kPacks>
__device__ auto finished(const Packed<E, 8> (&packs)[kPacks], float inverse) {
  constexpr bool kGated = kGate == Gate::pairs;
  if constexpr (std::is_same_v<C, E> && !kGated) {
    static_assert(kPacks == 1);
    return activate_pack<kActivation>(packs[0]);
  } else {
    float v[8 * kPacks];
    to_floats(packs, v);
    if constexpr (std::is_same_v<C, E>) {
      return gate_pairs<kActivation, E, 4 * kPacks>(v);
    } else {
      constexpr int kCount = kGated ? 4 * kPacks : 8 * kPacks;
      Packed<uint32_t, kCount / 4> packed;
      uint32_t* const words = reinterpret_cast<uint32_t*>(&packed.bits);
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        float x[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int j = i * 4 + w;
          if constexpr (kGated)
            x[w] = inverse * (activate<kActivation, E>(v[2 * j]) * v[2 * j + 1]);
          else
            x[w] = inverse * activate<kActivation, E>(v[j]);
        }
        words[i] = to_e4m3(x[0], x[1], x[2], x[3]);
      }
      return packed;
    }
  }
}

}  // namespace
}  // namespace ftbert
