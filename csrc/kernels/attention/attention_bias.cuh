// The relative position bias of one head in one sequence, for the fused attention kernels.
#pragma once
#include <cstdint>

#include "device/vector.cuh"

namespace ftbert {
namespace {

constexpr float kLog2E = 1.44269504f;

// RelativeBias of score_policy.h with the element type of device code.
template <class E>
struct BiasTables {
  const E* table;
  const int32_t* columns;
  int span;
};

template <class E>
struct HeadBias {
  const E* table;          // moved so that table[0] is distance 0
  const int32_t* columns;  // of the sequence, or nullptr: positions are columns
  int last;                // columns past it are read as this one's
  int farthest;            // larger distances are read as this one

  __device__ HeadBias(const BiasTables<E>& all, int head, int start, int length)
      : table(all.table + int64_t{head} * (2 * all.span - 1) + all.span - 1),
        columns(all.columns != nullptr ? all.columns + start : nullptr),
        last(length - 1),
        farthest(all.span - 1) {}
  __device__ int column(int position) const { return columns != nullptr ? columns[min(position, last)] : position; }
  __device__ float operator()(int key, int query_column) const {
    return to_float(table[max(-farthest, min(column(key) - query_column, farthest))]);
  }
};

}  // namespace
}  // namespace ftbert
