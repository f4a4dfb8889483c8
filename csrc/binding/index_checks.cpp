#include "binding/index_checks.h"

#include <algorithm>

#include "binding/tensors.h"

namespace ftbert::binding {
namespace {

template <class I>
void check_vector(const char* name, const I* x, int64_t count, int64_t low, int64_t end, const int64_t* at) {
  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = at ? at[n] : n;
    FTBERT_CHECK(x[i] >= low && x[i] < end, name, ": expected values in [", low, ", ", end, "), got ", x[i], " at [", i,
                 "]");
  }
}

// Sequence by sequence: first <= x < end(b), each larger than the one before.
template <class I, class First, class End>
void check_rising(const char* name, const I* x, const at::Tensor& cu_seqlens, First&& first, End&& end) {
  const int32_t* const cu = data<int32_t>(cu_seqlens);
  for (int64_t b = 0; b + 1 < cu_seqlens.size(0); ++b) {
    int64_t low = first(b);
    for (int64_t t = cu[b]; t < cu[b + 1]; ++t) {
      FTBERT_CHECK(x[t] >= low && x[t] < end(b), name, ": expected rising values in [", first(b), ", ", end(b),
                   ") for sequence ", b, ", got ", x[t], " at [", t, "]");
      low = int64_t{x[t]} + 1;
    }
  }
}

}  // namespace

void check_offsets(const at::Tensor& cu_seqlens, int64_t rows, int64_t longest) {
  if (!cu_seqlens.is_cpu()) return;
  const int32_t* const cu = data<int32_t>(cu_seqlens);
  FTBERT_CHECK(cu[0] == 0, "cu_seqlens: expected offsets from 0 on, got ", cu[0], " at [0]");
  for (int64_t b = 0; b + 1 < cu_seqlens.size(0); ++b)
    FTBERT_CHECK(cu[b + 1] >= cu[b] && cu[b + 1] <= rows && cu[b + 1] - cu[b] <= longest,
                 "cu_seqlens: expected offsets that never fall, end by ", rows, " and have no step above ",
                 std::min(longest, rows), ", got ", cu[b], " then ", cu[b + 1], " at [", b + 1, "]");
}

void check_range(const char* name, const at::Tensor& indices, int64_t count, int64_t low, int64_t end,
                 const int64_t* at) {
  if (!indices.is_cpu()) return;
  if (indices.scalar_type() == at::kInt) return check_vector(name, data<int32_t>(indices), count, low, end, at);
  check_vector(name, data<int64_t>(indices), count, low, end, at);
}

void check_token_index(const at::Tensor& token_index, const at::Tensor& cu_seqlens, int64_t seq) {
  if (!token_index.is_cpu()) return;
  check_rising(
      "token_index", data<int64_t>(token_index), cu_seqlens, [&](int64_t b) { return b * seq; },
      [&](int64_t b) { return (b + 1) * seq; });
}

void check_columns(const std::optional<at::Tensor>& columns, const at::Tensor& cu_seqlens) {
  if (!columns || !columns->is_cpu()) return;
  check_rising(
      "columns", data<int32_t>(*columns), cu_seqlens, [](int64_t) { return int64_t{0}; },
      [](int64_t) { return int64_t{1} << 31; });
}

}  // namespace ftbert::binding
