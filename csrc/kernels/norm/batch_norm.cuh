// What BatchNorm's kernels share: eight elements at a time, vectors of channels, and the two ways through a tensor that
// sums over channels go.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/norm/batch_norm.h"

namespace ftbert {

inline constexpr int kBatchNormThreads = 256;
inline constexpr int kEight = 8;  // elements of a thread: a byte of a mask

// What all accesses of a kernel have to know of its tensors: how far they reach, and whether they begin at 16 bytes.
struct Extent {
  int64_t elements;
  bool aligned;
  __device__ bool whole(int64_t e) const { return aligned && e + kEight <= elements; }
};
// Of tensors that are whole eights, aligned.
struct WholeExtent {
  static __device__ bool whole(int64_t) { return true; }
};

// With it what is read for the last time leaves the caches first, and spares what another kernel left there.
enum class Reuse { later, none };

template <class E>
struct Eight {
  static constexpr int kParts = kEight / kWidth<E>;
  Packed<E, kWidth<E>> part[kParts];

  // Elements [e, e + 8), zeros past the end.
  template <Reuse kReuse = Reuse::later, class Where>
  static __device__ Eight load(const E* x, int64_t e, const Where& extent) {
    Eight eight;
    if (extent.whole(e)) {
      using Bits = typename Packed<E, kWidth<E>>::Bits;
      const Bits* const from = reinterpret_cast<const Bits*>(x + e);
#pragma unroll
      for (int i = 0; i < kParts; ++i) eight.part[i].bits = kReuse == Reuse::none ? __ldcs(from + i) : from[i];
    } else if constexpr (__is_same(Where, Extent)) {
      float v[kEight];
#pragma unroll
      for (int w = 0; w < kEight; ++w) v[w] = e + w < extent.elements ? to_float(x[e + w]) : 0.0f;
      eight = from_floats(v);
    }
    return eight;
  }

  // Zeros where none of them lies before `end`.
  static __device__ Eight load_before(int64_t end, const E* x, int64_t e, const Extent& extent) {
    return e < end ? load(x, e, extent) : Eight{};
  }

  template <Reuse kReuse = Reuse::later, class Where>
  __device__ void store(E* y, int64_t e, const Where& extent) const {
    if (extent.whole(e)) {
      using Bits = typename Packed<E, kWidth<E>>::Bits;
      Bits* const to = reinterpret_cast<Bits*>(y + e);
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if constexpr (kReuse == Reuse::none)
          __stcs(to + i, part[i].bits);
        else
          to[i] = part[i].bits;
      }
    } else if constexpr (__is_same(Where, Extent)) {
      float v[kEight];
      to_floats(v);
#pragma unroll
      for (int w = 0; w < kEight; ++w)
        if (e + w < extent.elements) y[e + w] = from_float<E>(v[w]);
    }
  }

  __device__ void to_floats(float (&v)[kEight]) const { ftbert::to_floats(part, v); }

  static __device__ Eight from_floats(const float (&v)[kEight]) {
    Eight eight;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float piece[kWidth<E>];
#pragma unroll
      for (int w = 0; w < kWidth<E>; ++w) piece[w] = v[i * kWidth<E> + w];
      eight.part[i] = Packed<E, kWidth<E>>::from_floats(piece);
    }
    return eight;
  }
};

inline bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// ---- vectors of channels -------------------------------------------------------------------------------------------

template <class E>
__device__ float value_of(const ChannelVector& vector, int64_t channel, float absent) {
  if (vector.data == nullptr) return absent;
  if (vector.dtype == DType::fp32) return static_cast<const float*>(vector.data)[channel];
  return to_float(static_cast<const E*>(vector.data)[channel]);
}

template <class E>
__device__ void put_value(const ChannelVector& vector, int64_t channel, float x) {
  if (vector.data == nullptr) return;
  if (vector.dtype == DType::fp32)
    static_cast<float*>(vector.data)[channel] = x;
  else
    static_cast<E*>(vector.data)[channel] = from_float<E>(x);
}

__device__ inline float inverse_root(float var, float eps) { return rsqrtf(var + eps); }

// z = (x - mean) * scale + shift
struct ChannelAffine {
  float mean, scale, shift;

  __device__ float operator()(float x) const { return (x - mean) * scale + shift; }
};

template <class E>
__device__ ChannelAffine affine_of(const BatchNormVectors& vectors, int64_t channel) {
  const float root = inverse_root(value_of<E>(vectors.var, channel, 1.0f), vectors.eps);
  return {value_of<E>(vectors.mean, channel, 0.0f), root * value_of<E>(vectors.weight, channel, 1.0f),
          value_of<E>(vectors.bias, channel, 0.0f)};
}

// e / d, in 32 bits where they do
__device__ inline int64_t divide(int64_t e, int64_t d) {
  if ((e | d) >> 32 == 0) return static_cast<uint32_t>(e) / static_cast<uint32_t>(d);
  return e / d;
}

// The channels of eight elements that follow each other.
struct EightChannels {
  int64_t channel, left;  // of the first element; elements of its plane from there on
  const ChannelLayout& layout;

  __device__ EightChannels(const ChannelLayout& layout, int64_t e) : layout(layout) {
    const int64_t plane = divide(e, layout.inner);
    left = (plane + 1) * layout.inner - e;
    channel = plane - divide(plane, layout.channels) * layout.channels;
  }

  // run(w, channel, whether it is another than that of w - 1), w from 0 to 7
  template <class Run>
  __device__ void each(const Run& run) const {
    int64_t c = channel, more = left;
    bool fresh = true;
#pragma unroll
    for (int w = 0; w < kEight; ++w) {
      if (more == 0) {
        c = c + 1 == layout.channels ? 0 : c + 1;
        more = layout.inner;
        fresh = true;
      }
      run(w, c, fresh);
      fresh = false;
      --more;
    }
  }
};

// ---- activations ---------------------------------------------------------------------------------------------------

template <class Run>
void with_batch_norm_activation(Activation activation, const Run& run) {
  if (activation == Activation::relu) return run(std::integral_constant<Activation, Activation::relu>());
  if (activation == Activation::silu) return run(std::integral_constant<Activation, Activation::silu>());
  run(std::integral_constant<Activation, Activation::none>());
}

// ---- the grid of [rows, cols] where a thread keeps its eight columns ------------------------------------------------

// A block has `packs` neighbouring eights of columns and `lanes` rows at once; blocks (x) lie side by side, then (y)
// one below the other. All blocks go through the rows together, so that what is read last of one tensor is in the L2
// cache when the next kernel begins at that end.
struct ColumnGrid {
  int64_t rows, cols;
  int packs, lanes;
  unsigned slabs, slices;  // blocks in x, and in y

  static ColumnGrid of(int64_t rows, int64_t cols, int blocks_per_sm, int sm_count) {
    ColumnGrid grid{rows, cols};
    const int64_t all = cols / kEight, slabs = (all + 31) / 32;
    grid.slabs = static_cast<unsigned>(slabs);
    grid.packs = static_cast<int>((all + slabs - 1) / slabs);
    grid.lanes = kBatchNormThreads / grid.packs;
    const int64_t useful = std::max<int64_t>(1, (rows + 8 * grid.lanes - 1) / (8 * grid.lanes));
    grid.slices = static_cast<unsigned>(std::clamp<int64_t>(int64_t{sm_count} * blocks_per_sm / slabs, 1, useful));
    return grid;
  }
};

// This thread's part of a ColumnGrid.
struct ColumnThread {
  int pack, lane;
  int64_t column;
  bool idle;

  __device__ explicit ColumnThread(const ColumnGrid& grid) {
    lane = threadIdx.x / grid.packs;
    pack = threadIdx.x % grid.packs;
    column = (int64_t{blockIdx.x} * grid.packs + pack) * kEight;
    idle = lane >= grid.lanes || column >= grid.cols;
  }
};

// The i-th of the `own` eights of this thread in a whole tensor, the first blocks having the last; below 0: none.
__device__ inline int64_t eight_from_the_end(int64_t elements, int i, int own) {
  return (elements + kEight - 1) / kEight - 1 - ((int64_t{blockIdx.x} * own + i) * kBatchNormThreads + threadIdx.x);
}

inline unsigned eight_blocks(int64_t elements, int own) {
  const int64_t block = int64_t{kBatchNormThreads} * kEight * own;
  return static_cast<unsigned>((elements + block - 1) / block);
}

// Which of the elements of an eight lie in [begin, end).
struct EightRange {
  int low, high;

  __device__ EightRange(int64_t pack, int64_t begin, int64_t end)
      : low(static_cast<int>(clamped(begin - pack * kEight))), high(static_cast<int>(clamped(end - pack * kEight))) {}
  __device__ bool has(int w) const { return w >= low && w < high; }
  __device__ int count() const { return high - low; }
  static __device__ int64_t clamped(int64_t x) { return min(max(x, int64_t{0}), int64_t{kEight}); }
};

// Blocks of a multiprocessor that the kernels of columns leave registers for.
template <class E>
inline constexpr int kColumnBlocks = sizeof(E) == 2 ? 3 : 2;

// Where the fast way through columns is open: every row begins with a whole eight of channels.
inline bool in_columns(const ChannelLayout& layout) { return layout.inner == 1 && layout.channels % kEight == 0; }

}  // namespace ftbert
