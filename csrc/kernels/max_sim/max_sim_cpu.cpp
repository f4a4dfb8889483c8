// Late interaction on packed vectors: the sum over a query's vectors of the largest product with one of a document's.
//
// A query's vectors become the columns of panels of floats, which are made once and stay in the first cache. A few rows
// of a document at a time are multiplied by a panel with all sums in registers, and a panel's maxima are two vectors:
// no sum is ever taken across lanes. Rows of 16 or 8 bits become floats in a thread's own memory, once per document.
#include <omp.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "device/parallel_cpu.h"
#include "device/simd_math.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {
namespace {

using simd::kLanes, simd::load, simd::store, simd::Vector;
using Lanes __attribute__((vector_size(kLanes * sizeof(int32_t)))) = int32_t;

constexpr int64_t kColumns = 2 * kLanes;        // of a panel
constexpr int64_t kTall = kLanes == 8 ? 6 : 8;  // rows whose sums registers hold: AVX2 has 16, the others 32
constexpr int64_t kItemsOfThread = 4;           // of documents alone, below which queries are divided too

float float_of(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // The exponent's bias is 112 less; a subnormal's value is right, too.
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f));
}

void to_floats(const void* from, DType dtype, int64_t count, float* to) {
  if (dtype == DType::fp16) {
    const auto* const halves = static_cast<const uint16_t*>(from);
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i))));
#endif
    for (; i < count; ++i) to[i] = float_of(halves[i]);
  } else if (dtype == DType::bf16) {
    const auto* const upper = static_cast<const uint16_t*>(from);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = std::bit_cast<float>(uint32_t{upper[i]} << 16);
  } else if (dtype == DType::int8) {
    const auto* const integers = static_cast<const int8_t*>(from);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = integers[i];
  } else {
    std::memcpy(to, from, count * sizeof(float));
  }
}

const void* row_of(const MaxSim& of, const void* base, int64_t row) {
  return static_cast<const char*>(base) + row * of.width * bytes_of(of.dtype);
}

int64_t longest_of(const int32_t* offsets, int64_t count) {
  int64_t longest = 0;
  for (int64_t i = 0; i < count; ++i) longest = std::max<int64_t>(longest, offsets[i + 1] - offsets[i]);
  return longest;
}

int64_t panels_of(int64_t vectors) { return (vectors + kColumns - 1) / kColumns; }

// What lies in the scratch: where each query's panels begin, the panels, and of each thread a document's rows in float
// and a row of a query on its way to a panel.
struct Scratch {
  int64_t panels = 0, rows = 0;  // of all queries; of the longest document, 0 where its rows are floats
  int threads;

  explicit Scratch(const MaxSim& of) : threads(omp_get_max_threads()) {
    for (int64_t q = 0; q < of.query_count; ++q) panels += panels_of(of.cu_queries[q + 1] - of.cu_queries[q]);
    if (of.dtype != DType::fp32) rows = longest_of(of.cu_documents, of.document_count);
  }
  int64_t of_thread(const MaxSim& of) const { return (rows + 1) * of.width; }
  size_t bytes(const MaxSim& of) const {
    return (of.query_count + 1) * sizeof(int64_t) +
           (panels * of.width * kColumns + threads * of_thread(of)) * sizeof(float);
  }
};

// panels: [width, kColumns] each, of the query's vectors and zeros; row: a vector's memory.
void pack_query(const MaxSim& of, int64_t query, float* panels, float* row) {
  const int64_t first = of.cu_queries[query], vectors = of.cu_queries[query + 1] - first;
  std::memset(panels, 0, panels_of(vectors) * of.width * kColumns * sizeof(float));
  for (int64_t i = 0; i < vectors; ++i) {
    to_floats(row_of(of, of.queries, first + i), of.dtype, of.width, row);
    float* const column = panels + i / kColumns * of.width * kColumns + i % kColumns;
    for (int64_t d = 0; d < of.width; ++d) column[d * kColumns] = row[d];
  }
}

// Of a panel's columns, so far.
struct Largest {
  Vector value[2];
  Lanes nan[2] = {};  // whether one of them was none

  Largest() { value[0] = value[1] = Vector{} - std::numeric_limits<float>::infinity(); }
  void add(int half, Vector sum) {
    value[half] = sum > value[half] ? sum : value[half];
    nan[half] |= sum != sum;
  }
};

// R rows of floats by a panel.
template <int R>
void add_rows(const float* rows, int64_t width, const float* panel, Largest& largest) {
  Vector sum[R][2] = {};
  for (int64_t d = 0; d < width; ++d) {
    const Vector low = load(panel + d * kColumns), high = load(panel + d * kColumns + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum[r][0] += rows[r * width + d] * low;
      sum[r][1] += rows[r * width + d] * high;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    largest.add(0, sum[r][0]);
    largest.add(1, sum[r][1]);
  }
}

// rows [count, width], at least one
float score_of(const float* rows, int64_t count, int64_t width, const float* panels, int64_t vectors) {
  double total = 0;
  for (int64_t first = 0; first < vectors; first += kColumns, panels += width * kColumns) {
    Largest largest;
    int64_t row = 0;
    const auto take = [&]<int R>(std::integral_constant<int, R>) {
      add_rows<R>(rows + row * width, width, panels, largest);
      row += R;
    };
    while (row + kTall <= count) take(std::integral_constant<int, kTall>());
    while (row + 2 <= count) take(std::integral_constant<int, 2>());
    if (row < count) take(std::integral_constant<int, 1>());
    float found[kColumns];
    for (int half = 0; half < 2; ++half) {
      const Vector none = Vector{} + std::numeric_limits<float>::quiet_NaN();
      store(found + half * kLanes, largest.nan[half] ? none : largest.value[half]);
    }
    for (int64_t i = 0; i < std::min(kColumns, vectors - first); ++i) total += found[i];
  }
  return static_cast<float>(total);
}

}  // namespace

size_t max_sim_scratch_bytes(const MaxSim& of) { return Scratch(of).bytes(of); }

void max_sim(const MaxSim& of, void* memory, float* scores) {
  const Scratch scratch(of);
  const int64_t panel = of.width * kColumns, of_thread = scratch.of_thread(of);
  auto* const begins = static_cast<int64_t*>(memory);  // in floats from the first panel on
  auto* const panels = reinterpret_cast<float*>(begins + of.query_count + 1);
  float* const threads = panels + scratch.panels * panel;
  const int64_t all_queries = of.cu_queries[of.query_count], all_rows = of.cu_documents[of.document_count];
  begins[0] = 0;
  for (int64_t q = 0; q < of.query_count; ++q)
    begins[q + 1] = begins[q] + panels_of(of.cu_queries[q + 1] - of.cu_queries[q]) * panel;
  // Each document once, with some of the queries.
  const int64_t each = of.query_of ? 1 : of.query_count, wished = kItemsOfThread * scratch.threads;
  const int64_t parts =
      std::clamp<int64_t>(wished / std::max<int64_t>(of.document_count, 1), 1, std::max<int64_t>(each, 1));
  const int64_t items = of.document_count * parts;
  // Sixteen multiplications take about as long as an element elsewhere.
  const int64_t products =
      all_rows * of.width * (of.query_of ? all_queries / std::max<int64_t>(of.query_count, 1) : all_queries);
#pragma omp parallel num_threads(scratch.threads) if (products / 16 > kSerialElements)
  {
    float* const mine = threads + omp_get_thread_num() * of_thread;
#pragma omp for schedule(dynamic)
    for (int64_t q = 0; q < of.query_count; ++q) pack_query(of, q, panels + begins[q], mine + scratch.rows * of.width);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; ++item) {
      const int64_t document = item / parts, part = item % parts, first = of.cu_documents[document];
      const int64_t count = of.cu_documents[document + 1] - first;
      const void* const given = row_of(of, of.documents, first);
      const float* rows = static_cast<const float*>(given);
      if (of.dtype != DType::fp32) {
        to_floats(given, of.dtype, count * of.width, mine);
        rows = mine;
      }
      const int64_t begin = of.query_of ? of.query_of[document] : each * part / parts;
      const int64_t end = of.query_of ? begin + 1 : each * (part + 1) / parts;
      for (int64_t q = begin; q < end; ++q) {
        const int64_t vectors = of.cu_queries[q + 1] - of.cu_queries[q];
        float* const score = scores + (of.query_of ? document : q * of.document_count + document);
        *score = vectors == 0 ? 0.0f
                 : count == 0 ? kScoreOfNothing
                              : score_of(rows, count, of.width, panels + begins[q], vectors);
      }
    }
  }
}

}  // namespace ftbert::FTBERT_ISA
