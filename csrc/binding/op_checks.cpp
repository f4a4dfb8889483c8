#include "binding/op_checks.h"

#include <algorithm>

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

}  // namespace

int64_t check_offsets(const Tensor& cu_seqlens, const Tensor& like, int64_t rows, int64_t longest,
                      std::optional<int64_t> expected) {
  integers("cu_seqlens", cu_seqlens, like, at::kInt, 1);
  const int64_t batch = cu_seqlens.size(0) - 1;
  FTBERT_CHECK(batch == expected.value_or(batch), "cu_seqlens: expected [", *expected + 1, "], got ",
               describe(cu_seqlens));
  if (!cu_seqlens.is_cpu()) return batch;
  const int32_t* const cu = data<int32_t>(cu_seqlens);
  FTBERT_CHECK(cu[0] == 0, "cu_seqlens: expected offsets from 0 on, got ", cu[0], " at [0]");
  for (int64_t b = 0; b < batch; ++b)
    FTBERT_CHECK(cu[b + 1] >= cu[b] && cu[b + 1] <= rows && cu[b + 1] - cu[b] <= longest,
                 "cu_seqlens: expected offsets that never fall, end by ", rows, " and have no step above ",
                 std::min(longest, rows), ", got ", cu[b], " then ", cu[b + 1], " at [", b + 1, "]");
  return batch;
}

void check_range(const char* name, const Tensor& indices, int64_t count, int64_t low, int64_t end, const int64_t* at) {
  if (!indices.is_cpu()) return;
  if (indices.scalar_type() == at::kInt) return check_vector(name, data<int32_t>(indices), count, low, end, at);
  check_vector(name, data<int64_t>(indices), count, low, end, at);
}

Operand scaled_e4m3(const char* name, const OptionalTensor& out, const OptionalTensor& scale, const Tensor& like,
                    at::IntArrayRef shape) {
  FTBERT_CHECK(out.has_value() == scale.has_value(), name, ": expected with a scale; neither means no result in e4m3");
  if (!out) return {};
  FTBERT_CHECK(out->sizes() == shape && out->scalar_type() == at::kFloat8_e4m3fn && out->device() == like.device() &&
                   out->is_contiguous() && has_data(*out),
               name, ": expected contiguous Float8_e4m3fn ", shape_text(shape), " on ", like.device().str(), ", got ",
               describe(*out));
  FTBERT_CHECK(scale->numel() == 1 && scale->scalar_type() == at::kFloat && scale->device() == like.device() &&
                   scale->is_contiguous() && has_data(*scale),
               "scale: expected one contiguous Float on ", like.device().str(), ", got ", describe(*scale));
  return {out->data_ptr(), &formats::e4m3_tensor, data<float>(scale)};
}

}  // namespace ftbert::binding
