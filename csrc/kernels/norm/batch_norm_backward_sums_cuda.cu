// BatchNorm backward, first half: sums over each channel of dz and of dz * (x - mean).
#include "core/dispatch.h"
#include "kernels/norm/batch_norm_gradient.cuh"
#include "kernels/norm/channel_sums.cuh"

namespace ftbert {
namespace {

// Part.a is the sum of dz, Part.b that of dz * (x - mean).
template <Activation kActivation, class E>
struct Gradients {
  static constexpr bool kCounts = false;
  static constexpr int kRows = sizeof(E) == 2 && kActivation != Activation::silu ? 4 : 2, kPacks = 2;
  static constexpr int kBlocks = kActivation == Activation::silu ? 2 : 3;
  using Inputs = BackwardInputs<E>;
  using Loads = EightGradients<kActivation, E>;

  static __device__ void join(Part& part, const Part& other) {
    part.a += other.a;
    part.b += other.b;
  }

  struct Columns {
    const Inputs& in;
    float n = 0, a[kEight] = {}, b[kEight] = {};
    ChannelAffine affine[kEight];

    __device__ Columns(const Inputs& in, int64_t column) : in(in) {
      EightChannels(in.layout, column).each([&](int w, int64_t channel, bool) {
        affine[w] = affine_of<E>(in.vectors, channel);
      });
    }

    template <int K>
    __device__ void absorb(int64_t e, int64_t step) {
      Loads rows[K];
#pragma unroll
      for (int k = 0; k < K; ++k) rows[k].template load<Reuse::later>(in, e + k * step, in.extent, true);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const auto over = [&](const auto& run) {
#pragma unroll
          for (int w = 0; w < kEight; ++w) run(w, affine[w]);
        };
        rows[k].each(in, true, over, [&](int w, float dz, float x, const ChannelAffine& own) {
          a[w] += dz;
          b[w] += dz * (x - own.mean);
        });
      }
    }

    __device__ Part of(int64_t e, int w) const {
      const float x = to_float(in.x[e]);
      float dz = to_float(in.dy[e]);
      if (kActivation == Activation::relu) dz = in.mask[e / 8] >> (e % 8) & 1 ? dz : 0.0f;
      if (kActivation == Activation::silu)
        dz *= silu_slope<E>(affine[w](x) + (in.addend != nullptr ? to_float(in.addend[e]) : 0.0f));
      return {0.0f, dz, dz * (x - affine[w].mean)};
    }
  };

  struct Plane {
    const Inputs& in;
    Part part;
    ChannelAffine affine;

    __device__ Plane(const Inputs& in, int64_t channel) : in(in), affine(affine_of<E>(in.vectors, channel)) {}

    template <int K>
    __device__ void absorb(int64_t pack, int64_t begin, int64_t end) {
      Loads packs[K];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int64_t e = (pack + 32 * k) * kEight;
        if (e < end)
          packs[k].template load<Reuse::later>(in, e, in.extent, true);
        else
          packs[k].clear();
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const EightRange range(pack + 32 * k, begin, end);
        const auto over = [&](const auto& run) {
#pragma unroll
          for (int w = 0; w < kEight; ++w) run(w, affine);
        };
        packs[k].each(in, true, over, [&](int w, float dz, float x, const ChannelAffine& own) {
          part.a += range.has(w) ? dz : 0.0f;
          part.b += range.has(w) ? dz * (x - own.mean) : 0.0f;
        });
      }
    }
  };
};

template <class E>
__global__ void __launch_bounds__(kJoinThreads)
    join_gradients_kernel(const float* partials, const JoinShape shape, const BatchNormVectors vectors, float* sums,
                          const ChannelVector d_weight, const ChannelVector d_bias) {
  wait_for_inputs();
  join_parts<Gradients<Activation::none, E>>(partials, shape, [&](int64_t channel, const Part& part) {
    sums[channel] = part.a;
    sums[shape.channels + channel] = part.b;
    put_value<E>(d_weight, channel, part.b * inverse_root(value_of<E>(vectors.var, channel, 1.0f), vectors.eps));
    put_value<E>(d_bias, channel, part.a);
  });
}

}  // namespace

template <class T>
void batch_norm_backward_sums(Context<Cuda>& context, const BatchNormBackward<T>& call, float* partials, float* sums,
                              const ChannelVector& d_weight, const ChannelVector& d_bias) {
  using E = native_t<T>;
  const SumsPlan plan = SumsPlan::of(call.layout, context.sm_count);
  with_batch_norm_activation(call.activation, [&](auto kind) {
    launch_sums<Gradients<decltype(kind)::value, E>>(context, "kernel batch_norm_backward_sums", plan,
                                                     inputs_of(call, true), partials);
  });
  const JoinShape shape(plan, call.layout.channels);
  launch_overlapped(context, "kernel batch_norm_backward_sums (join)", join_gradients_kernel<E>, shape.blocks(),
                    kJoinThreads, 0, Presence::streaming(), partials, shape, call.vectors, sums, d_weight, d_bias);
}

FTBERT_INSTANTIATE_CUDA(batch_norm_backward_sums)

}  // namespace ftbert
