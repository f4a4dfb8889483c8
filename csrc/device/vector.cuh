// Packed access up to 16 bytes, float conversion and reductions: what the kernels of every element type share.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/types.h"

namespace ftbert {

// The interface's storage type -> the type that device code computes with.
template <class T>
using native_t = std::conditional_t<std::is_same_v<T, half_t>, __half,
                                    std::conditional_t<std::is_same_v<T, bfloat16_t>, __nv_bfloat16, T>>;

template <class T>
native_t<T>* native(T* pointer) {
  return reinterpret_cast<native_t<T>*>(pointer);
}
template <class T>
const native_t<T>* native(const T* pointer) {
  return reinterpret_cast<const native_t<T>*>(pointer);
}

// Elements in a 16-byte access.
template <class E>
inline constexpr int kWidth = 16 / sizeof(E);

// True where every row of `cols` elements starts on a `width`-element boundary under each pointer (nullptr: no rows).
template <class... E>
bool vectorizable(int width, int64_t cols, const E*... pointers) {
  return cols % width == 0 && ((reinterpret_cast<uintptr_t>(pointers) % (width * sizeof(E)) == 0) && ...);
}

// launch.operator()<elements in an access>(): kWide, or 1.
template <int kWide, class Launch>
void with_width(bool wide, const Launch& launch) {
  wide ? launch.template operator()<kWide>() : launch.template operator()<1>();
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class E>
__device__ E from_float(float x) {
  if constexpr (sizeof(E) == sizeof(float))
    return x;
  else if constexpr (__is_same(E, __half))
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}

// NaN if one of them is, where fmaxf takes the other.
__device__ inline float max_or_nan(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return isnan(x) || isnan(y) ? __uint_as_float(0x7fffffff) : fmaxf(x, y);  // the same NaN
#else
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
#endif
}

// 2^x, 0 for -inf; relative error 2^-22. exp2f would also handle subnormal results, which no 16-bit result holds.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x; relative error 2^-23.
__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float2 pair_to_float(__half2 x) { return __half22float2(x); }
// An instruction each: __bfloat1622float2 takes each out of the pair before it shifts it.
__device__ inline float2 pair_to_float(__nv_bfloat162 x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

template <class E>
struct PairOf;
template <>
struct PairOf<__half> {
  using type = __half2;
  static __device__ __half2 from(float x, float y) { return __floats2half2_rn(x, y); }
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static __device__ __nv_bfloat162 from(float x, float y) { return __floats2bfloat162_rn(x, y); }
};

// W elements moved by one load or store. Holding the bits, not the elements, is what makes the access one instruction.
template <class E, int W>
struct Packed {
  static constexpr size_t kBytes = sizeof(E) * W;
  using Short = std::conditional_t<kBytes == 2, uint16_t, uint32_t>;
  using Bits = std::conditional_t<kBytes <= 4, Short, std::conditional_t<kBytes == 8, uint2, uint4>>;
  static_assert(sizeof(Bits) == kBytes);
  Bits bits;

  static __device__ Packed zero() { return {Bits{}}; }
  static __device__ Packed load(const E* from) { return {*reinterpret_cast<const Bits*>(from)}; }
  __device__ void store(E* to) const { *reinterpret_cast<Bits*>(to) = bits; }
  // The same of 16 bytes that a multiprocessor reads or writes once: others stay in its L1 cache.
  static __device__ Packed load_once(const E* from) {
    static_assert(kBytes == 16);
    Packed packed;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(packed.bits.x), "=r"(packed.bits.y), "=r"(packed.bits.z), "=r"(packed.bits.w)
                 : "l"(from));
    return packed;
  }
  __device__ void store_once(E* to) const {
    static_assert(kBytes == 16);
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y),
                 "r"(bits.z), "r"(bits.w)
                 : "memory");
  }

  // As the compiler sees, other elements from here on: what was made of them is made anew and not kept.
  __device__ void hide() {
    static_assert(kBytes == 16);
    asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
  }

  __device__ void to_floats(float (&out)[W]) const {
    if constexpr (sizeof(E) == 4 || W == 1) {
      const E* elements = reinterpret_cast<const E*>(&bits);
#pragma unroll
      for (int i = 0; i < W; ++i) out[i] = to_float(elements[i]);
    } else {
      const auto* pairs = reinterpret_cast<const typename PairOf<E>::type*>(&bits);
#pragma unroll
      for (int i = 0; i < W / 2; ++i) {
        const float2 pair = pair_to_float(pairs[i]);
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
      }
    }
  }

  // x += the elements.
  __device__ void add_to(float (&x)[W]) const {
    float y[W];
    to_floats(y);
#pragma unroll
    for (int w = 0; w < W; ++w) x[w] += y[w];
  }

  static __device__ Packed from_floats(const float (&in)[W]) {
    Packed packed;
    if constexpr (sizeof(E) == 4 || W == 1) {
      E* elements = reinterpret_cast<E*>(&packed.bits);
#pragma unroll
      for (int i = 0; i < W; ++i) elements[i] = from_float<E>(in[i]);
    } else {
      auto* pairs = reinterpret_cast<typename PairOf<E>::type*>(&packed.bits);
#pragma unroll
      for (int i = 0; i < W / 2; ++i) pairs[i] = PairOf<E>::from(in[2 * i], in[2 * i + 1]);
    }
    return packed;
  }
};

// Of packs that lie one behind the other.
template <class E, int W, int kPacks>
__device__ void to_floats(const Packed<E, W> (&packs)[kPacks], float (&out)[W * kPacks]) {
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    float part[W];
    packs[i].to_floats(part);
#pragma unroll
    for (int w = 0; w < W; ++w) out[i * W + w] = part[w];
  }
}

struct Sum {
  template <class V>
  __device__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Max {
  template <class V>
  __device__ V operator()(V a, V b) const {
    return max(a, b);
  }
};

// Over the kThreads (a power of two) that work together, neighbours in a warp or a whole block; every thread gets the
// same bits.
template <int kThreads, class V, class Op>
__device__ V reduce(V x, Op op) {
  static_assert(kThreads >= 2 && kThreads <= 1024 && (kThreads & (kThreads - 1)) == 0);
#pragma unroll
  for (int offset = kThreads < 32 ? kThreads / 2 : 16; offset > 0; offset /= 2)
    x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32;
    __shared__ V partial[kWarps];
    const int lane = threadIdx.x % 32;
    __syncthreads();  // readers of the previous round
    if (lane == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    x = partial[lane % kWarps];
#pragma unroll
    for (int offset = kWarps / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Sums over the threads that share a row, where several such groups are in a block and go at their own pace.
//
// Of groups of kThreads neighbours (a power of two), at most kMaxGroups (15 of more than a warp: a hardware barrier
// each) in a block. Every thread gets the same bits.
template <int kThreads, int kMaxGroups>
class GroupSum {
  static constexpr int kWarps = kThreads / 32, kMostValues = 2;  // kWarps: 0 where a warp holds several groups
  static_assert((kThreads & (kThreads - 1)) == 0 && (kThreads <= 32 || kMaxGroups <= 15));

 public:
  static constexpr int kFloats = kThreads > 32 ? kMaxGroups * 2 * kMostValues * kWarps : 1;

  // shared: float[kFloats]
  __device__ GroupSum(float* shared, int group) : partial_(shared + group * 2 * kMostValues * kWarps), group_(group) {}

  template <int kValues>
  __device__ void operator()(float (&x)[kValues]) {
    static_assert(kValues <= kMostValues);
#pragma unroll
    for (int offset = kThreads < 32 ? kThreads / 2 : 16; offset > 0; offset /= 2)
#pragma unroll
      for (int v = 0; v < kValues; ++v) x[v] += __shfl_xor_sync(0xffffffffu, x[v], offset);
    if constexpr (kThreads > 32) {
      // Two rounds in turns, so that one barrier is enough: who writes has passed that of the round between.
      float* const mine = partial_ + round_ * kMostValues * kWarps;
      round_ ^= 1;
      const int lane = threadIdx.x % 32, warp = threadIdx.x % kThreads / 32;
      if (lane == 0)
#pragma unroll
        for (int v = 0; v < kValues; ++v) mine[v * kWarps + warp] = x[v];
      asm volatile("bar.sync %0, %1;" ::"r"(group_ + 1), "n"(kThreads) : "memory");
#pragma unroll
      for (int v = 0; v < kValues; ++v) x[v] = mine[v * kWarps + lane % kWarps];
#pragma unroll
      for (int offset = kWarps / 2; offset > 0; offset /= 2)
#pragma unroll
        for (int v = 0; v < kValues; ++v) x[v] += __shfl_xor_sync(0xffffffffu, x[v], offset);
    }
  }

  __device__ float operator()(float x) {
    float one[1] = {x};
    (*this)(one);
    return one[0];
  }

 private:
  float* partial_;
  int group_, round_ = 0;
};

}  // namespace ftbert
