// softmax(q k^T / sqrt(head_size) + bias) v within each sequence, on packed tokens, without a score matrix in memory.
//
// One work item is up to 128 queries of one head of one sequence. Its keys are transposed and its values copied into
// the thread's scratch (in qkv they lie 3*hidden apart and share cache sets), then 8 queries at a time go through
// scores, softmax and the weighted sum with all accumulators in registers.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/parallel_cpu.h"
#include "kernels/softmax_row.h"

namespace ftbert {
namespace {

constexpr int64_t kQueriesPerItem = 128;
constexpr int kLanes = 16;            // one AVX-512 register; narrower machines split it
constexpr int kColumns = 2 * kLanes;  // of keys or of head_size, held in registers by one block

using Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias)) = float;

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

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

// out [R, columns] = a [R, depth] @ b [depth, columns], columns a multiple of kColumns, all row-major.
template <int R>
void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, int64_t columns, float* out,
              int64_t ldo) {
  for (int64_t c = 0; c < columns; c += kColumns) {
    Vector sum[R][2] = {};
    for (int64_t d = 0; d < depth; ++d) {
      const Vector b0 = load(b + d * ldb + c), b1 = load(b + d * ldb + c + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float x = a[r * lda + d];
        sum[r][0] += x * b0;
        sum[r][1] += x * b1;
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
template <int R>
void attend(const float* q, int64_t q_stride, const Scratch& s, const HeadBias& bias, int64_t query, int64_t length,
            int64_t head_size, float scale, float* out, int64_t out_stride) {
  const int64_t padded = round_up(length, kColumns), columns = round_up(head_size, kColumns);
  for (int r = 0; r < R; ++r)
    for (int64_t d = 0; d < head_size; ++d) s.queries[r * head_size + d] = q[r * q_stride + d] * scale;
  multiply<R>(s.queries, head_size, s.keys, padded, head_size, padded, s.scores, padded);
  float inverse[R];
  for (int r = 0; r < R; ++r) bias.add(s.scores + r * padded, query + r, length);
  for (int r = 0; r < R; ++r) inverse[r] = 1.0f / exp_row(s.scores + r * padded, length);
  // The queries are spent; 8 rows of output columns do not fit there when head_size is no multiple of kColumns.
  float result[R * 256];
  for (int64_t c = 0; c < columns; c += 256) {
    const int64_t width = std::min<int64_t>(256, columns - c);
    multiply<R>(s.scores, padded, s.values + c, columns, length, width, result, 256);
    for (int r = 0; r < R; ++r)
      for (int64_t d = c; d < std::min(c + width, head_size); ++d)
        out[r * out_stride + d] = result[r * 256 + d - c] * inverse[r];
  }
}

void gather_keys_values(const float* k, int64_t stride, int64_t hidden, int64_t length, int64_t head_size,
                        const Scratch& s) {
  const int64_t padded = round_up(length, kColumns), columns = round_up(head_size, kColumns);
  const float* v = k + hidden;
  for (int64_t j = 0; j < length; ++j) {
    for (int64_t d = 0; d < head_size; ++d) s.keys[d * padded + j] = k[j * stride + d];
    std::memcpy(s.values + j * columns, v + j * stride, head_size * sizeof(float));
    std::memset(s.values + j * columns + head_size, 0, (columns - head_size) * sizeof(float));
  }
  for (int64_t d = 0; d < head_size; ++d)
    std::memset(s.keys + d * padded + length, 0, (padded - length) * sizeof(float));
}

}  // namespace

template <>
bool attention_supports<Cpu, float>(const Context<Cpu>&, int64_t) {
  return true;
}

template <>
size_t attention_scratch_bytes<Cpu, float>(int64_t max_seqlen, int64_t head_size) {
  return omp_get_max_threads() * Scratch::floats(max_seqlen, head_size) * sizeof(float);
}

template <>
void attention<Cpu, float>(Context<Cpu>&, const float* qkv, int64_t first_token, const int32_t* cu_seqlens,
                           RelativeBias<float> bias, int64_t batch, int64_t max_seqlen, int64_t queries, int64_t heads,
                           int64_t head_size, void* scratch, float* out) {
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
      gather_keys_values(q + hidden, stride, hidden, length, head_size, s);
      int64_t i = begin;
      for (; i + 8 <= end; i += 8)
        attend<8>(q + i * stride, stride, s, head, i, length, head_size, scale, o + i * hidden, hidden);
      for (; i + 4 <= end; i += 4)
        attend<4>(q + i * stride, stride, s, head, i, length, head_size, scale, o + i * hidden, hidden);
      for (; i < end; ++i)
        attend<1>(q + i * stride, stride, s, head, i, length, head_size, scale, o + i * hidden, hidden);
    }
  }
}

}  // namespace ftbert
