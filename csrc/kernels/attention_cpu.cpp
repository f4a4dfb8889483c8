// softmax(q k^T / sqrt(head_size) + bias) v within each sequence, on packed tokens, without a score matrix in memory.
//
// One work item is up to 128 queries of one head of one sequence. Its keys are transposed and its values copied into
// the thread's scratch (in qkv they lie 3*hidden apart and share cache sets), then 8 queries at a time go through
// scores, softmax and the weighted sum with all accumulators in registers. Where the model's products take bf16
// operands, these two do too.
#include <omp.h>
#ifdef __AVX512F__
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 means its own header's undefined operands
#endif
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#define FTBERT_BF16_PAIRS
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/parallel_cpu.h"
#include "kernels/softmax_row.h"

namespace ftbert {
namespace {

constexpr int64_t kQueriesPerItem = 128;
constexpr int kColumns = 2 * simd::kLanes;  // of keys or of head_size, held in registers by one block

using simd::kLanes, simd::Vector, simd::load, simd::store;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Scratch {
  float* keys;     // [head_size, keys padded]
  float* values;   // [keys, head columns padded]
  float* queries;  // [8, head_size]
  float* scores;   // [8, keys padded]

  static int64_t floats(int64_t seqlen, int64_t head_size) {
    const int64_t padded = round_up(seqlen, kColumns), columns = round_up(head_size, kColumns);
    return head_size * padded + seqlen * columns + round_up(8 * head_size, kLanes) + 8 * padded;
  }
  Scratch(float* base, int64_t seqlen, int64_t head_size) {
    const int64_t padded = round_up(seqlen, kColumns), columns = round_up(head_size, kColumns);
    keys = base;
    values = keys + head_size * padded;
    queries = values + seqlen * columns;
    scores = queries + round_up(8 * head_size, kLanes);
  }
};

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
  return static_cast<__mmask16>((1u << std::clamp<int64_t>(count, 0, 16)) - 1);
}
#endif

// A format of the two products' operands: what they are summed over, `Format::depth(n)` Operands for n elements; how
// one of the left times kLanes of the right is added to as many sums; and how operands come about.
struct FloatFormat {
  using Operand = float;
  static int64_t depth(int64_t n) { return n; }
  static Vector multiply_add(Vector sum, Operand a, const Operand* b) { return sum + a * load(b); }
  static void pack(float*, int64_t) {}

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
    for (int64_t j = 0; j < length; ++j)
      for (int64_t d = 0; d < head_size; ++d) keys[d * padded + j] = k[j * stride + d];
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
static_assert(kLanes == 16);

// Rounded to bf16, in pairs of neighbours along the summed dimension, which one instruction multiplies and adds.
struct Bf16Format {
  using Operand __attribute__((may_alias)) = uint32_t;
  static int64_t depth(int64_t n) { return (n + 1) / 2; }
  static Vector multiply_add(Vector sum, Operand a, const Operand* b) {
    const auto pairs = [](__m512i bits) { return reinterpret_cast<__m512bh>(bits); };
    return reinterpret_cast<Vector>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), pairs(_mm512_set1_epi32(a)), pairs(_mm512_loadu_si512(b))));
  }

  // 16 floats, zeros beyond `count`, as 8 pairs
  static __m256i rounded(const float* from, int64_t count) {
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first_lanes(count), from)));
  }

  // The n floats at `row` become depth(n) pairs there.
  static void pack(float* row, int64_t n) {
    for (int64_t i = 0; i < n; i += 16)
      _mm256_mask_storeu_epi32(row + i / 2, static_cast<__mmask8>(first_lanes(depth(n - i))), rounded(row + i, n - i));
  }

  static void gather_keys(const float* k, int64_t stride, int64_t length, int64_t head_size, int64_t padded,
                          float* keys) {
    for (int64_t j = 0; j < padded; j += 16)
      for (int64_t d = 0; d < head_size; d += 32) {
        __m512i rows[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          const float* from = k + (j + i) * stride + d;
          const int64_t count = j + i < length ? head_size - d : 0;
          rows[i] = _mm512_inserti64x4(_mm512_castsi256_si512(rounded(from, count)), rounded(from + 16, count - 16), 1);
        }
        transpose_16x16(rows);
        const int64_t count = std::min<int64_t>(16, depth(head_size - d));
        for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(keys + (d / 2 + i) * padded + j, rows[i]);
      }
  }

  static void gather_values(const float* v, int64_t stride, int64_t length, int64_t head_size, int64_t columns,
                            float* values) {
    for (int64_t j = 0; j < length; j += 2)
      for (int64_t d = 0; d < columns; d += 16) {
        const float* from = v + j * stride + d;
        const __m512i low = _mm512_cvtepu16_epi32(rounded(from, head_size - d));
        const __m512i high = _mm512_cvtepu16_epi32(rounded(from + stride, j + 1 < length ? head_size - d : 0));
        _mm512_storeu_si512(values + j / 2 * columns + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
  }
};
#endif

// out [R, columns] = a [R, depth] @ b [depth, columns], columns a multiple of kColumns, all row-major; depth in
// Operands.
template <class Format, int R>
void multiply(const typename Format::Operand* a, int64_t lda, const typename Format::Operand* b, int64_t ldb,
              int64_t depth, int64_t columns, float* out, int64_t ldo) {
  for (int64_t c = 0; c < columns; c += kColumns) {
    Vector sum[R][2] = {};
    for (int64_t d = 0; d < depth; ++d) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sum[r][0] = Format::multiply_add(sum[r][0], a[r * lda + d], b + d * ldb + c);
        sum[r][1] = Format::multiply_add(sum[r][1], a[r * lda + d], b + d * ldb + c + kLanes);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store(out + r * ldo + c, sum[r][0]);
      store(out + r * ldo + c + kLanes, sum[r][1]);
    }
  }
}

// The bias of one head for one sequence.
struct HeadBias {
  const float* table;      // [2*span-1], moved so that table[column(key) - column(query)] is meant; or nullptr
  const int32_t* columns;  // [length] where they have gaps, else nullptr

  void add(float* scores, int64_t query, int64_t length) const {
    if (!table) return;
    if (!columns) {
      const float* row = table - query;
#pragma omp simd
      for (int64_t j = 0; j < length; ++j) scores[j] += row[j];
    } else {
      const float* row = table - columns[query];
      for (int64_t j = 0; j < length; ++j) scores[j] += row[columns[j]];
    }
  }
};

// R consecutive queries of one head, the first of them `query`, against its keys and values.
template <class Format, int R>
void attend(const float* q, int64_t q_stride, const Scratch& s, const HeadBias& bias, int64_t query, int64_t length,
            int64_t head_size, float scale, float* out, int64_t out_stride) {
  using Operand = typename Format::Operand;
  const auto operands = [](float* floats) { return reinterpret_cast<const Operand*>(floats); };
  const int64_t padded = round_up(length, kColumns), columns = round_up(head_size, kColumns);
  for (int r = 0; r < R; ++r) {
    float* row = s.queries + r * head_size;
    for (int64_t d = 0; d < head_size; ++d) row[d] = q[r * q_stride + d] * scale;
    Format::pack(row, head_size);
  }
  multiply<Format, R>(operands(s.queries), head_size, operands(s.keys), padded, Format::depth(head_size), padded,
                      s.scores, padded);
  float inverse[R];
  for (int r = 0; r < R; ++r) bias.add(s.scores + r * padded, query + r, length);
  for (int r = 0; r < R; ++r) inverse[r] = 1.0f / exp_row(s.scores + r * padded, length);
  for (int r = 0; r < R; ++r) Format::pack(s.scores + r * padded, length);
  // The queries are spent; 8 rows of output columns do not fit there when head_size is no multiple of kColumns.
  float result[R * 256];
  for (int64_t c = 0; c < columns; c += 256) {
    const int64_t width = std::min<int64_t>(256, columns - c);
    multiply<Format, R>(operands(s.scores), padded, operands(s.values) + c, columns, Format::depth(length), width,
                        result, 256);
    for (int r = 0; r < R; ++r)
      for (int64_t d = c; d < std::min(c + width, head_size); ++d)
        out[r * out_stride + d] = result[r * 256 + d - c] * inverse[r];
  }
}

template <class Format>
void attend_all(const float* qkv, int64_t first_token, const int32_t* cu_seqlens, const RelativeBias<float>& bias,
                int64_t batch, int64_t max_seqlen, int64_t queries, int64_t heads, int64_t head_size, void* scratch,
                float* out) {
  const int64_t hidden = heads * head_size, stride = 3 * hidden;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_size));
  const int threads = omp_get_max_threads();
  const int64_t parts = (std::min(queries, max_seqlen) + kQueriesPerItem - 1) / kQueriesPerItem;
  const int64_t items = batch * heads * parts;
  const int chunk = static_cast<int>(std::clamp<int64_t>(items / (threads * 16), 1, 16));
  // Sixteen multiplications take about as long as an element elsewhere.
  const int64_t most = (cu_seqlens[batch] - cu_seqlens[0]) * max_seqlen * hidden / 16;
#pragma omp parallel num_threads(threads) if (most > kSerialElements)
  {
    const Scratch s(static_cast<float*>(scratch) + omp_get_thread_num() * Scratch::floats(max_seqlen, head_size),
                    max_seqlen, head_size);
#pragma omp for schedule(dynamic, chunk)
    for (int64_t item = 0; item < items; ++item) {
      const int64_t b = item / (heads * parts), h = item / parts % heads, part = item % parts;
      const int64_t length = cu_seqlens[b + 1] - cu_seqlens[b];
      const int64_t begin = part * kQueriesPerItem, end = std::min({length, queries, begin + kQueriesPerItem});
      if (begin >= end) continue;
      const int64_t row = cu_seqlens[b] - first_token;
      const float* q = qkv + row * stride + h * head_size;
      float* o = out + row * hidden + h * head_size;
      HeadBias head{nullptr, nullptr};
      if (bias.table) {
        head.table = bias.table + h * (2 * bias.span - 1) + bias.span - 1;
        const int32_t* columns = bias.columns ? bias.columns + cu_seqlens[b] : nullptr;
        // Without gaps the distances are those of the packed places.
        if (columns && columns[length - 1] - columns[0] != length - 1) head.columns = columns;
      }
      Format::gather_keys(q + hidden, stride, length, head_size, round_up(length, kColumns), s.keys);
      Format::gather_values(q + 2 * hidden, stride, length, head_size, round_up(head_size, kColumns), s.values);
      int64_t i = begin;
      for (; i + 8 <= end; i += 8)
        attend<Format, 8>(q + i * stride, stride, s, head, i, length, head_size, scale, o + i * hidden, hidden);
      for (; i + 4 <= end; i += 4)
        attend<Format, 4>(q + i * stride, stride, s, head, i, length, head_size, scale, o + i * hidden, hidden);
      for (; i < end; ++i)
        attend<Format, 1>(q + i * stride, stride, s, head, i, length, head_size, scale, o + i * hidden, hidden);
    }
  }
}

}  // namespace

template <>
bool attention_supports<Cpu, float>(const Context<Cpu>&, int64_t) {
  return true;
}

bool attention_in_bf16() {
#ifdef FTBERT_BF16_PAIRS
  return true;
#else
  return false;
#endif
}

template <>
size_t attention_scratch_bytes<Cpu, float>(int64_t max_seqlen, int64_t head_size) {
  return omp_get_max_threads() * Scratch::floats(max_seqlen, head_size) * sizeof(float);
}

template <>
void attention<Cpu, float>([[maybe_unused]] Context<Cpu>& context, const float* qkv, int64_t, int64_t first_token,
                           const int32_t* cu_seqlens, RelativeBias<float> bias, int64_t batch, int64_t max_seqlen,
                           int64_t queries, int64_t heads, int64_t head_size, void* scratch, float* out) {
#ifdef FTBERT_BF16_PAIRS
  if (context.bf16)
    return attend_all<Bf16Format>(qkv, first_token, cu_seqlens, bias, batch, max_seqlen, queries, heads, head_size,
                                  scratch, out);
#endif
  attend_all<FloatFormat>(qkv, first_token, cu_seqlens, bias, batch, max_seqlen, queries, heads, head_size, scratch,
                          out);
}

}  // namespace ftbert
