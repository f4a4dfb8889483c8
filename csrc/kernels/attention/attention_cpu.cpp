// softmax(scale * q k^T + bias) v within each sequence, on packed tokens, without a score matrix in memory.
//
// One work item is up to 128 queries of one head of one sequence. The keys that one of them sees are transposed and
// their values copied into the thread's scratch (in a product's rows they lie far apart and share cache sets), then a
// few queries at a time go through scores, softmax and the weighted sum with all accumulators in registers. One or two
// queries in float read keys and values where they lie: to move those takes longer. Where qkv is bf16, both products
// multiply bf16; 32 queries at a time where the CPU gives us tiles and head_size fills them (amx.h). Products with
// positions are made for the distances that occur: of a few queries with the rows of the table that their keys read,
// and of a few keys with those that the item's queries read, which come first.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/amx.h"
#include "device/parallel_cpu.h"
#include "kernels/attention/attention_formats_cpu.h"
#include "kernels/attention/attention_in_place_cpu.h"
#include "kernels/attention/position_rows_cpu.h"
#include "kernels/attention/relative_bias_row.h"
#include "kernels/attention/softmax_row.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {
namespace {

constexpr int64_t kQueriesPerItem = 128;
constexpr int64_t kInPlace = 2;  // queries of an item, at most, for which keys and values stay where they lie
constexpr int kTall = simd::kLanes == 8 ? 6 : 8;  // queries whose sums registers hold: AVX2 has 16, the others 32
#ifdef FTBERT_AMX
constexpr int64_t kQueriesAtOnce = 2 * amx::kSide;
#else
constexpr int64_t kQueriesAtOnce = kTall;
#endif
constexpr int kColumns = 2 * simd::kLanes;  // of keys or of head_size, held in registers by one block

using simd::kLanes, simd::Vector, simd::store;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Scratch {
  float* keys;     // [head_size, keys padded]
  float* values;   // [value_rows, head columns padded]
  float* queries;  // [kQueriesAtOnce, head_size]
  float* scores;   // [kQueriesAtOnce, keys padded]
  // With positions alone:
  float* products = nullptr;  // [kTall, stride] of a few queries or keys with the table's rows
  float* of_keys = nullptr;   // [kQueriesPerItem, keys padded] of each key with the row that a query's distance reads

  static int64_t floats(int64_t seqlen, int64_t head_size, int64_t stride) {
    const int64_t padded = round_up(seqlen, kColumns), columns = round_up(head_size, kColumns);
    return head_size * padded + value_rows(seqlen) * columns + round_up(kQueriesAtOnce * head_size, kLanes) +
           kQueriesAtOnce * padded + (stride > 0 ? kTall * stride + kQueriesPerItem * padded : 0);
  }
  // Tiles read pairs of them to a multiple of kColumns.
  static int64_t value_rows(int64_t seqlen) { return std::max<int64_t>(seqlen, kColumns / 2); }
  Scratch(float* base, int64_t seqlen, int64_t head_size, int64_t stride) {
    const int64_t padded = round_up(seqlen, kColumns), columns = round_up(head_size, kColumns);
    keys = base;
    values = keys + head_size * padded;
    queries = values + value_rows(seqlen) * columns;
    scores = queries + round_up(kQueriesAtOnce * head_size, kLanes);
    if (stride == 0) return;
    products = scores + kQueriesAtOnce * padded;
    of_keys = products + kTall * stride;
  }
};

template <class Format>
constexpr bool kByTiles = false;

#ifdef FTBERT_AMX
// The same operands by tiles, with zeros up to whole ones. head_size is a multiple of kColumns.
struct TileFormat : Bf16Format {
  amx::Tiles tiles;  // a thread's, while it works on queries

  static int64_t depth(int64_t n) { return Bf16Format::depth(round_up(n, kColumns)); }
  static void pack(float* row, int64_t n) {
    const int64_t whole = round_up(n, kColumns);
    std::memset(row + n, 0, (whole - n) * sizeof(float));
    Bf16Format::pack(row, whole);
  }
  template <class In>
  static void gather_values(const In* v, int64_t stride, int64_t length, int64_t head_size, int64_t columns,
                            float* values) {
    gather_values_to(round_up(length, kColumns), v, stride, length, head_size, columns, values);
  }
};
template <>
constexpr bool kByTiles<TileFormat> = true;
#endif

// out [rows, columns] = a [rows, depth] @ b [depth, columns], columns a multiple of kColumns, all row-major; depth in
// Operands. rows is R, or by tiles up to R: they are whole, and products of the rows up to R are not read.
template <class Format, int R>
void multiply([[maybe_unused]] int64_t rows, const typename Format::Operand* a, int64_t lda,
              const typename Format::Operand* b, int64_t ldb, int64_t depth, int64_t columns, float* out, int64_t ldo) {
#ifdef FTBERT_AMX
  if constexpr (kByTiles<Format>) {
    const auto by_tiles = rows > amx::kSide ? amx::multiply<2, float> : amx::multiply<1, float>;
    return by_tiles(a, lda, b, ldb, depth, columns, out, ldo, /*add=*/false);
  }
#endif
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

// One head's scores against the keys of a work item. Places count from the first of these.
struct ItemPolicy {
  const float* table;      // [2*span-1], moved so that table[0] is distance 0; or nullptr
  int64_t farthest;        // span - 1
  const int32_t* columns;  // [keys] where they have gaps, else nullptr
  Window window;           // of places; bounded: not every query sees every key
  bool bounded;

  // scores [keys], of the query at `place`: e^(score - the largest), 0 where it does not see the key; their sum.
  float exp(float* scores, int64_t place, int64_t keys) const {
    if (table) add_relative_bias(table, farthest, columns, place, keys, scores);
    if (!bounded) return exp_row(scores, keys);
    const int64_t begin = std::min<int64_t>(window.begin(static_cast<int>(place)), keys);
    const int64_t end = std::max<int64_t>(begin, window.end(static_cast<int>(place), static_cast<int>(keys)));
    std::memset(scores, 0, begin * sizeof(float));
    std::memset(scores + end, 0, (keys - end) * sizeof(float));
    return begin < end ? exp_row(scores + begin, end - begin) : 1.0f;
  }
};

// One head's tables of positions for the queries and keys of a work item.
struct ItemPositions {
  ItemPlaces places;
  const float *keys, *queries;  // [head_size, stride], or nullptr
  int64_t first_query;          // the place of the item's first

  // What a few queries' scores against all keys lack; q [R, head_size], scaled.
  template <int R>
  void add(const float* q, int64_t query, int64_t length, int64_t head_size, const Scratch& s) const {
    const int64_t stride = places.positions.stride, padded = round_up(length, kColumns);
    PositionRows rows{};
    if (keys) {
      rows = places.rows(query, query + R - 1, 0, length - 1, kColumns);
      multiply<FloatFormat, R>(R, q, head_size, keys + rows.first, stride, head_size, rows.count, s.products, stride);
    }
    for (int r = 0; r < R; ++r) {
      float* const row = s.scores + r * padded;
      if (keys) add_position_row(places, query + r, length, s.products + r * stride - rows.first, row);
      if (!queries) continue;
      const float* const of_keys = s.of_keys + (query + r - first_query) * padded;
#pragma omp simd
      for (int64_t j = 0; j < length; ++j) row[j] += of_keys[j];
    }
  }

  // s.of_keys of R keys from `key` on, for all of the item's queries.
  template <int R>
  void find(const float* k, int64_t k_stride, int64_t key, int64_t count, int64_t length, int64_t head_size,
            float scale, const Scratch& s) const {
    const int64_t stride = places.positions.stride, padded = round_up(length, kColumns);
    const int64_t last_query = first_query + count - 1;
    for (int r = 0; r < R; ++r)
      FloatFormat::pack_scaled(k + (key + r) * k_stride, scale, head_size, s.queries + r * head_size);
    const PositionRows rows = places.rows(first_query, last_query, key, key + R - 1, kColumns);
    multiply<FloatFormat, R>(R, s.queries, head_size, queries + rows.first, stride, head_size, rows.count, s.products,
                             stride);
    const float* const products = s.products - rows.first;
    if (places.exact(first_query, last_query, key, key + R - 1)) {
      const float* const nearest = products + places.positions.rows[0] + key - first_query;
      for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) s.of_keys[i * padded + key + r] = nearest[r * (stride + 1) - i];
      return;
    }
    for (int64_t i = 0; i < count; ++i)
      for (int r = 0; r < R; ++r) {
        const int row = places.positions.row_of(places.distance(first_query + i, key + r));
        s.of_keys[i * padded + key + r] = products[r * stride + row];
      }
  }
};

// `rows` consecutive queries of one head, R or by tiles up to R, the first of them at `place`, against its keys and
// values.
template <class Format, int R, class In>
void attend(const In* q, int64_t q_stride, const Scratch& s, const ItemPolicy& policy, const ItemPositions& positions,
            int64_t place, int64_t rows, int64_t length, int64_t head_size, float scale, float* out,
            int64_t out_stride) {
  using Operand = typename Format::Operand;
  const auto operands = [](float* floats) { return reinterpret_cast<const Operand*>(floats); };
  const int64_t padded = round_up(length, kColumns), columns = round_up(head_size, kColumns);
  for (int64_t r = 0; r < rows; ++r) Format::pack_scaled(q + r * q_stride, scale, head_size, s.queries + r * head_size);
  multiply<Format, R>(rows, operands(s.queries), head_size, operands(s.keys), padded, Format::depth(head_size), padded,
                      s.scores, padded);
  if constexpr (std::is_same_v<Format, FloatFormat>)
    if (positions.places.positions.set()) positions.add<R>(s.queries, place, length, head_size, s);
  float inverse[R];
  for (int64_t r = 0; r < rows; ++r) {
    float* row = s.scores + r * padded;
    inverse[r] = 1.0f / policy.exp(row, place + r, length);
    Format::pack(row, length);
  }
  // The queries are spent; the rows' output columns do not fit there when head_size is no multiple of kColumns.
  float result[R * 256];
  for (int64_t c = 0; c < columns; c += 256) {
    const int64_t width = std::min<int64_t>(256, columns - c);
    multiply<Format, R>(rows, operands(s.scores), padded, operands(s.values) + c, columns, Format::depth(length), width,
                        result, 256);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = c; d < std::min(c + width, head_size); ++d)
        out[r * out_stride + d] = result[r * 256 + d - c] * inverse[r];
  }
}

template <int kCount>
using RowCount = std::integral_constant<int, kCount>;

// In: float, or bfloat16_t for formats of pairs.
template <class Format, class In>
void attend_all(const Heads& heads, const QueriesKeysValues& from, const Sequences& sequences,
                const AttentionScores& scores, void* scratch, float* out) {
  const int64_t width = heads.width(), head_size = heads.size, shared = heads.count / heads.kv;
  const int32_t *const cu_q = sequences.cu_q, *const cu_k = sequences.cu_k, *const end_k = sequences.end_of_keys();
  const RelativeBias<float>& bias = scores.get<ScoreMember::bias>();
  const PositionProducts<float>& positions = scores.get<ScoreMember::positions>();
  const Window& window = scores.get<ScoreMember::window>();
  const int threads = omp_get_max_threads();
  const int64_t query_blocks = (std::min(sequences.max_q, sequences.max_k) + kQueriesPerItem - 1) / kQueriesPerItem;
  const int64_t items = sequences.count * heads.count * query_blocks;
  const int chunk = static_cast<int>(std::clamp<int64_t>(items / (threads * 16), 1, 16));
  // Sixteen multiplications take about as long as an element elsewhere.
  const int64_t most = (cu_q[sequences.count] - cu_q[0]) * sequences.max_k * width / 16;
#pragma omp parallel num_threads(threads) if (most > kSerialElements)
  {
    const Scratch s(static_cast<float*>(scratch) +
                        omp_get_thread_num() * Scratch::floats(sequences.max_k, head_size, positions.stride),
                    sequences.max_k, head_size, positions.stride);
    [[maybe_unused]] const Format format;  // with tiles it shapes them, for as long as it lives
#pragma omp for schedule(dynamic, chunk)
    for (int64_t item = 0; item < items; ++item) {
      const int64_t b = item / (heads.count * query_blocks), h = item / query_blocks % heads.count,
                    query_block = item % query_blocks;
      const int64_t queries = cu_q[b + 1] - cu_q[b], keys = end_k[b] - cu_k[b];
      const int64_t begin = query_block * kQueriesPerItem,
                    end = std::min({queries, sequences.max_q, begin + kQueriesPerItem});
      if (begin >= end) continue;
      // Query i stands at key i + ahead. Of the keys those count that one of the item's queries sees.
      const int64_t ahead = keys_ahead(queries, keys), first_key = window.begin(static_cast<int>(begin + ahead));
      const int64_t length = window.end(static_cast<int>(end - 1 + ahead), static_cast<int>(keys)) - first_key;
      const int64_t row_q = cu_q[b] - sequences.first_q;
      float* o = out + row_q * width + h * head_size;
      if (length <= 0) {
        for (int64_t i = begin; i < end; ++i) std::memset(o + i * width, 0, head_size * sizeof(float));
        continue;
      }
      const int64_t row_k = cu_k[b] - sequences.first_k + first_key;
      const int64_t q_stride = from.q.stride, kv_column = h / shared * head_size;
      const In* q = static_cast<const In*>(from.q.data) + row_q * q_stride + h * head_size;
      const In* k = static_cast<const In*>(from.k.data) + row_k * from.k.stride + kv_column;
      const In* v = static_cast<const In*>(from.v.data) + row_k * from.v.stride + kv_column;
      // Without gaps the distances are those of the packed rows.
      const auto gaps = [&](const int32_t* columns) -> const int32_t* {
        if (columns) columns += cu_k[b];
        return columns && columns[keys - 1] - columns[0] != keys - 1 ? columns + first_key : nullptr;
      };
      ItemPolicy of_item{nullptr, bias.span - 1, nullptr, window, window.set()};
      if (bias.table) {
        of_item.table = bias.table + h * (2 * bias.span - 1) + bias.span - 1;
        of_item.columns = gaps(bias.columns);
      }
      ItemPositions of_positions{{positions, gaps(positions.columns)}, nullptr, nullptr, begin + ahead - first_key};
      const auto head_of = [&](const float* table) {
        return table ? table + h * head_size * positions.stride : nullptr;
      };
      of_positions.keys = head_of(positions.keys), of_positions.queries = head_of(positions.queries);
      if constexpr (std::is_same_v<Format, FloatFormat>) {
        if (end - begin <= kInPlace && !positions.set()) {
          for (int64_t i = begin; i < end; ++i)
            attend_in_place(q + i * q_stride, k, from.k.stride, v, from.v.stride, s.queries, s.scores, of_item,
                            i + ahead - first_key, length, head_size, heads.scale, o + i * width);
          continue;
        }
      }
      Format::gather_keys(k, from.k.stride, length, head_size, round_up(length, kColumns), s.keys);
      Format::gather_values(v, from.v.stride, length, head_size, round_up(head_size, kColumns), s.values);
      if constexpr (std::is_same_v<Format, FloatFormat>) {
        int64_t key = of_positions.queries ? 0 : length;
        const auto take = [&](auto most) {
          of_positions.find<most()>(k, from.k.stride, key, end - begin, length, head_size, heads.scale, s);
          key += most();
        };
        while (key + kTall <= length) take(RowCount<kTall>());
        while (key + 2 <= length) take(RowCount<2>());
        while (key < length) take(RowCount<1>());
      }
      int64_t i = begin;
      const auto take = [&](auto most, int64_t rows) {
        attend<Format, most()>(q + i * q_stride, q_stride, s, of_item, of_positions, i + ahead - first_key, rows,
                               length, head_size, heads.scale, o + i * width, width);
        i += rows;
      };
      if constexpr (kByTiles<Format>) {
        while (i < end) take(RowCount<kQueriesAtOnce>(), std::min(kQueriesAtOnce, end - i));
      } else {
        while (i + kTall <= end) take(RowCount<kTall>(), kTall);
        while (i + 4 <= end) take(RowCount<4>(), 4);
        while (i + 2 <= end) take(RowCount<2>(), 2);
        while (i < end) take(RowCount<1>(), 1);
      }
    }
  }
}

}  // namespace

size_t attention_scratch_bytes(const Heads& heads, int64_t max_k, AttentionUse use, int64_t position_stride) {
  const int threads = use == AttentionUse::alone ? 1 : omp_get_max_threads();
  return threads * Scratch::floats(max_k, heads.size, position_stride) * sizeof(float);
}

Operand attention(const Heads& heads, const QueriesKeysValues& from, const Sequences& sequences,
                  const AttentionScores& scores, const AttentionScratch& scratch, const Operand& to) {
  auto* const out = static_cast<float*>(to.data);
#ifdef FTBERT_BF16_PAIRS
  if (from.dtype == DType::bf16) {
#ifdef FTBERT_AMX
    if (attention_by_tiles(heads.size)) {
      attend_all<TileFormat, bfloat16_t>(heads, from, sequences, scores, scratch.memory, out);
      return to;
    }
#endif
    attend_all<Bf16Format, bfloat16_t>(heads, from, sequences, scores, scratch.memory, out);
    return to;
  }
#endif
  attend_all<FloatFormat, float>(heads, from, sequences, scores, scratch.memory, out);
  return to;
}

}  // namespace ftbert::FTBERT_ISA
