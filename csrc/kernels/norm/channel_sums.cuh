// Sums over each channel of [outer, channels, inner], in a fixed order: blocks leave partial sums, a second kernel
// joins them. What is summed is a Reducer:
//   Inputs             pointers to device memory, `extent` and `layout` among them
//   kRows, kPacks      loads of a thread in flight; kBlocks: of columns, on a multiprocessor
//   join(Part&, Part)  of two parts of a channel
//   Columns            of a thread that has eight columns of [rows, cols]: absorb<K> takes K rows of them; its members
//                      are those of the parts, by column
//   Plane              of a thread that has one channel: absorb<K> takes elements of [begin, end) from K packs of eight
#pragma once
#include "kernels/norm/batch_norm.cuh"

namespace ftbert {

// n elements, and two sums that they have made.
struct Part {
  float n = 0, a = 0, b = 0;
};

struct SumsPlan {
  bool planes;
  // Columns: memory is [grid.rows, grid.cols], a row a whole number of [channels, inner] and of eights. The rest of the
  // memory is a last row, not full.
  ColumnGrid grid;
  int64_t rest;
  // Planes: a warp has `segment` elements of one, `parts` warps have a plane.
  int64_t segment, parts;
  // Partial sums are [outer, channels, inner] themselves, a plane of them for n, a and b each.
  int64_t outer, inner;

  static constexpr int64_t kLeastPlane = 256;
  static constexpr int kBlocks = 3;

  static SumsPlan of(const ChannelLayout& layout, int sm_count) {
    SumsPlan plan{};
    const int64_t total = layout.elements(), row = layout.channels * layout.inner;
    plan.planes = layout.inner >= kLeastPlane;
    if (plan.planes) {
      const int64_t wanted = std::max<int64_t>(total / (int64_t{sm_count} * 128), 1024);
      plan.parts = (layout.inner + wanted - 1) / wanted;
      plan.segment = (layout.inner + plan.parts - 1) / plan.parts;
      plan.outer = layout.outer;
      plan.inner = plan.parts;
    } else {
      const int64_t folded = kEight / std::gcd<int64_t>(kEight, row);
      plan.grid = ColumnGrid::of(total / (row * folded), row * folded, kBlocks, sm_count);
      plan.rest = total % (row * folded);
      plan.outer = (plan.grid.slices + (plan.rest > 0)) * folded;
      plan.inner = layout.inner;
    }
    return plan;
  }
};

inline int64_t partial_count(const SumsPlan& plan, const ChannelLayout& layout) {
  return plan.outer * layout.channels * plan.inner;
}

template <class Reducer>
__global__ void __launch_bounds__(kBatchNormThreads, Reducer::kBlocks)
    column_sums_kernel(const typename Reducer::Inputs in, const ColumnGrid grid, int64_t rest, int64_t count,
                       float* partials) {
  wait_for_inputs();
  in.begin();
  constexpr int kRows = Reducer::kRows;
  const ColumnThread thread(grid);
  const int64_t cols = grid.cols;
  const auto put = [&](int64_t i, const float (&n)[kEight], const float (&a)[kEight], const float (&b)[kEight]) {
    const WholeExtent all;
    if (Reducer::kCounts) Eight<float>::from_floats(n).store(partials, i, all);
    Eight<float>::from_floats(a).store(partials + count, i, all);
    Eight<float>::from_floats(b).store(partials + 2 * count, i, all);
  };
  typename Reducer::Columns sums(in, thread.idle ? 0 : thread.column);
  float n[kEight], a[kEight], b[kEight];

  if (blockIdx.y == grid.slices) {  // the row that is not full
    if (thread.idle || thread.lane > 0) return;
#pragma unroll
    for (int w = 0; w < kEight; ++w) {
      const Part part = thread.column + w < rest ? sums.of(grid.rows * cols + thread.column + w, w) : Part();
      n[w] = part.n, a[w] = part.a, b[w] = part.b;
    }
    return put(int64_t{grid.slices} * cols + thread.column, n, a, b);
  }

  const int64_t chunk = int64_t{grid.lanes} * kRows, step = grid.lanes * cols;
  if (!thread.idle) {
    for (int64_t first = blockIdx.y * chunk; first < grid.rows; first += int64_t{grid.slices} * chunk) {
      int64_t row = first + thread.lane;
      if (first + chunk <= grid.rows) {
        sums.template absorb<kRows>(row * cols + thread.column, step);
      } else {
        for (; row < grid.rows; row += grid.lanes) sums.template absorb<1>(row * cols + thread.column, step);
      }
    }
  }

  // Lanes join in halves, each with the one half of them behind.
  __shared__ float ns[kBatchNormThreads], as[kEight][kBatchNormThreads], bs[kEight][kBatchNormThreads];
  const auto share = [&] {
    ns[threadIdx.x] = sums.n;
#pragma unroll
    for (int w = 0; w < kEight; ++w) {
      as[w][threadIdx.x] = sums.a[w];
      bs[w][threadIdx.x] = sums.b[w];
    }
  };
  share();
  for (int left = grid.lanes; left > 1;) {
    const int half = (left + 1) / 2;
    __syncthreads();
    if (thread.lane + half < left) {
      const int other = threadIdx.x + half * grid.packs;
      const float mine = sums.n;
#pragma unroll
      for (int w = 0; w < kEight; ++w) {
        Part part{mine, sums.a[w], sums.b[w]};
        Reducer::join(part, {ns[other], as[w][other], bs[w][other]});
        sums.n = part.n, sums.a[w] = part.a, sums.b[w] = part.b;
      }
      share();
    }
    left = half;
  }
  if (thread.idle || thread.lane > 0) return;
#pragma unroll
  for (int w = 0; w < kEight; ++w) n[w] = sums.n;
  put(int64_t{blockIdx.y} * cols + thread.column, n, sums.a, sums.b);
}

template <class Reducer>
__global__ void __launch_bounds__(kBatchNormThreads)
    plane_sums_kernel(const typename Reducer::Inputs in, int64_t segment, int64_t parts, int64_t count,
                      float* partials) {
  wait_for_inputs();
  in.begin();
  constexpr int kPacks = Reducer::kPacks;
  const int64_t warp = int64_t{blockIdx.x} * (kBatchNormThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (warp >= count) return;
  const int64_t plane = divide(warp, parts), inner = in.layout.inner;
  const int64_t begin = plane * inner + (warp - plane * parts) * segment;
  const int64_t end = min(begin + segment, (plane + 1) * inner);
  typename Reducer::Plane sums(in, plane - divide(plane, in.layout.channels) * in.layout.channels);
  for (int64_t pack = begin / kEight + lane; pack * kEight < end; pack += 32 * kPacks)
    sums.template absorb<kPacks>(pack, begin, end);
  Part part = sums.part;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    Reducer::join(part, {__shfl_down_sync(0xffffffffu, part.n, offset), __shfl_down_sync(0xffffffffu, part.a, offset),
                         __shfl_down_sync(0xffffffffu, part.b, offset)});
  if (lane > 0) return;
  if (Reducer::kCounts) partials[warp] = part.n;
  partials[count + warp] = part.a;
  partials[2 * count + warp] = part.b;
}

template <class Reducer>
void launch_sums(const Context<Cuda>& context, const char* name, const SumsPlan& plan,
                 const typename Reducer::Inputs& in, float* partials) {
  const int64_t count = partial_count(plan, in.layout);
  if (plan.planes) {
    const int64_t warps = kBatchNormThreads / 32;
    launch_overlapped(context, name, plane_sums_kernel<Reducer>, dim3((count + warps - 1) / warps), kBatchNormThreads,
                      0, Presence::streaming(), in, plan.segment, plan.parts, count, partials);
  } else {
    launch_overlapped(context, name, column_sums_kernel<Reducer>,
                      dim3(plan.grid.slabs, plan.grid.slices + (plan.rest > 0)), kBatchNormThreads, 0,
                      Presence::streaming(), in, plan.grid, plan.rest, count, partials);
  }
}

// ---- joining what blocks have left ----------------------------------------------------------------------------------

inline constexpr int kJoinThreads = 512;

// A block has this many channels, so that it reads whole sectors where channels are neighbours.
struct JoinShape {
  int64_t outer, channels, inner;
  int together;

  JoinShape(const SumsPlan& plan, int64_t channels)
      : outer(plan.outer), channels(channels), inner(plan.inner), together(inner == 1 && channels >= 8 ? 8 : 1) {}
  unsigned blocks() const { return static_cast<unsigned>((channels + together - 1) / together); }
};

// run(channel, Part): by one thread of each channel of this block
template <class Reducer, class Run>
__device__ void join_parts(const float* partials, const JoinShape& shape, const Run& run) {
  constexpr int kBatch = 4;
  __shared__ Part parts[kJoinThreads];
  const int lanes = kJoinThreads / shape.together, lane = threadIdx.x / shape.together;
  const int64_t channel = int64_t{blockIdx.x} * shape.together + threadIdx.x % shape.together;
  const int64_t entries = shape.outer * shape.inner, count = entries * shape.channels;
  Part sum;
  if (channel < shape.channels) {
    for (int64_t first = lane; first < entries; first += kBatch * lanes) {
      Part batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int64_t entry = first + k * lanes;
        if (entry >= entries) break;
        const int64_t outer = divide(entry, shape.inner);
        const int64_t at = (outer * shape.channels + channel) * shape.inner + entry - outer * shape.inner;
        batch[k] = {Reducer::kCounts ? partials[at] : 0.0f, partials[count + at], partials[2 * count + at]};
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) Reducer::join(sum, batch[k]);
    }
  }
  parts[threadIdx.x] = sum;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      Reducer::join(sum, parts[threadIdx.x + half * shape.together]);
      parts[threadIdx.x] = sum;
    }
  }
  if (lane == 0 && channel < shape.channels) run(channel, sum);
}

}  // namespace ftbert
