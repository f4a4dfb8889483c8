// The heads of queries and keys in a product's sums, normed and turned (kernels.h: rotary) before they are rounded.
// TurnedRows knows all rules: eight rows of a warp at a time go through shared memory as floats, so that each thread
// has numbers of one head.
#pragma once
#include <cmath>

#include "kernels/attention/head_rules.cuh"

namespace ftbert {

// HeadRules as these kernels read them.
template <class E>
struct HeadTurn {
  Norm<E> q_norm, k_norm;
  const float* table;  // as in Rotation, aligned to 16 bytes
  const int32_t* positions;
  int table_rows, dims;        // dims: 0 without a rotation
  int query_columns, columns;  // of queries, and of queries and keys
  bool interleaved;
};

template <class T>
HeadTurn<native_t<T>> head_turn(const Heads& heads, const HeadRules<T>& rules) {
  const Rotation& r = rules.rotation;
  return {.q_norm = native(rules.q_norm),
          .k_norm = native(rules.k_norm),
          .table = r.table,
          .positions = rules.positions,
          .table_rows = static_cast<int>(r.positions),
          .dims = static_cast<int>(r ? r.dims : 0),
          .query_columns = static_cast<int>(heads.width()),
          .columns = static_cast<int>(heads.width() + heads.kv_width()),
          .interleaved = r.interleaved};
}

// Where the angles of a row's position begin in the table; -1: outside of it. Of a row past the last any will do.
template <class E>
__device__ int angles_of(const HeadTurn<E>& turn, int64_t row, int64_t rows) {
  if (turn.dims == 0 || row >= rows) return 0;
  const int position = turn.positions[row];
  return position >= 0 && position < turn.table_rows ? position * turn.dims : -1;
}

// Of eight rows.
__device__ inline int rows_left(int64_t rows) { return static_cast<int>(max(int64_t{0}, min(rows, int64_t{8}))); }

// Eight rows of a warp by kColumns, whole heads of kHead numbers: kLanes threads have a head of one row, each a unit of
// four pairs, and kTurns times all of them have all rows of a head. The angles are there before the sums are.
template <class E, int kHead, int kColumns>
struct TurnedRows {
  static constexpr int kLanes = kHead / 8, kTurns = kLanes / 4;
  static_assert(kColumns % kHead == 0 && kHead % 32 == 0);

  float angles[kTurns][8] = {};

  // The compiler keeps nothing that depends on it in registers, of which some variants then would have too few.
  static __device__ int lane_number() {
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));
    return lane;
  }
  static __device__ int row_of(int lane, int t) { return t * (32 / kLanes) + lane / kLanes; }
  // In shared memory [8][kColumns], groups of eight floats xor-ed with the row: in banks of their own.
  static __device__ int at(int row, int column) { return row * kColumns + ((column / 8 ^ row % 4) * 8 | column % 8); }

  // begin: angles_of the row that has this lane's number; these eight are numbered from `first` on.
  static __device__ void look(const HeadTurn<E>& turn, int begin, int first, int t, float (&to)[8]) {
    const int lane = lane_number(), from = max(__shfl_sync(~0u, begin, first + row_of(lane, t)), 0);
    const Unit<4> unit(lane % kLanes, turn.dims / 2, turn.interleaved, kHead);
    if (unit.turned) load_angles<4>(turn.table + from + lane % kLanes * 8, to);
  }
  __device__ void look_ahead(const HeadTurn<E>& turn, int begin, int first) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) look(turn, begin, first, t, angles[t]);
  }

  // From the registers of a warp. value(j): what is in place of these rows' two columns of accumulator j.
  template <class Value>
  static __device__ void stage(float* shared, const Value& value) {
    const int lane = lane_number();
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
      *reinterpret_cast<float2*>(shared + at(lane / 4, j * 8 + lane % 4 * 2)) = value(j);
    __syncwarp();
  }

  // To rows of n columns at c; `rows` of these eight are there. column0: of the first, at which a head begins.
  __device__ void finish(const HeadTurn<E>& turn, int begin, int first, const float* shared, E* c, int rows, int n,
                         int column0) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int lane = lane_number(), row = row_of(lane, t);
      const bool inside = __shfl_sync(~0u, begin, first + row) >= 0;
#pragma unroll 1
      for (int h = 0; h < kColumns; h += kHead) {
        const int column = column0 + h;
        if (column >= n) break;
        const bool rules = column < turn.columns;
        const Unit<4> unit(lane % kLanes, rules ? turn.dims / 2 : 0, turn.interleaved, kHead);
        float x[8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 four = *reinterpret_cast<const float4*>(shared + at(row, h + (i == 0 ? unit.low : unit.high)));
          x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
        if (rules) {
          normalise_head(column < turn.query_columns ? turn.q_norm : turn.k_norm, unit, x);
          if (unit.turned) ftbert::turn<4>(x, angles[t], turn.interleaved);
          if (!inside) unit.each([&](int w) { x[w] = NAN; });
        }
        if (row < rows) unit.store(x, c + int64_t{row} * n + column);
      }
    }
    __syncwarp();
  }

 private:
  static __device__ void normalise_head(const Norm<E>& norm, const Unit<4>& unit, float (&x)[8]) {
    if (norm.kind == NormKind::none) return;
    float mean = 0, squares = 0;
    if (norm.kind == NormKind::layer) {
      float total = 0;
      unit.each([&](int w) { total += x[w]; });
      mean = reduce<kLanes>(total, Sum()) / kHead;
    }
    unit.each([&](int w) { squares += (x[w] - mean) * (x[w] - mean); });
    normalise(unit, norm, mean, inverse_root_mean<kLanes>(squares, 1.0f / kHead, norm.eps), x);
  }
};

}  // namespace ftbert
