// scores += q . keys[:, row] + k . queries[:, row], the row of each key's distance from its query.
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {
namespace {

// to [length] += x . table[:, row(distance)], of one query or key x [size] at `place` among others; sign: of a
// distance from it to them.
void add_row(const PositionProducts<float>& positions, const float* table, const float* x, int64_t size,
             const int32_t* columns, int64_t place, int64_t length, int64_t sign, float* to, int64_t to_stride) {
  for (int64_t j = 0; j < length; ++j) {
    const int64_t distance = columns ? int64_t{columns[j]} - columns[place] : j - place;
    const float* const column = table + positions.row_of(sign * distance);
    float sum = 0;
    for (int64_t d = 0; d < size; ++d) sum += x[d] * column[d * positions.stride];
    to[j * to_stride] += sum;
  }
}

}  // namespace

void add_position_products(Context<Cpu>&, const Heads& heads, const float* q, const float* k,
                           const Sequences& sequences, const PositionProducts<float>& positions, float* scores) {
  const int64_t seq = sequences.max_k, size = heads.size, table = size * positions.stride;
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t b = 0; b < sequences.count; ++b) {
    for (int64_t h = 0; h < heads.count; ++h) {
      const int64_t length = sequences.cu_q[b + 1] - sequences.cu_q[b], first = (b * heads.count + h) * seq;
      const int32_t* const columns = positions.columns ? positions.columns + sequences.cu_q[b] : nullptr;
      for (int64_t i = 0; i < length; ++i) {
        const int64_t row = first + i;
        if (positions.keys)
          add_row(positions, positions.keys + h * table, q + row * size, size, columns, i, length, 1,
                  scores + row * seq, 1);
        if (positions.queries)
          add_row(positions, positions.queries + h * table, k + row * size, size, columns, i, length, -1,
                  scores + first * seq + i, seq);
      }
    }
  }
}

}  // namespace ftbert::FTBERT_ISA
