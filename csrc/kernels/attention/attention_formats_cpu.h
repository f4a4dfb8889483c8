// The operands of the CPU's fused attention: in float, or rounded to bf16 in pairs.
#pragma once
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define FTBERT_BF16_PAIRS
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "device/simd_math.h"

namespace ftbert::FTBERT_ISA {

inline constexpr bool kBf16Pairs =
#ifdef FTBERT_BF16_PAIRS
    true;
#else
    false;
#endif

#ifdef __AVX512F__
// rows[i] element j <-> rows[j] element i, of 32 bits each
inline void transpose_16x16(__m512i (&rows)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  // In each 128-bit lane: column 4 * lane + c of rows 4q to 4q + 3 becomes rows[4q + c].
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0xdd);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    rows[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    rows[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
    rows[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    rows[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
  }
}

inline __mmask16 first_lanes(int64_t count) {
  // By value: GCC 12 moves the stores of std::clamp's temporaries out of loops, which AddressSanitizer reports.
  return static_cast<__mmask16>((1u << (count < 0 ? 0 : count > 16 ? 16 : count)) - 1);
}
#elif defined(__AVX2__)
// rows[i] element j <-> rows[j] element i
inline void transpose_8x8(__m256 (&rows)[8]) {
  __m256 t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  // In each half: column 4 * half + c of rows 4q to 4q + 3 becomes rows[4q + c].
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    rows[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    rows[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    rows[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    rows[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2f128_ps(rows[c], rows[4 + c], 0x20);
    t[4 + c] = _mm256_permute2f128_ps(rows[c], rows[4 + c], 0x31);
  }
#pragma GCC unroll 8
  for (int c = 0; c < 8; ++c) rows[c] = t[c];
}
#endif

// Lane i: the sum of what rows[i] has in all lanes. `rows` are spent.
inline simd::Vector add_across(simd::Vector (&rows)[simd::kLanes]) {
  simd::Vector sum = {};
#if defined(__AVX512F__)
  transpose_16x16(reinterpret_cast<__m512i(&)[16]>(rows));
  for (const simd::Vector& row : rows) sum += row;
#elif defined(__AVX2__)
  transpose_8x8(reinterpret_cast<__m256(&)[8]>(rows));
  for (const simd::Vector& row : rows) sum += row;
#else
  for (int i = 0; i < simd::kLanes; ++i)
    for (int j = 0; j < simd::kLanes; ++j) sum[i] += rows[i][j];
#endif
  return sum;
}

// A format of the two products' operands: what they are summed over, `Format::depth(n)` Operands for n elements; how
// one of the left times simd::kLanes of the right is added to as many sums; and how operands come about.
struct FloatFormat {
  using Operand = float;
  static int64_t depth(int64_t n) { return n; }
  static simd::Vector multiply_add(simd::Vector sum, Operand a, const Operand* b) { return sum + a * simd::load(b); }
  static void pack(float*, int64_t) {}
  static void pack_scaled(const float* q, float scale, int64_t n, float* row) {
    for (int64_t i = 0; i < n; ++i) row[i] = q[i] * scale;
  }

  // keys [head_size, padded] from k [length, head_size], zeros beyond length
  static void gather_keys(const float* k, int64_t stride, int64_t length, int64_t head_size, int64_t padded,
                          float* keys) {
#ifdef __AVX512F__
    for (int64_t j = 0; j < padded; j += 16)
      for (int64_t d = 0; d < head_size; d += 16) {
        const __mmask16 columns = first_lanes(head_size - d);
        __m512i rows[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          rows[i] = _mm512_maskz_loadu_epi32(j + i < length ? columns : 0, k + (j + i) * stride + d);
        transpose_16x16(rows);
        const int64_t count = std::min<int64_t>(16, head_size - d);
        for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(keys + (d + i) * padded + j, rows[i]);
      }
#else
    int64_t whole = 0, wide = 0;  // keys and columns that were moved by squares
#ifdef __AVX2__
    whole = length / 8 * 8;
    wide = head_size / 8 * 8;
    for (int64_t j = 0; j < whole; j += 8)
      for (int64_t d = 0; d < wide; d += 8) {
        __m256 rows[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(k + (j + i) * stride + d);
        transpose_8x8(rows);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) _mm256_storeu_ps(keys + (d + i) * padded + j, rows[i]);
      }
#endif
    for (int64_t j = 0; j < length; ++j)
      for (int64_t d = j < whole ? wide : 0; d < head_size; ++d) keys[d * padded + j] = k[j * stride + d];
    for (int64_t d = 0; d < head_size; ++d)
      std::memset(keys + d * padded + length, 0, (padded - length) * sizeof(float));
#endif
  }

  // values [length, columns] from v [length, head_size], zeros beyond head_size
  static void gather_values(const float* v, int64_t stride, int64_t length, int64_t head_size, int64_t columns,
                            float* values) {
    for (int64_t j = 0; j < length; ++j) {
      std::memcpy(values + j * columns, v + j * stride, head_size * sizeof(float));
      std::memset(values + j * columns + head_size, 0, (columns - head_size) * sizeof(float));
    }
  }
};

#ifdef FTBERT_BF16_PAIRS
static_assert(simd::kLanes == 16);

// Rounded to bf16, in pairs of neighbours along the summed dimension, which one instruction multiplies and adds.
struct Bf16Format {
  using Operand __attribute__((may_alias)) = uint32_t;
  static int64_t depth(int64_t n) { return (n + 1) / 2; }
  static simd::Vector multiply_add(simd::Vector sum, Operand a, const Operand* b) {
    const auto pairs = [](__m512i bits) { return reinterpret_cast<__m512bh>(bits); };
    return reinterpret_cast<simd::Vector>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), pairs(_mm512_set1_epi32(a)), pairs(_mm512_loadu_si512(b))));
  }

  // 16 elements, zeros beyond `count`, as floats and as 8 pairs
  static __m512 widened(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }
  static __m512 widened(const bfloat16_t* from, int64_t count) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded(from, count)), 16));
  }
  static __m256i rounded(__m512 floats) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(floats)); }
  static __m256i rounded(const bfloat16_t* from, int64_t count) {
    return _mm256_maskz_loadu_epi16(first_lanes(count), from);
  }

  // The n floats at `row` become depth(n) pairs there.
  static void pack(float* row, int64_t n) { pack_scaled(row, 1.0f, n, row); }
  template <class In>
  static void pack_scaled(const In* from, float scale, int64_t n, float* row) {
    for (int64_t i = 0; i < n; i += 16)
      _mm256_mask_storeu_epi32(row + i / 2, static_cast<__mmask8>(first_lanes(depth(n - i))),
                               rounded(_mm512_mul_ps(widened(from + i, n - i), _mm512_set1_ps(scale))));
  }

  template <class In>
  static void gather_keys(const In* k, int64_t stride, int64_t length, int64_t head_size, int64_t padded, float* keys) {
    for (int64_t j = 0; j < padded; j += 16)
      for (int64_t d = 0; d < head_size; d += 32) {
        __m512i rows[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          const In* from = k + (j + i) * stride + d;
          const int64_t count = j + i < length ? head_size - d : 0;
          rows[i] = _mm512_inserti64x4(_mm512_castsi256_si512(rounded(from, count)), rounded(from + 16, count - 16), 1);
        }
        transpose_16x16(rows);
        const int64_t count = std::min<int64_t>(16, depth(head_size - d));
        for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(keys + (d / 2 + i) * padded + j, rows[i]);
      }
  }

  template <class In>
  static void gather_values(const In* v, int64_t stride, int64_t length, int64_t head_size, int64_t columns,
                            float* values) {
    gather_values_to(length, v, stride, length, head_size, columns, values);
  }
  // With zeros in the rows from `length` to `end`.
  template <class In>
  static void gather_values_to(int64_t end, const In* v, int64_t stride, int64_t length, int64_t head_size,
                               int64_t columns, float* values) {
    for (int64_t j = 0; j < end; j += 2)
      for (int64_t d = 0; d < columns; d += 16) {
        const In* from = v + j * stride + d;
        const __m512i low = _mm512_cvtepu16_epi32(rounded(from, j < length ? head_size - d : 0));
        const __m512i high = _mm512_cvtepu16_epi32(rounded(from + stride, j + 1 < length ? head_size - d : 0));
        _mm512_storeu_si512(values + j / 2 * columns + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
  }
};
#endif

}  // namespace ftbert::FTBERT_ISA
