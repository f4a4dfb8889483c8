// What both kernels of BatchNorm's backward read: dz, the gradient in front of the activation, eight elements at a
// time.
#pragma once
#include "device/activation.cuh"
#include "kernels/norm/batch_norm.cuh"

namespace ftbert {

template <class E>
struct BackwardInputs {
  const E *dy, *x, *addend;
  const uint8_t* mask;
  Extent extent;
  ChannelLayout layout;
  BatchNormVectors vectors;

  __device__ void begin() const {}
};

// d silu(z) / dz, for gradients of type E
template <class E>
__device__ float silu_slope(float z) {
  const float s = sizeof(E) == 2 ? sigmoid_16bit(z) : 1.0f / (1.0f + expf(-z));
  return s * (1.0f + z * (1.0f - s));
}

// What dz is made of, of elements [e, e + 8): all loads first, so that they are in flight together.
template <Activation kActivation, class E>
struct EightGradients {
  static constexpr bool kRelu = kActivation == Activation::relu, kSilu = kActivation == Activation::silu;
  Eight<E> dy, x, addend;
  uint32_t bits;

  template <Reuse kReuse, class Where>
  __device__ void load(const BackwardInputs<E>& in, int64_t e, const Where& where, bool with_x) {
    dy = Eight<E>::template load<kReuse>(in.dy, e, where);
    if (with_x || kSilu) x = Eight<E>::template load<kReuse>(in.x, e, where);
    if (kSilu && in.addend != nullptr) addend = Eight<E>::template load<kReuse>(in.addend, e, where);
    if (kRelu) bits = in.mask[e / kEight];
  }
  __device__ void clear() {
    dy = x = Eight<E>{};
    if (kSilu) addend = Eight<E>{};
    if (kRelu) bits = 0;
  }

  // over(run): calls run(w, affine) for w from 0 to 7, affine being the channel's of element w. -> put(w, dz, x,
  // affine)
  template <class Over, class Put>
  __device__ void each(const BackwardInputs<E>& in, bool with_x, const Over& over, const Put& put) const {
    float g[kEight], v[kEight] = {}, added[kEight] = {};
    dy.to_floats(g);
    if (with_x || kSilu) x.to_floats(v);
    if (kSilu && in.addend != nullptr) addend.to_floats(added);
    over([&](int w, const auto& affine) {
      float dz = g[w];
      if constexpr (kRelu) dz = bits >> w & 1 ? dz : 0.0f;
      if constexpr (kSilu) dz *= silu_slope<E>(affine(v[w]) + added[w]);
      put(w, dz, v[w], affine);
    });
  }
};

template <class T>
BackwardInputs<native_t<T>> inputs_of(const BatchNormBackward<T>& call, bool aligned) {
  return {native(call.dy),
          native(call.x),
          native(call.addend),
          reinterpret_cast<const uint8_t*>(call.mask),
          {call.layout.elements(), aligned && aligned16(call.dy) && aligned16(call.x) && aligned16(call.addend)},
          call.layout,
          call.vectors};
}

}  // namespace ftbert
