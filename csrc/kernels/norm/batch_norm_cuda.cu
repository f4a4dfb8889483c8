// BatchNorm forward: statistics of each channel, then y = act((x - mean) / sqrt(var + eps) * weight + bias + addend).
#include "core/dispatch.h"
#include "device/activation.cuh"
#include "kernels/norm/channel_sums.cuh"

namespace ftbert {
namespace {

// ---- statistics ----------------------------------------------------------------------------------------------------

// Part.a is the mean, Part.b the sum of squared distances from it. Elements join in groups, each about its own mean
// (Chan, Golub and LeVeque 1983): no sum of squares cancels, however far the mean is from zero.
template <class E>
struct Moments {
  static constexpr bool kCounts = true;
  static constexpr int kRows = sizeof(E) == 2 ? 8 : 4, kPacks = 4, kBlocks = 3;

  struct Inputs {
    const E* x;
    Extent extent;
    ChannelLayout layout;
    int64_t* batches;

    __device__ void begin() const {
      if (batches != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) ++*batches;
    }
  };

  static __device__ void join(Part& part, const Part& other) {
    if (other.n == 0.0f) return;
    const float n = part.n + other.n, share = __fdividef(other.n, n), distance = other.a - part.a;
    part.a += distance * share;
    part.b += other.b + distance * distance * (part.n * share);
    part.n = n;
  }

  struct Columns {
    const Inputs& in;
    float n = 0, a[kEight] = {}, b[kEight] = {};

    __device__ Columns(const Inputs& in, int64_t) : in(in) {}

    template <int K>
    __device__ void absorb(int64_t e, int64_t step) {
      Eight<E> rows[K];
#pragma unroll
      for (int k = 0; k < K; ++k) rows[k] = Eight<E>::load(in.x, e + k * step, in.extent);
      const float share = __fdividef(K, n + K), weight = n * share;
#pragma unroll
      for (int w = 0; w < kEight; ++w) {
        float v[K], mean = 0, squares = 0;
#pragma unroll
        for (int k = 0; k < K; ++k) {
          float row[kEight];
          rows[k].to_floats(row);  // of which one is used
          v[k] = row[w];
          mean += v[k];
        }
        mean *= 1.0f / K;
#pragma unroll
        for (int k = 0; k < K; ++k) squares += (v[k] - mean) * (v[k] - mean);
        const float distance = mean - a[w];
        a[w] += distance * share;
        b[w] += squares + distance * distance * weight;
      }
      n += K;
    }
    __device__ Part of(int64_t e, int) const { return {1.0f, to_float(in.x[e]), 0.0f}; }
  };

  struct Plane {
    const Inputs& in;
    Part part;

    __device__ Plane(const Inputs& in, int64_t) : in(in) {}

    template <int K>
    __device__ void absorb(int64_t pack, int64_t begin, int64_t end) {
      Eight<E> packs[K];
#pragma unroll
      for (int k = 0; k < K; ++k) packs[k] = Eight<E>::load_before(end, in.x, (pack + 32 * k) * kEight, in.extent);
      float sum = 0, squares = 0;
      int n = 0;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        float v[kEight];
        packs[k].to_floats(v);
        const EightRange range(pack + 32 * k, begin, end);
#pragma unroll
        for (int w = 0; w < kEight; ++w) sum += range.has(w) ? v[w] : 0.0f;
        n += range.count();
      }
      const float mean = __fdividef(sum, n);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        float v[kEight];
        packs[k].to_floats(v);
        const EightRange range(pack + 32 * k, begin, end);
#pragma unroll
        for (int w = 0; w < kEight; ++w) squares += range.has(w) ? (v[w] - mean) * (v[w] - mean) : 0.0f;
      }
      join(part, {static_cast<float>(n), mean, squares});
    }
  };
};

// mean, var [channels] and what runs along, from the blocks' parts.
template <class E>
__global__ void __launch_bounds__(kJoinThreads)
    join_moments_kernel(const float* partials, const JoinShape shape, int64_t per_channel,
                        const RunningStatistics running, float* mean, float* var) {
  wait_for_inputs();
  join_parts<Moments<E>>(partials, shape, [&](int64_t channel, const Part& part) {
    const float batch_var = part.b / static_cast<float>(per_channel);
    mean[channel] = part.a;
    var[channel] = batch_var;
    const float keep = running.cumulative ? 1.0f / static_cast<float>(*running.batches) : running.momentum;
    const float unbiased = batch_var * (static_cast<float>(per_channel) / static_cast<float>(per_channel - 1));
    const auto run_along = [&](const ChannelVector& to, float now) {
      put_value<E>(to, channel, (1.0f - keep) * value_of<E>(to, channel, 0.0f) + keep * now);
    };
    run_along(running.mean, part.a);
    run_along(running.var, unbiased);
  });
}

// ---- apply ---------------------------------------------------------------------------------------------------------

template <class E>
struct ApplyCall {
  const E *x, *addend;
  E* y;
  uint8_t* mask;
  Extent extent;
  ChannelLayout layout;
  BatchNormVectors vectors;

  // Bytes of the last word that no element has.
  __device__ void end_mask() const {
    const int64_t bytes = (extent.elements + 7) / 8;
    if (mask != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < (-bytes & 3))
      mask[bytes + threadIdx.x] = 0;
  }

  // v: what BatchNorm made of the elements from e on
  template <Activation kActivation, class Where>
  __device__ void finish(float (&v)[kEight], const Eight<E>& added, int64_t e, const Where& where) const {
    if (addend != nullptr) {
      float a[kEight];
      added.to_floats(a);
#pragma unroll
      for (int w = 0; w < kEight; ++w) v[w] += a[w];
    }
    if (kActivation == Activation::relu && mask != nullptr) {
      uint32_t bits = 0;
#pragma unroll
      for (int w = 0; w < kEight; ++w) bits |= uint32_t{!(v[w] <= 0.0f)} << w;
      if (e + kEight > extent.elements) bits &= (1u << (extent.elements - e)) - 1;
      mask[e / kEight] = static_cast<uint8_t>(bits);
    }
#pragma unroll
    for (int w = 0; w < kEight; ++w) v[w] = activate<kActivation, E>(v[w]);
    Eight<E>::from_floats(v).template store<Reuse::none>(y, e, where);
  }
};

// Aligned, where in_columns(layout). From the last rows to the first: the L2 cache has them since the statistics.
template <Activation kActivation, class E>
__global__ void __launch_bounds__(kBatchNormThreads, kColumnBlocks<E>)
    apply_columns_kernel(const ApplyCall<E> call, const ColumnGrid grid) {
  constexpr int kRows = sizeof(E) == 2 ? 3 : 2;
  wait_for_inputs();
  call.end_mask();
  const ColumnThread thread(grid);
  const WholeExtent whole;
  if (thread.idle) return;
  ChannelAffine affine[kEight];
#pragma unroll
  for (int w = 0; w < kEight; ++w) affine[w] = affine_of<E>(call.vectors, thread.column + w);
  const int64_t chunk = int64_t{grid.lanes} * kRows, chunks = (grid.rows + chunk - 1) / chunk;
  for (int64_t at = chunks - 1 - blockIdx.y; at >= 0; at -= grid.slices) {
    const int64_t first = at * chunk + thread.lane;
    Eight<E> x[kRows], addend[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t row = first + k * grid.lanes, e = row * grid.cols + thread.column;
      if (row < grid.rows) {
        x[k] = Eight<E>::template load<Reuse::none>(call.x, e, whole);
        if (call.addend != nullptr) addend[k] = Eight<E>::template load<Reuse::none>(call.addend, e, whole);
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t row = first + k * grid.lanes;
      if (row >= grid.rows) break;
      float v[kEight];
      x[k].to_floats(v);
#pragma unroll
      for (int w = 0; w < kEight; ++w) v[w] = affine[w](v[w]);
      call.template finish<kActivation>(v, addend[k], row * grid.cols + thread.column, whole);
    }
  }
}

constexpr int kApplyEights = 2;  // of a thread, in flight

// Any layout.
template <Activation kActivation, class E>
__global__ void __launch_bounds__(kBatchNormThreads) apply_kernel(const ApplyCall<E> call) {
  wait_for_inputs();
  call.end_mask();
  Eight<E> x[kApplyEights], addend[kApplyEights];
#pragma unroll
  for (int i = 0; i < kApplyEights; ++i) {
    const int64_t e = eight_from_the_end(call.extent.elements, i, kApplyEights) * kEight;
    if (e < 0) break;
    x[i] = Eight<E>::template load<Reuse::none>(call.x, e, call.extent);
    if (call.addend != nullptr) addend[i] = Eight<E>::template load<Reuse::none>(call.addend, e, call.extent);
  }
#pragma unroll
  for (int i = 0; i < kApplyEights; ++i) {
    const int64_t e = eight_from_the_end(call.extent.elements, i, kApplyEights) * kEight;
    if (e < 0) break;
    float v[kEight];
    x[i].to_floats(v);
    ChannelAffine affine;
    EightChannels(call.layout, e).each([&](int w, int64_t channel, bool fresh) {
      if (fresh) affine = affine_of<E>(call.vectors, channel);
      v[w] = affine(v[w]);
    });
    call.template finish<kActivation>(v, addend[i], e, call.extent);
  }
}

}  // namespace

int64_t batch_norm_partials(const Context<Cuda>& context, const ChannelLayout& layout) {
  return 3 * partial_count(SumsPlan::of(layout, context.sm_count), layout);
}

template <class T>
void batch_norm_statistics(Context<Cuda>& context, const T* x, const ChannelLayout& layout, float* partials,
                           const RunningStatistics& running, float* mean, float* var) {
  using E = native_t<T>;
  const SumsPlan plan = SumsPlan::of(layout, context.sm_count);
  launch_sums<Moments<E>>(context, "kernel batch_norm_statistics", plan,
                          {native(x), {layout.elements(), aligned16(x)}, layout, running.batches}, partials);
  const JoinShape shape(plan, layout.channels);
  launch_overlapped(context, "kernel batch_norm_statistics (join)", join_moments_kernel<E>, shape.blocks(),
                    kJoinThreads, 0, Presence::streaming(), partials, shape, layout.per_channel(), running, mean, var);
}

template <class T>
void batch_norm_apply(Context<Cuda>& context, const BatchNormForward<T>& call) {
  using E = native_t<T>;
  const bool aligned = aligned16(call.x) && aligned16(call.addend) && aligned16(call.y);
  const ApplyCall<E> inputs{native(call.x),
                            native(call.addend),
                            native(call.y),
                            reinterpret_cast<uint8_t*>(call.mask),
                            {call.layout.elements(), aligned},
                            call.layout,
                            call.vectors};
  with_batch_norm_activation(call.activation, [&](auto kind) {
    constexpr Activation kActivation = decltype(kind)::value;
    if (aligned && in_columns(call.layout)) {
      const ColumnGrid grid =
          ColumnGrid::of(call.layout.outer, call.layout.channels, kColumnBlocks<E>, context.sm_count);
      launch_overlapped(context, "kernel batch_norm_apply", apply_columns_kernel<kActivation, E>,
                        dim3(grid.slabs, grid.slices), kBatchNormThreads, 0, Presence::streaming(), inputs, grid);
    } else {
      launch_overlapped(context, "kernel batch_norm_apply", apply_kernel<kActivation, E>,
                        eight_blocks(call.layout.elements(), kApplyEights), kBatchNormThreads, 0, Presence::streaming(),
                        inputs);
    }
  });
}

FTBERT_INSTANTIATE_CUDA(batch_norm_statistics)
FTBERT_INSTANTIATE_CUDA(batch_norm_apply)

}  // namespace ftbert
