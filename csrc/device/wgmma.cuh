// Hopper's warpgroup matrix instructions (sm_90a), as functions. Four warps multiply 64 rows at once; operands lie in
// swizzled shared memory, or A in registers laid out as for mma.m16n8k16 (warp w of the group: rows 16w to 16w+15).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/e4m3.cuh"

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

// Launched where Gpu::warpgroups is 0: an error for the host. An empty body would leave old memory as the result.
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

// instruction(columns, d's registers, the numbers of six operands behind them, d) of d [64, columns].
#define FTBERT_BY_COLUMNS(instruction)                                                                              \
  if constexpr (kColumns8 == 2) {                                                                                   \
    instruction(16, FTBERT_D8, 8, 9, 10, 11, 12, 13, FTBERT_R4(d, 0), FTBERT_R4(d, 1));                             \
  } else if constexpr (kColumns8 == 4) {                                                                            \
    instruction(32, FTBERT_D16, 16, 17, 18, 19, 20, 21, FTBERT_R16(d, 0));                                          \
  } else if constexpr (kColumns8 == 5) {                                                                            \
    instruction(40, FTBERT_D20, 20, 21, 22, 23, 24, 25, FTBERT_R16(d, 0), FTBERT_R4(d, 4));                         \
  } else if constexpr (kColumns8 == 6) {                                                                            \
    instruction(48, FTBERT_D24, 24, 25, 26, 27, 28, 29, FTBERT_R16(d, 0), FTBERT_R4(d, 4), FTBERT_R4(d, 5));        \
  } else if constexpr (kColumns8 == 8) {                                                                            \
    instruction(64, FTBERT_D32, 32, 33, 34, 35, 36, 37, FTBERT_R16(d, 0), FTBERT_R16(d, 4));                        \
  } else if constexpr (kColumns8 == 9) {                                                                            \
    instruction(72, FTBERT_D36, 36, 37, 38, 39, 40, 41, FTBERT_R16(d, 0), FTBERT_R16(d, 4), FTBERT_R4(d, 8));       \
  } else if constexpr (kColumns8 == 10) {                                                                           \
    instruction(80, FTBERT_D40, 40, 41, 42, 43, 44, 45, FTBERT_R16(d, 0), FTBERT_R16(d, 4), FTBERT_R4(d, 8),        \
                FTBERT_R4(d, 9));                                                                                   \
  } else if constexpr (kColumns8 == 12) {                                                                           \
    instruction(96, FTBERT_D48, 48, 49, 50, 51, 52, 53, FTBERT_R16(d, 0), FTBERT_R16(d, 4), FTBERT_R16(d, 8));      \
  } else if constexpr (kColumns8 == 16) {                                                                           \
    instruction(128, FTBERT_D64, 64, 65, 66, 67, 68, 69, FTBERT_R64(d, 0));                                         \
  } else if constexpr (kColumns8 == 24) {                                                                           \
    instruction(192, FTBERT_D96, 96, 97, 98, 99, 100, 101, FTBERT_R64(d, 0), FTBERT_R16(d, 16), FTBERT_R16(d, 20)); \
  } else if constexpr (kColumns8 == 32) {                                                                           \
    instruction(256, FTBERT_D128, 128, 129, 130, 131, 132, 133, FTBERT_R64(d, 0), FTBERT_R64(d, 16));               \
  } else                                                                                                            \
    static_assert(kColumns8 < 0, "no instruction has so many columns")

// d [64, 8 * kColumns8] (+)= a [64, s] @ b [8 * kColumns8, s]^T, both in shared memory with k contiguous; s: 32 bytes.
template <class E, int kColumns8>
__device__ void warpgroup_multiply_nt(float (&d)[kColumns8][4], uint64_t a, uint64_t b, bool add) {
// types: the steps of k and the types; turns: what follows the signs of a and b.
#define FTBERT_TYPED(types, turns, columns, registers, a_at, b_at, add_at, x, y, z, ...)                          \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #add_at ", 0; wgmma.mma_async.sync.aligned.m64n" #columns types \
               " {" registers "}, %" #a_at ", %" #b_at ", p, 1, 1" turns "; }"                                    \
               : __VA_ARGS__                                                                                      \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define FTBERT_INSTRUCTION(...)                             \
  if constexpr (__is_same(E, __half))                       \
    FTBERT_TYPED("k16.f32.f16.f16", ", 0, 0", __VA_ARGS__); \
  else if constexpr (__is_same(E, e4m3_t))                  \
    FTBERT_TYPED("k32.f32.e4m3.e4m3", "", __VA_ARGS__);     \
  else                                                      \
    FTBERT_TYPED("k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__)
  FTBERT_BY_COLUMNS(FTBERT_INSTRUCTION);
#undef FTBERT_TYPED
#undef FTBERT_INSTRUCTION
}

// d [64, 8 * kColumns8] += a [64, 16] @ b [16, 8 * kColumns8], a in registers, b in shared memory with k contiguous, or
// where kTurned is 1 with columns contiguous.
template <class E, int kTurned, int kColumns8>
__device__ void warpgroup_multiply_add(float (&d)[kColumns8][4], const uint32_t (&a)[4], uint64_t b) {
#define FTBERT_TYPED(type, columns, registers, turn_at, a0, a1, a2, a3, b_at, ...)                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" registers "}, {%" #a0 \
               ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b_at ", 1, 1, 1, %" #turn_at ";"                              \
               : __VA_ARGS__                                                                                    \
               : "n"(kTurned), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define FTBERT_INSTRUCTION(...)       \
  if constexpr (__is_same(E, __half)) \
    FTBERT_TYPED("f16", __VA_ARGS__); \
  else                                \
    FTBERT_TYPED("bf16", __VA_ARGS__)
  FTBERT_BY_COLUMNS(FTBERT_INSTRUCTION);
#undef FTBERT_TYPED
#undef FTBERT_INSTRUCTION
}

#undef FTBERT_BY_COLUMNS
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
