// Where the CPU's fused attention finds the products with positions of a row of scores.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/attention/score_policy.h"

namespace ftbert::FTBERT_ISA {

// Rows of a table, [first, first + count); count a multiple of `step`, which PositionProducts::stride is too.
struct PositionRows {
  int64_t first, count;
};

// The places of a work item's keys, counted from its first; a query has the place of its key.
struct ItemPlaces {
  const PositionProducts<float>& positions;
  const int32_t* columns;  // [keys] where they have gaps, else nullptr

  int64_t distance(int64_t from, int64_t to) const {
    return columns ? int64_t{columns[to]} - columns[from] : to - from;
  }
  // Those that distances from queries [query, last_query] to keys [key, last_key] read.
  PositionRows rows(int64_t query, int64_t last_query, int64_t key, int64_t last_key, int64_t step) const {
    const int64_t low = positions.row_of(distance(last_query, key)),
                  high = positions.row_of(distance(query, last_key)) + 1;
    const int64_t count = (high - low + step - 1) / step * step;
    return {std::min(low, positions.stride - count), count};
  }
  // Whether rows lie side by side over all these distances.
  bool exact(int64_t query, int64_t last_query, int64_t key, int64_t last_key) const {
    return !columns && last_query - key <= positions.exact && last_key - query <= positions.exact;
  }
};

// scores[j] += products[row of the distance from `query` to key j], products moved so that [0] is the table's row 0.
inline void add_position_row(const ItemPlaces& places, int64_t query, int64_t length, const float* products,
                             float* scores) {
  const PositionProducts<float>& p = places.positions;
  if (places.columns) {
    for (int64_t j = 0; j < length; ++j) scores[j] += products[p.row_of(places.distance(query, j))];
    return;
  }
  const auto key_at = [&](int64_t distance) { return std::clamp<int64_t>(query + distance, 0, length); };
  const int64_t left = key_at(-p.reach), near = key_at(-p.exact), past = key_at(p.exact + 1),
                right = key_at(p.reach + 1);
  const int32_t* const rows = p.rows - query;
  const float* const beside = products + p.rows[0] - query;
  for (int64_t j = 0; j < left; ++j) scores[j] += products[p.rows[-p.reach]];
  for (int64_t j = left; j < near; ++j) scores[j] += products[rows[j]];
#pragma omp simd
  for (int64_t j = near; j < past; ++j) scores[j] += beside[j];
  for (int64_t j = past; j < right; ++j) scores[j] += products[rows[j]];
  for (int64_t j = right; j < length; ++j) scores[j] += products[p.rows[p.reach]];
}

}  // namespace ftbert::FTBERT_ISA
