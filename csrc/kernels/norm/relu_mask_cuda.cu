// y = relu(x) with a bit mask, and the gradient that reads a bit an element in place of y.
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/norm/batch_norm.h"

namespace ftbert {
namespace {

constexpr int kThreads = 256;
constexpr int kPacks = 2;  // a thread's, all in flight

// The pack that this thread has as its i-th, neighbours in neighbouring threads.
__device__ int64_t pack_of(int i) { return (int64_t{blockIdx.x} * kPacks + i) * kThreads + threadIdx.x; }

// W elements of x are W bits of a word, which 32 / W neighbours make together. packs: up to the end of the last word.
template <int W, class E>
__global__ void __launch_bounds__(kThreads) relu_kernel(const E* x, int64_t count, E* y, uint32_t* mask) {
  using Pack = Packed<E, W>;
  constexpr int kSharers = 32 / W;
  wait_for_inputs();
  Pack packs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t first = pack_of(i) * W;
    packs[i] = first < count ? Pack::load(x + first) : Pack::zero();
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t first = pack_of(i) * W;
    const int place = threadIdx.x % kSharers;
    float v[W];
    packs[i].to_floats(v);
    uint32_t word = 0;
#pragma unroll
    for (int w = 0; w < W; ++w) {
      word |= uint32_t{!(v[w] <= 0.0f)} << (place * W + w);
      v[w] = v[w] < 0.0f ? 0.0f : v[w];
    }
#pragma unroll
    for (int offset = kSharers / 2; offset > 0; offset /= 2) word |= __shfl_xor_sync(0xffffffffu, word, offset);
    if (first < count) Pack::from_floats(v).store(y + first);
    if (place == 0 && first < count) mask[first / 32] = word;
  }
}

template <int W, class E>
__global__ void __launch_bounds__(kThreads) gradient_kernel(const E* dy, const uint32_t* mask, int64_t count, E* dx) {
  using Pack = Packed<E, W>;
  wait_for_inputs();
  const auto* const bytes = reinterpret_cast<const uint8_t*>(mask);  // a warp's are neighbours
  Pack packs[kPacks];
  uint32_t bits[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t first = pack_of(i) * W;
    if (first < count) packs[i] = Pack::load(dy + first);
    if (first < count) bits[i] = bytes[first / 8] >> (first % 8);
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t first = pack_of(i) * W;
    if (first >= count) break;
    float v[W];
    packs[i].to_floats(v);
#pragma unroll
    for (int w = 0; w < W; ++w) v[w] = bits[i] >> w & 1 ? v[w] : 0.0f;
    Pack::from_floats(v).store(dx + first);
  }
}

unsigned blocks_of(int64_t packs) {
  return static_cast<unsigned>((packs + kThreads * kPacks - 1) / (kThreads * kPacks));
}

}  // namespace

template <class T>
void relu_with_mask(Context<Cuda>& context, const T* x, int64_t count, T* y, uint32_t* mask) {
  if (count == 0) return;
  with_width<kWidth<T>>(vectorizable(kWidth<T>, count, x, y), [&]<int W>() {
    launch_overlapped(context, "kernel relu_with_mask", relu_kernel<W, native_t<T>>, blocks_of((count + W - 1) / W),
                      kThreads, 0, Presence::streaming(), native(x), count, native(y), mask);
  });
}

template <class T>
void relu_backward_from_mask(Context<Cuda>& context, const T* dy, const uint32_t* mask, int64_t count, T* dx) {
  if (count == 0) return;
  with_width<kWidth<T>>(vectorizable(kWidth<T>, count, dy, dx), [&]<int W>() {
    launch_overlapped(context, "kernel relu_backward_from_mask", gradient_kernel<W, native_t<T>>,
                      blocks_of((count + W - 1) / W), kThreads, 0, Presence::streaming(), native(dy), mask, count,
                      native(dx));
  });
}

FTBERT_INSTANTIATE_CUDA(relu_with_mask)
FTBERT_INSTANTIATE_CUDA(relu_backward_from_mask)

}  // namespace ftbert
