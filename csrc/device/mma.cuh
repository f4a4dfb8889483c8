// Tensor core and asynchronous copy instructions of sm_80 and later, or as said, as functions, and for sm_75 what does
// the same; and tiles of 16-bit elements on their way to shared memory, laid out so that ldmatrix meets no bank
// conflict.
#pragma once
#include <cuda_fp8.h>

#include <bit>
#include <cstdint>

#include "device/vector.cuh"

namespace ftbert {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define FTBERT_BEFORE_AMPERE
inline constexpr bool kAmpere = false;
#else
inline constexpr bool kAmpere = true;  // in kernels: that they are compiled for sm_80 or later. The host asks the GPU
#endif

// 16 bytes from global to shared memory; zeros where !valid (the source is then not read). On sm_75 the thread waits
// for them here.
__device__ inline void copy_async16(uint32_t shared, const void* global, bool valid) {
#ifdef FTBERT_BEFORE_AMPERE
  const uint4 x = valid ? *static_cast<const uint4*>(global) : uint4{};
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
#endif
}
// The same of what is read once, by whole lines of the L2 cache; needs 8.0.
__device__ inline void copy_async16_once(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// copy_async16 of 8 bytes.
__device__ inline void copy_async8(uint32_t shared, const void* global, bool valid) {
#ifdef FTBERT_BEFORE_AMPERE
  const uint2 x = valid ? *static_cast<const uint2*>(global) : uint2{};
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared), "r"(x.x), "r"(x.y) : "memory");
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(valid ? 8 : 0)
               : "memory");
#endif
}
__device__ inline void copy_async_commit() {
#ifndef FTBERT_BEFORE_AMPERE
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
__device__ void copy_async_wait() {
#ifndef FTBERT_BEFORE_AMPERE
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory (sm_90); lane l gives the address of row l % 8 of matrix l / 8.
// To be read after a barrier; no "memory", so that loads of other things may go ahead of it.
__device__ inline void store_matrices(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3));
}

// The same, each of them turned.
__device__ inline void store_matrices_turned(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3));
}

// Where this thread's row of 16-byte chunks begins in a tile that lies in shared memory as blocks of 64 columns, rows
// of 128 bytes, chunks xor-ed with the row; column 8 * j is `at ^ j % 8 * 16` of block j / 8, for even j.
__device__ inline uint32_t matrix_row(uint32_t tile) {
  const int lane = threadIdx.x % 32, row = lane % 16;
  return tile + row * 128 + ((lane / 16) ^ (row % 8)) * 16;
}

// d [16, 8] += a [16, 16] @ b [16, 8] in float. sm_75 multiplies fp16 alone, eight of k at a time: no GPU of that is
// given a model in bf16 (formats::bf16).
template <class E>
__device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef FTBERT_BEFORE_AMPERE
  if constexpr (!__is_same(E, __half)) return __trap();
  const auto eight_of_k = [&d](uint32_t upper, uint32_t lower, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(upper), "r"(lower), "r"(b));
  };
  eight_of_k(a[0], a[1], b0);
  eight_of_k(a[2], a[3], b1);
#else
  if constexpr (__is_same(E, __half))
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// d [16, 8] += a [16, 32] @ b [32, 8] of E4M3, in float; from sm_89 on, and what is compiled for less is not launched.
// Registers hold of a and b the bytes that they hold of 16-bit elements with half the k.
template <>
__device__ inline void multiply_add<__nv_fp8_e4m3>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}
// The same of uint8 by int8, exact in int32; from sm_80 on.
__device__ inline void multiply_add(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef FTBERT_BEFORE_AMPERE
  __trap();
#else
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Two floats as one register of two 16-bit elements, x in the low half.
template <class E>
__device__ uint32_t pack_pair(float x, float y) {
  const auto pair = PairOf<E>::from(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

namespace {

// 16-byte chunks that a row of kColumns 16-bit elements takes in shared memory: the next power of two.
template <int kColumns>
inline constexpr int kRowChunks = std::bit_ceil(kColumns / 8u);

// Rows of kColumns 16-bit elements in shared memory. 16-byte chunks are permuted within 128-byte lines, so that the
// eight rows of an 8x8 matrix lie in different banks.
template <int kColumns>
__device__ uint32_t swizzled(uint32_t base, int row, int chunk) {
  constexpr int kChunks = kRowChunks<kColumns>;
  const int twist = kChunks >= 8 ? row & 7 : (row >> 1) & (kChunks - 1);
  return base + (row * kChunks + (chunk ^ twist)) * 16;
}

// Copies tiles of kColumns columns, 16 bytes a thread, neighbours side by side. Where in a tile a thread starts is
// worked out once: done per chunk, address arithmetic was half of all instructions (100.2 us against 89.7 for
// 32x512, 12 heads of 64, on an H200).
template <class E, int kColumns, int kThreads>
struct TileLoader {
  static constexpr int kChunks = kRowChunks<kColumns>, kRowsAtOnce = kThreads / kChunks;
  int row, chunk;
  int first, step;  // elements: where this thread starts in a tile, and from one of its rows to the next
  uint32_t shared_first;

  // stride: below 2^31 / kRowsAtOnce.
  __device__ explicit TileLoader(int64_t stride)
      : row(threadIdx.x / kChunks),
        chunk(threadIdx.x % kChunks),
        first(row * static_cast<int>(stride) + chunk * 8),
        step(kRowsAtOnce * static_cast<int>(stride)),
        shared_first(swizzled<kColumns>(0, row, chunk)) {}

  // kRows rows at most; `rows` of them are written, `valid` from memory and the rest as zeros.
  template <int kRows>
  __device__ void load(uint32_t shared, const E* global, int rows, int valid) const {
    const E* source = global + first;
#pragma unroll
    for (int r = 0; r < kRows; r += kRowsAtOnce) {
      // The swizzle repeats every eight rows.
      const uint32_t offset =
          kRowsAtOnce % 8 == 0 ? shared_first + r * kChunks * 16 : swizzled<kColumns>(0, row + r, chunk);
      const bool real = row + r < valid;
      if (row + r < rows && (8 * kChunks == kColumns || 8 * chunk < kColumns))
        copy_async16(shared + offset, real ? source : global, real);
      source += step;
    }
  }
};

}  // namespace
}  // namespace ftbert
