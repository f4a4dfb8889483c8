// Endings of the product of queries, keys and values: heads of queries and keys are normed and turned (kernels.h:
// rotary) before they are rounded. TurnThroughMemory knows all rules: eight rows of a warp at a time go through shared
// memory as floats, so that each thread has numbers of one head. TurnInRegisters turns heads where the sums lie: of a
// half-split pair one thread has both numbers, and four threads next to each other have the numbers of a row's head.
#pragma once
#include <cmath>
#include <type_traits>

#include "device/fragment.cuh"
#include "gemm/gpu/endings/norm.cuh"
#include "gemm/gpu/endings/store.cuh"
#include "kernels/attention/head_rules.cuh"

namespace ftbert {
namespace {

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
// four pairs, and kPasses times all of them have all rows of a head. The angles are there before the sums are.
template <class E, int kHead, int kColumns>
struct TurnedRows {
  static constexpr int kLanes = kHead / 8, kPasses = kLanes / 4;
  static_assert(kColumns % kHead == 0 && kHead % 32 == 0);

  float angles[kPasses][8] = {};

  static __device__ int lane_number() { return static_cast<int>(thread_anew() % 32); }
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
    for (int t = 0; t < kPasses; ++t) look(turn, begin, first, t, angles[t]);
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
    for (int t = 0; t < kPasses; ++t) {
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
    const float2 moments =
        moments_of_head<kLanes>(norm, norm.kind == NormKind::layer, true, kHead, x, [&](const auto& f) { f(unit); });
    normalise(unit, norm, moments.x, moments.y, x);
  }
};

template <class E>
struct TurnArguments {
  const void* bias;  // E [n], or nullptr
  void* c;
  HeadTurn<E> turn;
};

// kEights: of a warp's columns, whole heads.
template <class E, int kHead, int kEights>
struct TurnThroughMemory {
  using Element = E;
  using Arguments = TurnArguments<E>;
  using Staging = PaddedRows<kEights>;  // as wide; rows here are floats
  using Rows = TurnedRows<E, kHead, 8 * kEights>;
  static constexpr int kVectors = 0;
  static_assert(8 * 8 * kEights * sizeof(float) <= Staging::kBytes);

  const Arguments& arguments;
  int64_t m;
  int n;
  int64_t row0 = 0;
  int column0 = 0;
  int begin = 0;  // angles_of the row that has this lane's number
  Bias<E, kEights, Packed<E, 2>> bias;
  Rows rows[2];  // eight each

  __device__ TurnThroughMemory(const Arguments& arguments, int64_t m, int n) : arguments(arguments), m(m), n(n) {}

  __device__ void look_ahead(int64_t row, int column) {
    row0 = row, column0 = column;
    bias.look_ahead(arguments.bias, column0, n);
    if (column0 >= arguments.turn.columns) return;
    begin = angles_of(arguments.turn, row0 + threadIdx.x % 16, m);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r].look_ahead(arguments.turn, begin, r * 8);
  }

  __device__ void finish(float (&sums)[kEights][4], const float*, char* memory) {
    float* const shared = reinterpret_cast<float*>(memory);
    bias.add(sums);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = row0 + r * 8;
      Rows::stage(shared, [&](int j) -> float2 { return {sums[j][2 * r], sums[j][2 * r + 1]}; });
      rows[r].finish(arguments.turn, begin, r * 8, shared, static_cast<E*>(arguments.c) + row * n, rows_left(m - row),
                     n, column0);
    }
  }
};

// Rule: of queries' and keys' norms. All numbers of a head are in pairs, half a head apart. The bias is in the sums.
template <class E, int kHead, class Rule>
struct TurnInRegisters {
  using Element = E;
  using Arguments = TurnArguments<E>;
  using Staging = SwizzledRows;
  static constexpr int kVectors = 0, kEights = Staging::kEights, kHeads = 8 * kEights / kHead;
  static constexpr int kApart = kHead / 16;  // accumulators between the numbers of a pair
  static_assert(16 * kApart == kHead);

  const Arguments& arguments;
  Result<E, Gate::none> to;
  int64_t row0 = 0;
  int column0 = 0;
  int begin = 0;  // angles_of the row that has this lane's number, of 16 and of those 64 rows further on

  __device__ TurnInRegisters(const Arguments& arguments, int64_t m, int n)
      : arguments(arguments), to{arguments.c, m, n} {}

  __device__ void look_ahead(int64_t row, int column) {
    row0 = row, column0 = column;
    const int lane = threadIdx.x % 32;
    begin = column0 < arguments.turn.columns ? angles_of(arguments.turn, row0 + lane / 16 * 64 + lane % 16, to.m) : 0;
  }

  __device__ void finish(float (&sums)[kEights][4], const float*, char* memory, int further) const {
    if (column0 < arguments.turn.columns) {
#pragma unroll
      for (int r = 0; r < 2; ++r) turn_row(sums, r, further / 64);
    }
    Staging::stage<E>(memory, sums);
    store_staged<Staging, E, E, Activation::none, Gate::none>(memory, to, row0 + further, column0);
  }

 private:
  // Head of the accumulators from `first` on, of one of this thread's rows.
  template <class NormRule>
  static __device__ void norm_head(const Norm<E>& norm, float (&sums)[kEights][4], int first, int r) {
    norm_columns<kHead / 8>(NormRule{norm.eps, norm.offset}, norm.gamma, 1.0f / kHead, sums, first, r);
    asm volatile("" ::: "memory");
  }

  // The second or the first of this thread's rows.
  __device__ void turn_row(float (&sums)[kEights][4], int r, int half) const {
    const HeadTurn<E>& turn = arguments.turn;
    const int from = __shfl_sync(~0u, begin, half * 16 + r * 8 + Fragment::row());
    if constexpr (!std::is_same_v<Rule, NoRule>) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
        if (column0 + h * kHead < turn.columns)
          norm_head<Rule>(column0 + h * kHead < turn.query_columns ? turn.q_norm : turn.k_norm, sums, h * kHead / 8, r);
    }
    const float* const angles = turn.table + max(from, 0) + Fragment::column() * 2;
#pragma unroll
    for (int i = 0; i < kApart; ++i) {
      float pairs[4];  // (c, s) of two
      Packed<float, 4>::load(angles + i * 16).to_floats(pairs);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (column0 + h * kHead >= turn.columns) break;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float cosine = from < 0 ? NAN : pairs[2 * c], sine = pairs[2 * c + 1];
          float& low = sums[h * 2 * kApart + i][2 * r + c];
          float& high = sums[h * 2 * kApart + i + kApart][2 * r + c];
          const float x = low, y = high;
          low = x * cosine - y * sine, high = y * cosine + x * sine;
        }
      }
    }
    asm volatile("" ::: "memory");  // the other row's angles are not loaded before
  }
};

}  // namespace
}  // namespace ftbert
