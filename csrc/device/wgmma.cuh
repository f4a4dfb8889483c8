// Hopper's warpgroup matrix instructions (sm_90a), as functions. Four warps multiply 64 rows at once; operands lie in
// swizzled shared memory, or A in registers laid out as for mma.m16n8k16 (warp w of the group: rows 16w to 16w+15).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/e4m3.cuh"
#include "device/warpgroups.h"

// Kernels that use them have a body only where this is defined, elsewhere no_warpgroups().
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FTBERT_WGMMA
#endif

namespace ftbert {

// Rows of kRowBytes (64 or 128), 16-byte chunks xor-ed with the row as the hardware's 64- and 128-byte swizzles do;
// groups of eight rows follow each other. PTX ISA, "Shared Memory Matrix Layout". further: bytes to the rows' columns
// from kRowBytes on, where columns are contiguous and there are more of them.
template <int kRowBytes>
__device__ uint64_t matrix_descriptor(uint32_t shared, uint32_t further = 16) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  return ((shared & 0x3FFFF) >> 4 | further >> 4 << 16) | uint64_t{8 * kRowBytes / 16} << 32 | kSwizzle << 62;
}

// Launched where has_warpgroups is false: an error for the host. An empty body would leave old memory as the result.
__device__ inline void no_warpgroups() { __trap(); }

__device__ inline void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending committed groups are still at work.
template <int kPending = 0>
__device__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Makes this thread's ordinary shared-memory writes visible to the instructions above, before a barrier.
__device__ inline void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The compiler must not move what reads d to before the wait that precedes this.
template <int kCount>
__device__ void warpgroup_keep(float (&d)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) asm volatile("" : "+f"(d[i][c])::"memory");
}

// Nor give the registers of an operand to something else before it.
template <int kCount>
__device__ void warpgroup_keep(uint32_t (&a)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) asm volatile("" : "+r"(a[i][c])::"memory");
}

#define FTBERT_R4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FTBERT_R16(d, i) FTBERT_R4(d, i), FTBERT_R4(d, i + 1), FTBERT_R4(d, i + 2), FTBERT_R4(d, i + 3)
#define FTBERT_R64(d, i) FTBERT_R16(d, i), FTBERT_R16(d, i + 4), FTBERT_R16(d, i + 8), FTBERT_R16(d, i + 12)
// What an instruction calls the first 8, 16, 20, ... of them.
#define FTBERT_D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FTBERT_D16 FTBERT_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FTBERT_D20 FTBERT_D16 ",%16,%17,%18,%19"
#define FTBERT_D24 FTBERT_D20 ",%20,%21,%22,%23"
#define FTBERT_D32 FTBERT_D24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FTBERT_D36 FTBERT_D32 ",%32,%33,%34,%35"
#define FTBERT_D40 FTBERT_D36 ",%36,%37,%38,%39"
#define FTBERT_D48 FTBERT_D40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FTBERT_D64 FTBERT_D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FTBERT_D96                                                   \
  FTBERT_D64                                                         \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FTBERT_D128                                                              \
  FTBERT_D96                                                                     \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// The instruction for elements E.
#define FTBERT_OF_E(instruction, ...) \
  if constexpr (__is_same(E, __half)) \
    instruction("f16", __VA_ARGS__);  \
  else                                \
    instruction("bf16", __VA_ARGS__)

// The same where elements may be E4M3: the steps of k, the types, and what follows the signs of a and b.
#define FTBERT_NT_OF_E(...)                              \
  if constexpr (__is_same(E, __half))                    \
    FTBERT_NT("k16.f32.f16.f16", ", 0, 0", __VA_ARGS__); \
  else if constexpr (__is_same(E, e4m3_t))               \
    FTBERT_NT("k32.f32.e4m3.e4m3", "", __VA_ARGS__);     \
  else                                                   \
    FTBERT_NT("k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__)

// d [64, 8 * kColumns8] (+)= a [64, s] @ b [8 * kColumns8, s]^T, both in shared memory with k contiguous; s: 32 bytes.
template <class E, int kColumns8>
__device__ void warpgroup_multiply_nt(float (&d)[kColumns8][4], uint64_t a, uint64_t b, bool add) {
  static_assert(kColumns8 == 4 || kColumns8 == 6 || kColumns8 == 8 || kColumns8 == 12 || kColumns8 == 16 ||
                kColumns8 == 24 || kColumns8 == 32);
#define FTBERT_NT(types, turns, shape, registers, a_at, b_at, add_at, ...)                               \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " add_at ", 0; wgmma.mma_async.sync.aligned." shape types \
               " {" registers "}, " a_at ", " b_at ", p, 1, 1" turns "; }"                               \
               : __VA_ARGS__                                                                             \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (kColumns8 == 4) {
    FTBERT_NT_OF_E("m64n32", FTBERT_D16, "%16", "%17", "%18", FTBERT_R16(d, 0));
  } else if constexpr (kColumns8 == 6) {
    FTBERT_NT_OF_E("m64n48", FTBERT_D24, "%24", "%25", "%26", FTBERT_R16(d, 0), FTBERT_R4(d, 4), FTBERT_R4(d, 5));
  } else if constexpr (kColumns8 == 8) {
    FTBERT_NT_OF_E("m64n64", FTBERT_D32, "%32", "%33", "%34", FTBERT_R16(d, 0), FTBERT_R16(d, 4));
  } else if constexpr (kColumns8 == 12) {
    FTBERT_NT_OF_E("m64n96", FTBERT_D48, "%48", "%49", "%50", FTBERT_R16(d, 0), FTBERT_R16(d, 4), FTBERT_R16(d, 8));
  } else if constexpr (kColumns8 == 16) {
    FTBERT_NT_OF_E("m64n128", FTBERT_D64, "%64", "%65", "%66", FTBERT_R64(d, 0));
  } else if constexpr (kColumns8 == 32) {
    FTBERT_NT_OF_E("m64n256", FTBERT_D128, "%128", "%129", "%130", FTBERT_R64(d, 0), FTBERT_R64(d, 16));
  } else {
    FTBERT_NT_OF_E("m64n192", FTBERT_D96, "%96", "%97", "%98", FTBERT_R64(d, 0), FTBERT_R16(d, 16), FTBERT_R16(d, 20));
  }
#undef FTBERT_NT
}

// d [64, 8 * kColumns8] += a [64, 16] @ b [16, 8 * kColumns8], a in registers, b in shared memory with columns
// contiguous.
template <class E, int kColumns8>
__device__ void warpgroup_multiply_add_nn(float (&d)[kColumns8][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kColumns8 == 5 || kColumns8 == 9 || kColumns8 == 10 || kColumns8 == 12 || kColumns8 == 16 ||
                kColumns8 == 32);
#define FTBERT_NN(type, shape, registers, a_at, b_at, ...)                                                          \
  asm volatile("wgmma.mma_async.sync.aligned." shape "k16.f32." type "." type " {" registers "}, {" a_at "}, " b_at \
               ", 1, 1, 1, 1;"                                                                                      \
               : __VA_ARGS__                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (kColumns8 == 5) {
    FTBERT_OF_E(FTBERT_NN, "m64n40", FTBERT_D20, "%20,%21,%22,%23", "%24", FTBERT_R16(d, 0), FTBERT_R4(d, 4));
  } else if constexpr (kColumns8 == 9) {
    FTBERT_OF_E(FTBERT_NN, "m64n72", FTBERT_D36, "%36,%37,%38,%39", "%40", FTBERT_R16(d, 0), FTBERT_R16(d, 4),
                FTBERT_R4(d, 8));
  } else if constexpr (kColumns8 == 10) {
    FTBERT_OF_E(FTBERT_NN, "m64n80", FTBERT_D40, "%40,%41,%42,%43", "%44", FTBERT_R16(d, 0), FTBERT_R16(d, 4),
                FTBERT_R4(d, 8), FTBERT_R4(d, 9));
  } else if constexpr (kColumns8 == 12) {
    FTBERT_OF_E(FTBERT_NN, "m64n96", FTBERT_D48, "%48,%49,%50,%51", "%52", FTBERT_R16(d, 0), FTBERT_R16(d, 4),
                FTBERT_R16(d, 8));
  } else if constexpr (kColumns8 == 16) {
    FTBERT_OF_E(FTBERT_NN, "m64n128", FTBERT_D64, "%64,%65,%66,%67", "%68", FTBERT_R64(d, 0));
  } else {
    FTBERT_OF_E(FTBERT_NN, "m64n256", FTBERT_D128, "%128,%129,%130,%131", "%132", FTBERT_R64(d, 0), FTBERT_R64(d, 16));
  }
#undef FTBERT_NN
}

// The same with b [8 * kColumns8, 16], k contiguous: d += a @ b^T.
template <class E, int kColumns8>
__device__ void warpgroup_multiply_add_nt(float (&d)[kColumns8][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kColumns8 == 2 || kColumns8 == 4 || kColumns8 == 8 || kColumns8 == 16 || kColumns8 == 32);
#define FTBERT_NT(type, shape, registers, a_at, b_at, ...)                                                          \
  asm volatile("wgmma.mma_async.sync.aligned." shape "k16.f32." type "." type " {" registers "}, {" a_at "}, " b_at \
               ", 1, 1, 1, 0;"                                                                                      \
               : __VA_ARGS__                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (kColumns8 == 2) {
    FTBERT_OF_E(FTBERT_NT, "m64n16", FTBERT_D8, "%8,%9,%10,%11", "%12", FTBERT_R4(d, 0), FTBERT_R4(d, 1));
  } else if constexpr (kColumns8 == 4) {
    FTBERT_OF_E(FTBERT_NT, "m64n32", FTBERT_D16, "%16,%17,%18,%19", "%20", FTBERT_R16(d, 0));
  } else if constexpr (kColumns8 == 8) {
    FTBERT_OF_E(FTBERT_NT, "m64n64", FTBERT_D32, "%32,%33,%34,%35", "%36", FTBERT_R16(d, 0), FTBERT_R16(d, 4));
  } else if constexpr (kColumns8 == 16) {
    FTBERT_OF_E(FTBERT_NT, "m64n128", FTBERT_D64, "%64,%65,%66,%67", "%68", FTBERT_R64(d, 0));
  } else {
    FTBERT_OF_E(FTBERT_NT, "m64n256", FTBERT_D128, "%128,%129,%130,%131", "%132", FTBERT_R64(d, 0), FTBERT_R64(d, 16));
  }
#undef FTBERT_NT
}

#undef FTBERT_OF_E
#undef FTBERT_NT_OF_E
#undef FTBERT_R4
#undef FTBERT_R16
#undef FTBERT_R64
#undef FTBERT_D8
#undef FTBERT_D16
#undef FTBERT_D20
#undef FTBERT_D24
#undef FTBERT_D32
#undef FTBERT_D36
#undef FTBERT_D40
#undef FTBERT_D48
#undef FTBERT_D64
#undef FTBERT_D96
#undef FTBERT_D128

}  // namespace ftbert
