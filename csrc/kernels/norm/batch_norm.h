// Kernels of BatchNorm with an addend and an activation, and of ReLU with a bit mask, for training. GPUs alone have
// them: on CPUs ftbert/norm/ composes torch's functions. Nothing here allocates or synchronises.
//
// y = act((x - mean) / sqrt(var + eps) * weight + bias + addend); act is none, relu or silu. All sums are in float.
// Masks: bit i % 32 of word i / 32 is element i in memory order, 1 where its gradient passes, as at NaN.
#pragma once
#include <cstdint>

#include "core/context.h"
#include "core/types.h"

namespace ftbert {

// How x [batch, channels, ...] lies in memory, densely: [outer, channels, inner]. NCHW: [batch, channels, height *
// width]; channels_last: [batch * height * width, channels, 1].
struct ChannelLayout {
  int64_t outer, channels, inner;
  int64_t per_channel() const { return outer * inner; }
  int64_t elements() const { return outer * channels * inner; }
};

// [channels], of x's type or float, or absent.
struct ChannelVector {
  void* data = nullptr;
  DType dtype = DType::fp32;
};

struct BatchNormVectors {
  ChannelVector weight, bias;  // absent: 1 and 0
  ChannelVector mean, var;     // of the batch, biased, or running
  float eps;
};

// What a batch's statistics go into, as torch's BatchNorm has them; any of it may be absent.
struct RunningStatistics {
  ChannelVector mean, var;
  int64_t* batches = nullptr;  // their number, this one not yet counted
  float momentum = 0.1f;
  bool cumulative = false;  // 1 / batches, which are there, in place of momentum
};

// Floats of `partials`, where blocks leave their sums.
int64_t batch_norm_partials(const Context<Cuda>& context, const ChannelLayout& layout);

// Of each channel, at least one element of it.
template <class T>
void batch_norm_statistics(Context<Cuda>& context, const T* x, const ChannelLayout& layout, float* partials,
                           const RunningStatistics& running,
                           float* mean,  // [channels] out
                           float* var);  // [channels] out, biased

template <class T>
struct BatchNormForward {
  const T* x;       // [outer, channels, inner], as all that follow
  const T* addend;  // or nullptr
  ChannelLayout layout;
  BatchNormVectors vectors;
  Activation activation;
  T* y;            // out
  uint32_t* mask;  // [ceil(elements / 32)] out, of relu, or nullptr
};
template <class T>
void batch_norm_apply(Context<Cuda>& context, const BatchNormForward<T>& call);

template <class T>
struct BatchNormBackward {
  const T* dy;  // [outer, channels, inner], as x and addend
  const T* x;
  const T* addend;       // silu reads it, where there was one
  const uint32_t* mask;  // relu reads it
  ChannelLayout layout;
  BatchNormVectors vectors;
  Activation activation;
};

// dz: the gradient in front of the activation, which is addend's. sums [2, channels] out: of dz, and of
// dz * (x - mean). d_bias is the first, d_weight the second / sqrt(var + eps); both may be absent.
template <class T>
void batch_norm_backward_sums(Context<Cuda>& context, const BatchNormBackward<T>& call, float* partials, float* sums,
                              const ChannelVector& d_weight, const ChannelVector& d_bias);

// sums nullptr: mean and var are constants. dx, d_addend out; either may be nullptr.
template <class T>
void batch_norm_backward_apply(Context<Cuda>& context, const BatchNormBackward<T>& call, const float* sums, T* dx,
                               T* d_addend);

// y = max(x, 0), NaN where x is. y and mask [ceil(count / 32)] out.
template <class T>
void relu_with_mask(Context<Cuda>& context, const T* x, int64_t count, T* y, uint32_t* mask);

// dx = dy where mask is 1, else 0
template <class T>
void relu_backward_from_mask(Context<Cuda>& context, const T* dy, const uint32_t* mask, int64_t count, T* dx);

}  // namespace ftbert
