// Hopper's warpgroup matrix instructions (sm_90a), as functions. Four warps multiply 64 rows at once; operands lie in
// swizzled shared memory, or A in registers laid out as for mma.m16n8k16 (warp w of the group: rows 16w to 16w+15).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// Kernels that use them have a body only where this is defined.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FTBERT_WGMMA
#endif

namespace ftbert {

// Rows of kRowBytes (64 or 128), 16-byte chunks xor-ed with the row as the hardware's 64- and 128-byte swizzles do;
// groups of eight rows follow each other. PTX ISA, "Shared Memory Matrix Layout".
template <int kRowBytes>
__device__ uint64_t matrix_descriptor(uint32_t shared) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  return (static_cast<uint64_t>(shared & 0x3FFFF) >> 4) | uint64_t{1} << 16 | uint64_t{8 * kRowBytes / 16} << 32 |
         kSwizzle << 62;
}

__device__ inline void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Makes this thread's ordinary shared-memory writes visible to the instructions above, before a barrier.
__device__ inline void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define FTBERT_R4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FTBERT_R16(d, i) FTBERT_R4(d, i), FTBERT_R4(d, i + 1), FTBERT_R4(d, i + 2), FTBERT_R4(d, i + 3)
#define FTBERT_D16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define FTBERT_D32                                                                                              \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31}"

// d [64, 64] (+)= a [64, 16] @ b [64, 16]^T, both in shared memory with k contiguous.
template <class E>
__device__ void warpgroup_multiply_nt(float (&d)[8][4], uint64_t a, uint64_t b, bool add) {
#define FTBERT_NT(type)                                                                                           \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type \
               " " FTBERT_D32 ", %32, %33, p, 1, 1, 0, 0; }"                                                      \
               : FTBERT_R16(d, 0), FTBERT_R16(d, 4)                                                               \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (__is_same(E, __half))
    FTBERT_NT("f16");
  else
    FTBERT_NT("bf16");
#undef FTBERT_NT
}

// d [64, 8 * kColumns8] += a [64, 16] @ b [16, 8 * kColumns8], a in registers, b in shared memory with columns
// contiguous.
template <class E, int kColumns8>
__device__ void warpgroup_multiply_add_nn(float (&d)[kColumns8][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kColumns8 == 4 || kColumns8 == 8);
#define FTBERT_NN32(type)                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " " FTBERT_D16 \
               ", {%16,%17,%18,%19}, %20, 1, 1, 1, 1;"                                    \
               : FTBERT_R16(d, 0)                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define FTBERT_NN64(type)                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " FTBERT_D32 \
               ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"                                    \
               : FTBERT_R16(d, 0), FTBERT_R16(d, 4)                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (kColumns8 == 4) {
    if constexpr (__is_same(E, __half))
      FTBERT_NN32("f16");
    else
      FTBERT_NN32("bf16");
  } else {
    if constexpr (__is_same(E, __half))
      FTBERT_NN64("f16");
    else
      FTBERT_NN64("bf16");
  }
#undef FTBERT_NN32
#undef FTBERT_NN64
}

#undef FTBERT_R4
#undef FTBERT_R16
#undef FTBERT_D16
#undef FTBERT_D32

}  // namespace ftbert
