// BatchNorm backward, second half: dx = weight r (dz - mean of dz - x^ * mean of dz x^), where r = 1 / sqrt(var + eps)
// and x^ = (x - mean) r, and d_addend = dz.
#include "core/dispatch.h"
#include "kernels/norm/batch_norm_gradient.cuh"

namespace ftbert {
namespace {

constexpr int kGradientBlocks = 2;  // of a multiprocessor

template <class E>
struct GradientOutputs {
  const float* sums;  // nullptr: mean and var are constants
  E *dx, *d_addend;
};

// dx = dz * scale + (x - mean) * slope + shift; affine.scale is weight * r
struct GradientAffine {
  ChannelAffine affine;
  float slope, shift;

  __device__ float operator()(float x) const { return affine(x); }
  __device__ float gradient(float dz, float x) const { return dz * affine.scale + ((x - affine.mean) * slope + shift); }
};

template <class E>
__device__ GradientAffine gradient_affine_of(const BackwardInputs<E>& in, const float* sums, int64_t channel) {
  GradientAffine made{affine_of<E>(in.vectors, channel), 0.0f, 0.0f};
  if (sums != nullptr) {
    const float inverse = 1.0f / static_cast<float>((in.layout.outer * in.layout.inner));
    const float root = inverse_root(value_of<E>(in.vectors.var, channel, 1.0f), in.vectors.eps);
    made.shift = -made.affine.scale * sums[channel] * inverse;
    made.slope = -made.affine.scale * root * root * sums[in.layout.channels + channel] * inverse;
  }
  return made;
}

// over: as in EightGradients::each, of GradientAffine
template <Activation kActivation, class E, class Where, class Over>
__device__ void put_gradients(const BackwardInputs<E>& in, const GradientOutputs<E>& out,
                              const EightGradients<kActivation, E>& loads, int64_t e, const Where& where,
                              const Over& over) {
  float dx[kEight], d_addend[kEight];
  loads.each(in, out.sums != nullptr, over, [&](int w, float dz, float x, const GradientAffine& own) {
    d_addend[w] = dz;
    dx[w] = out.sums != nullptr ? own.gradient(dz, x) : dz * own.affine.scale;
  });
  if (out.d_addend != nullptr) Eight<E>::from_floats(d_addend).template store<Reuse::none>(out.d_addend, e, where);
  if (out.dx != nullptr) Eight<E>::from_floats(dx).template store<Reuse::none>(out.dx, e, where);
}

// Aligned, where in_columns(layout). From the last rows to the first: the L2 cache has them since the sums.
template <Activation kActivation, class E>
__global__ void __launch_bounds__(kBatchNormThreads, kGradientBlocks)
    gradient_columns_kernel(const BackwardInputs<E> in, const GradientOutputs<E> out, const ColumnGrid grid) {
  constexpr int kRows = sizeof(E) == 2 && kActivation != Activation::silu ? 4 : 2;
  wait_for_inputs();
  const ColumnThread thread(grid);
  if (thread.idle) return;
  const WholeExtent whole;
  GradientAffine affine[kEight];
#pragma unroll
  for (int w = 0; w < kEight; ++w) affine[w] = gradient_affine_of(in, out.sums, thread.column + w);
  const int64_t chunk = int64_t{grid.lanes} * kRows, chunks = (grid.rows + chunk - 1) / chunk;
  for (int64_t at = chunks - 1 - blockIdx.y; at >= 0; at -= grid.slices) {
    const int64_t first = at * chunk + thread.lane;
    EightGradients<kActivation, E> rows[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t row = first + k * grid.lanes;
      if (row < grid.rows)
        rows[k].template load<Reuse::none>(in, row * grid.cols + thread.column, whole, out.sums != nullptr);
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t row = first + k * grid.lanes;
      if (row >= grid.rows) break;
      put_gradients(in, out, rows[k], row * grid.cols + thread.column, whole, [&](const auto& run) {
#pragma unroll
        for (int w = 0; w < kEight; ++w) run(w, affine[w]);
      });
    }
  }
}

// Any layout.
template <Activation kActivation, class E>
__global__ void __launch_bounds__(kBatchNormThreads)
    gradient_kernel(const BackwardInputs<E> in, const GradientOutputs<E> out) {
  wait_for_inputs();
  const int64_t e = eight_from_the_end(in.extent.elements, 0, 1) * kEight;
  if (e < 0) return;
  EightGradients<kActivation, E> loads;
  loads.template load<Reuse::none>(in, e, in.extent, out.sums != nullptr);
  put_gradients(in, out, loads, e, in.extent, [&](const auto& run) {
    GradientAffine last;
    EightChannels(in.layout, e).each([&](int w, int64_t channel, bool fresh) {
      if (fresh) last = gradient_affine_of(in, out.sums, channel);
      run(w, last);
    });
  });
}

}  // namespace

template <class T>
void batch_norm_backward_apply(Context<Cuda>& context, const BatchNormBackward<T>& call, const float* sums, T* dx,
                               T* d_addend) {
  using E = native_t<T>;
  const BackwardInputs<E> in = inputs_of(call, aligned16(dx) && aligned16(d_addend));
  const GradientOutputs<E> out{sums, native(dx), native(d_addend)};
  with_batch_norm_activation(call.activation, [&](auto kind) {
    constexpr Activation kActivation = decltype(kind)::value;
    if (in.extent.aligned && in_columns(call.layout)) {
      const ColumnGrid grid =
          ColumnGrid::of(call.layout.outer, call.layout.channels, kGradientBlocks, context.sm_count);
      launch_overlapped(context, "kernel batch_norm_backward_apply", gradient_columns_kernel<kActivation, E>,
                        dim3(grid.slabs, grid.slices), kBatchNormThreads, 0, Presence::streaming(), in, out, grid);
    } else {
      launch_overlapped(context, "kernel batch_norm_backward_apply", gradient_kernel<kActivation, E>,
                        eight_blocks(call.layout.elements(), 1), kBatchNormThreads, 0, Presence::streaming(), in, out);
    }
  });
}

FTBERT_INSTANTIATE_CUDA(batch_norm_backward_apply)

}  // namespace ftbert
