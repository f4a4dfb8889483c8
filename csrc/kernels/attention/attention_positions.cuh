// Fused attention with products of positions (PositionProducts) for 16-bit elements on tensor cores. Neither scores nor
// these products are ever in global memory.
//
// A block's queries and a tile's keys are as far apart as a band of kQueries + kKeys neighbouring distances. The rows
// of both tables that stand for them, one for each distance, lie in shared memory in a ring of chunks: the next tile
// reads all but the first chunk again. A warp multiplies its queries with the band of the keys' table, and the band of
// the queries' table with the keys, both as wide as 16 queries and the tile's keys need; of the products those on
// diagonals are wanted, which shuffles bring to the lanes that have the scores. Of 16 queries and 64 keys that is 1.25
// and 2 times the work of q k^T, of 32 queries 1.25 and 1.5 times.
//
// Where the kept tokens of a padded row have gaps between them, distances are no band: each product is then made by
// itself.
#pragma once
#include "device/fragment.cuh"
#include "kernels/attention/attention_policy.cuh"

namespace ftbert {
namespace {

// PositionProducts of score_policy.h with the element type of device code.
template <class E>
struct PositionTables {
  const E *keys, *queries;
  const int32_t* columns;
  int stride, reach;

  // A head's row of distance 0.
  __device__ const E* zero(const E* table, int head, int head_size) const {
    return table ? table + (int64_t{head} * stride + stride / 2) * head_size : nullptr;
  }
};

template <int kHeadSize_, int kWarps_, int kRowTiles_>
struct PositionAttention {
  static constexpr int kHeadSize = kHeadSize_, kWarps = kWarps_, kRowTiles = kRowTiles_;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kRowTiles, kQueries = kRows * kWarps;
  static constexpr int kKeys = kHeadSize <= 64 ? kTileKeys : kTileKeys / 2;  // of a tile, and distances of a chunk
  static constexpr int kPitch = 16 * kRowChunks<kHeadSize>, kTileBytes = kKeys * kPitch;
  static constexpr int kChunks = kQueries / kKeys + 1;  // of a band
  static constexpr int kSlots = kChunks + 1;            // and the one on its way
  static constexpr int kBandBytes = kSlots * kTileBytes;
  static constexpr int kBytes = kQueries * kPitch + 4 * kTileBytes + 2 * kBandBytes;
  static_assert(kQueries % kKeys == 0 && kKeys - 1 <= PositionProducts<float>::kBeyond);
  static_assert(kQueries * kKeys * static_cast<int>(sizeof(float)) <= 2 * kBandBytes);  // where there are gaps
};

// Where the products for a lane's scores stand. For queries i = 0 to 15 and keys c = 0 to 7 these are at c + 15 - i of
// 24 distances: for half r of the queries at c + 7 - i % 8 of the 16 from 8 * (1 - r) on, so in the first or the second
// eight. Each lane offers a number, of the eight that its receiver reads: the place of a lane says it.
class Diagonals {
 public:
  __device__ explicit Diagonals(int lane) {
    const int row = lane / 4, pair = lane % 4, shift = 7 - row;
    odd_ = shift % 2;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int pairs = (shift + c) / 2, column = 2 * pair + c;
      along_[c] = lane - pair + (pair + pairs) % 4;
      next_along_[c] = pair < pairs;
      across_[c] = (shift + column) % 8 * 4 + pair;
      next_across_[c] = row < column;
    }
  }

  // Of products [16 queries, 8 distances] before `along` reads them: those of a pair change places where it is to read
  // the second of one lane and the first of the next.
  __device__ void turn(float (&products)[4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float first = products[2 * r], second = products[2 * r + 1];
      products[2 * r] = odd_ ? second : first;
      products[2 * r + 1] = odd_ ? first : second;
    }
  }
  // Of element x = 2 * r + c of such products, these eight distances and the next.
  __device__ float along(const float (&here)[4], const float (&next)[4], int x) const {
    return __shfl_sync(~0u, next_along_[x % 2] ? next[x] : here[x], along_[x % 2]);
  }
  // Of a key in column c of products [8 distances, 8 keys].
  __device__ float across(float here, float next, int c) const {
    return __shfl_sync(~0u, next_across_[c] ? next : here, across_[c]);
  }

 private:
  int along_[2], across_[2];  // lanes that are asked
  bool next_along_[2], next_across_[2], odd_;
};

__device__ inline void clear(float (&products)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) products[i / 4][i % 4] = 0;
}

// x . row, eight numbers at a time; x: those of a row in shared memory.
template <class E, int kHeadSize>
__device__ float product_of_row(const char* memory, int x_row, const E* row) {
  float sum = 0;
#pragma unroll
  for (int chunk = 0; chunk < kHeadSize / 8; ++chunk) {
    float a[8], b[8];
    Packed<E, 8>{*reinterpret_cast<const uint4*>(memory + swizzled<kHeadSize>(0, x_row, chunk))}.to_floats(a);
    Packed<E, 8>{*reinterpret_cast<const uint4*>(row + 8 * chunk)}.to_floats(b);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += a[i] * b[i];
  }
  return sum;
}

// score += of each distance's row of the queries' table with 16 keys, tile's keys 16 * u on, whose fragments are k.
// rows_at(v): where rows 16 * v of the warp's band lie.
template <class E, class Shape, class RowsAt, int kKeys8, int kSteps>
__device__ void add_across(float (&score)[Shape::kRowTiles][kKeys8][4], int u, const uint32_t (&k)[kSteps][4],
                           const RowsAt& rows_at, const Diagonals& diagonals, uint32_t lane_a) {
  float product[2][2][4];  // of 16 distances each, the last and those before
#pragma unroll
  for (int v = 0; v <= Shape::kRowTiles; ++v) {
    clear(product[v % 2]);
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
      uint32_t rows[4];
      load_matrices(rows, rows_at(u + v) + (lane_a ^ 32 * d));
      multiply_add<E>(product[v % 2][0], rows, k[d][0], k[d][1]);
      multiply_add<E>(product[v % 2][1], rows, k[d][2], k[d][3]);
    }
    if (v == 0) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int c = x % 2, eight = j + 1 - x / 2;
        const auto at = [&](int e) { return product[(v + 1 + e / 2) % 2][j][e % 2 * 2 + c]; };
        score[Shape::kRowTiles - v][2 * u + j][x] += diagonals.across(at(eight), at(eight + 1), c);
      }
  }
}

// score += of the warp's queries with each distance's row of the keys' table; keys from `valid` on need none.
template <class E, class Shape, class RowsAt, int kKeys8, int kSteps>
__device__ void add_along(float (&score)[Shape::kRowTiles][kKeys8][4], int valid,
                          const uint32_t (&q)[Shape::kRowTiles][kSteps][4], const RowsAt& rows_at,
                          const Diagonals& diagonals, uint32_t lane_b) {
  constexpr int kRowTiles = Shape::kRowTiles;
  float product[2][kRowTiles][2][4];  // with 16 distances each, the last and those before
#pragma unroll
  for (int v = 0; v < kKeys8 / 2 + kRowTiles; ++v) {
    if (v * 16 >= valid + Shape::kRows) break;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) clear(product[v % 2][i]);
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
      uint32_t rows[4];
      load_matrices(rows, rows_at(v) + (lane_b ^ 32 * d));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        const int u = v - (kRowTiles - 1 - i);
        if (u < 0 || u > kKeys8 / 2) continue;  // no score reads them
        multiply_add<E>(product[v % 2][i][0], q[i][d], rows[0], rows[1]);
        multiply_add<E>(product[v % 2][i][1], q[i][d], rows[2], rows[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const int u = v - 1 - (kRowTiles - 1 - i);
#pragma unroll
      for (int e = 0; e < 2; ++e) diagonals.turn(product[v % 2][i][e]);
      if (u < 0 || u >= kKeys8 / 2) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int eight = j + 1 - x / 2;
          const auto& here = product[(v + 1 + eight / 2) % 2][i][eight % 2];
          const auto& next = product[(v + 1 + (eight + 1) / 2) % 2][i][(eight + 1) % 2];
          score[i][2 * u + j][x] += diagonals.along(here, next, x);
        }
    }
  }
}

// score += product(row of the block, key of the tile), each made by itself; on its way in memory [rows, keys].
template <class Shape, class Product, int kKeys8>
__device__ void add_each(float (&score)[Shape::kRowTiles][kKeys8][4], int first_row, const Product& product,
                         float* memory) {
  constexpr int kKeys = Shape::kKeys;
  const int lane = threadIdx.x % 32;
  memory += first_row * kKeys;
#pragma unroll 1
  for (int at = lane; at < Shape::kRows * kKeys; at += 32) memory[at] = product(first_row + at / kKeys, at % kKeys);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Shape::kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kKeys8; ++j)
#pragma unroll
      for (int x = 0; x < 4; ++x)
        score[i][j][x] += memory[(i * 16 + lane / 4 + x / 2 * 8) * kKeys + j * 8 + lane % 4 * 2 + x % 2];
  __syncwarp();
}

// qkv [tokens, 3*width], out [tokens, width]; grid: query blocks x heads x batch, query blocks fastest.
template <class E, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    attention_positions(const E* __restrict__ qkv, int64_t first_token, const int32_t* __restrict__ cu_seqlens,
                        int heads, int query_blocks, float scale_log2, PositionTables<E> tables, E* __restrict__ out) {
#ifdef FTBERT_BEFORE_AMPERE
  __trap();
#else
  constexpr int kHeadSize = Shape::kHeadSize, kRowTiles = Shape::kRowTiles, kRows = Shape::kRows;
  constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys, kPitch = Shape::kPitch;
  constexpr int kTileBytes = Shape::kTileBytes, kSlots = Shape::kSlots, kSteps = kHeadSize / 16;
  wait_for_inputs();
  const AttentionBlock block(cu_seqlens, heads, query_blocks, kQueries);
  const int length = block.length, first_query = block.first_query;
  if (first_query >= length) return;

  extern __shared__ __align__(128) char shared_memory[];
  const uint32_t shared_q = shared_address(shared_memory), shared_k = shared_q + kQueries * kPitch;
  const uint32_t shared_v = shared_k + 2 * kTileBytes, key_band = shared_v + 2 * kTileBytes;
  const uint32_t query_band = key_band + Shape::kBandBytes;
  const int64_t width = static_cast<int64_t>(heads) * kHeadSize;
  const WholeSequence<E> seen(block, kQueries, kHeadSize, qkv, first_token, width);
  const int tiles = (length + kKeys - 1) / kKeys, queries = min(kQueries, length - first_query);
  const E* const key_table = tables.zero(tables.keys, block.head, kHeadSize);
  const E* const query_table = tables.zero(tables.queries, block.head, kHeadSize);
  const auto column = [&](int token) { return tables.columns[block.start + token]; };
  const bool gaps = tables.columns && column(length - 1) - column(0) != length - 1;

  using Loader = TileLoader<E, kHeadSize, Shape::kThreads>;
  const Loader loader(seen.k_stride);
  // Chunk g has the distances from first on; row r of it is that of query kQueries - 1 and key g * kKeys + r.
  const auto load_chunk = [&](int g) {
    const int first = g * kKeys - first_query - kQueries + 1;
    const int from = max(-tables.reach - kKeys + 1, min(first, tables.reach));  // farther ones are all alike
    const int low = max(0, kQueries - queries - g * kKeys) & ~15;
    const int rows = min(kKeys, (kQueries + length - 1 - g * kKeys + 15) & ~15) - low;
    const uint32_t at = g % kSlots * kTileBytes + low * kPitch;
    const Loader table_loader(kHeadSize);
    if (key_table) table_loader.template load<kKeys>(key_band + at, key_table + (from + low) * kHeadSize, rows, rows);
    if (query_table)
      table_loader.template load<kKeys>(query_band + at, query_table + (from + low) * kHeadSize, rows, rows);
  };
  const auto load_tile = [&](int tile) {
    if (tile < tiles) {
      const int first = tile * kKeys, valid = min(kKeys, length - first);
      const int rows = (valid + 15) & ~15;  // that products read
      const uint32_t stage = tile % 2 * kTileBytes;
      loader.template load<kKeys>(shared_k + stage, seen.k + first * seen.k_stride, rows, valid);
      loader.template load<kKeys>(shared_v + stage, seen.v + first * seen.v_stride, rows, valid);
      for (int n = tile == 0 ? 0 : Shape::kChunks - 1; n < Shape::kChunks && !gaps; ++n) load_chunk(tile + n);
    }
    copy_async_commit();
  };
  loader.template load<kQueries>(shared_q, seen.q + first_query * seen.q_stride, kQueries, queries);
  load_tile(0);
  load_tile(1);

  const int lane = threadIdx.x % 32;
  // Of this warp's queries; found out again for each tile, for want of a register.
  const auto warp_row = [] { return static_cast<int>(thread_anew()) / 32 * kRows; };
  const bool active = warp_row() < queries;
  const Diagonals diagonals(lane);
  // Where lanes read 16 rows for ldmatrix, as A and as B; 16 columns further: ^ 32.
  const uint32_t lane_a = swizzled<kHeadSize>(0, lane % 16, lane / 16);
  const uint32_t lane_b = swizzled<kHeadSize>(0, lane / 16 * 8 + lane % 8, lane / 8 % 2);
  uint32_t q[kRowTiles][kSteps][4];
  RowSums<kHeadSize> sum[kRowTiles] = {};
  RowState state[kRowTiles];

  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<1>();
    __syncthreads();
    if (active) {
      const int first_row = warp_row();
      if (tile == 0) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int d = 0; d < kSteps; ++d)
            load_matrices(q[i][d], shared_q + (first_row + i * 16) * kPitch + (lane_a ^ 32 * d));
      }
      const uint32_t keys = shared_k + tile % 2 * kTileBytes, values = shared_v + tile % 2 * kTileBytes;
      const int valid = length - tile * kKeys;
      // Where 16 rows of the warp's band lie. Row 0 is of its last query and the tile's first key.
      const auto rows_of = [&](uint32_t band) {
        return [=](int v) {
          const int row = kQueries - kRows - first_row + 16 * v;
          return band + (tile + row / kKeys) % kSlots * kTileBytes + row % kKeys * kPitch;
        };
      };

      float score[kRowTiles][kKeys / 8][4] = {};
#pragma unroll
      for (int u = 0; u < kKeys / 16; ++u) {
        if (u * 16 >= valid) break;
        uint32_t k[kSteps][4];
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
          load_matrices(k[d], keys + u * 16 * kPitch + (lane_b ^ 32 * d));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            multiply_add<E>(score[i][2 * u], q[i][d], k[d][0], k[d][1]);
            multiply_add<E>(score[i][2 * u + 1], q[i][d], k[d][2], k[d][3]);
          }
        }
        if (query_table && !gaps) add_across<E, Shape>(score, u, k, rows_of(query_band), diagonals, lane_a);
      }
      if (key_table && !gaps) add_along<E, Shape>(score, valid, q, rows_of(key_band), diagonals, lane_b);
      if (gaps) {
        const auto product = [&](int row, int key) {
          if (row >= queries || key >= valid) return 0.0f;
          const int distance = column(tile * kKeys + key) - column(first_query + row);
          const int at = max(-tables.reach, min(distance, tables.reach)) * kHeadSize;
          return (key_table ? product_of_row<E, kHeadSize>(shared_memory, row, key_table + at) : 0) +
                 (query_table ? product_of_row<E, kHeadSize>(shared_memory + (keys - shared_q), key, query_table + at)
                              : 0);
        };
        add_each<Shape>(score, first_row, product, reinterpret_cast<float*>(shared_memory + (key_band - shared_q)));
      }

      uint32_t p[kRowTiles][kKeys / 16][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mask_scores(score[i], valid, lane);
        if (tile == 0) state[i].begin(score[i], scale_log2);
        state[i].template probabilities<E>(score[i], p[i], sum[i], scale_log2);
      }
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        if (j * 16 >= valid) break;
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
          uint32_t b[4];
          load_matrices_transposed(b, values + j * 16 * kPitch + (lane_a ^ 32 * d));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            multiply_add<E>(sum[i][2 * d], p[i][j], b[0], b[1]);
            multiply_add<E>(sum[i][2 * d + 1], p[i][j], b[2], b[3]);
          }
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) multiply_add<E>(sum[i][kHeadSize / 8], p[i][j], kOnes<E>, kOnes<E>);
      }
    }
    __syncthreads();
    load_tile(tile + 2);
  }
  copy_async_wait<0>();
  if (!active) return;

  const int first_row = warp_row();
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) stage_rows<E, kHeadSize>(shared_memory, first_row + i * 16, lane, sum[i]);
  __syncwarp();
  store_rows<E, kHeadSize, kRows>(shared_memory, first_row, lane, queries - first_row,
                                  out + (block.start - first_token + first_query) * width + block.head * kHeadSize,
                                  width);
#endif
}

}  // namespace
}  // namespace ftbert
