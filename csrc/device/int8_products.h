// Vectors of integers of the instruction set's width, and sums of products of unsigned and signed bytes on them
// (AVX-512 VNNI, AVX-VNNI).
#pragma once
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define FTBERT_INT8
#endif
#include <cstdint>

#include "device/simd_math.h"

namespace ftbert::FTBERT_ISA::simd {

using Integers __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias)) = int32_t;

inline Integers load_integers(const void* p) { return *static_cast<const Integers*>(p); }
inline void store_integers(int32_t* p, Integers v) { *reinterpret_cast<Integers*>(p) = v; }

#ifdef FTBERT_INT8
// sums + in each lane four products of bytes (unsigned) and weights (signed)
inline Integers add_products(Integers sums, Integers bytes, Integers weights) {
#ifdef __AVX512VNNI__
  return reinterpret_cast<Integers>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(bytes), reinterpret_cast<__m512i>(weights)));
#else
  return reinterpret_cast<Integers>(_mm256_dpbusd_avx_epi32(
      reinterpret_cast<__m256i>(sums), reinterpret_cast<__m256i>(bytes), reinterpret_cast<__m256i>(weights)));
#endif
}
#endif

}  // namespace ftbert::FTBERT_ISA::simd
