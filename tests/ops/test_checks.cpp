#include "test_checks.h"

#include <cmath>

#include "binding/q8_0.h"

namespace ftbert::binding {
namespace {

// In sequence b: b * step <= x < b * step + width, each larger than the one before.
template <class I>
void check_rising(const char* name, const Tensor& values, const Tensor& cu_seqlens, int64_t step, int64_t width) {
  if (!values.is_cpu()) return;
  const I* const x = data<I>(values);
  const int32_t* const cu = data<int32_t>(cu_seqlens);
  for (int64_t b = 0; b + 1 < cu_seqlens.size(0); ++b) {
    const int64_t first = b * step, end = first + width;
    int64_t low = first;
    for (int64_t t = cu[b]; t < cu[b + 1]; ++t) {
      FTBERT_CHECK(x[t] >= low && x[t] < end, name, ": expected rising values in [", first, ", ", end,
                   ") for sequence ", b, ", got ", x[t], " at [", t, "]");
      low = int64_t{x[t]} + 1;
    }
  }
}

}  // namespace

void check_key_ranges(const Tensor& begin, const Tensor& end, const Tensor& like, int64_t rows, int64_t batch) {
  integers("cu_k", begin, like, at::kInt, batch);
  integers("end_k", end, like, at::kInt, batch);
  if (!begin.is_cpu()) return;
  const int32_t *const from = data<int32_t>(begin), *const to = data<int32_t>(end);
  for (int64_t b = 0; b < batch; ++b)
    FTBERT_CHECK(0 <= from[b] && from[b] <= to[b] && to[b] <= rows, "end_k: expected 0 <= cu_k <= end_k <= ", rows,
                 ", got ", from[b], " and ", to[b], " at [", b, "]");
}

void check_token_index(const Tensor& token_index, const Tensor& cu_seqlens, int64_t seq) {
  check_rising<int64_t>("token_index", token_index, cu_seqlens, seq, seq);
}

void check_columns(const OptionalTensor& columns, const Tensor& cu_seqlens, int64_t least) {
  if (!columns) return;
  integers("columns", *columns, cu_seqlens, at::kInt, least);
  check_rising<int32_t>("columns", *columns, cu_seqlens, 0, int64_t{1} << 31);
}

Operand byte_rows(const char* name, const Tensor& out, const OptionalTensor& smooth, const Tensor& like, int64_t rows,
                  int64_t cols) {
  const std::vector<int64_t> shape = {rows, byte_row_bytes(cols)};
  FTBERT_CHECK(like.is_cpu() == (like.scalar_type() == at::kFloat) && out.device() == like.device() &&
                   out.scalar_type() == at::kByte && out.sizes() == shape && out.is_contiguous(),
               name, ": expected contiguous Byte ", shape_text(shape), " on ", like.device().str(),
               ", beside float32 on the CPU or 16 bits on a GPU, got ", describe(out), " beside ", describe(like));
  if (smooth) {
    plain("smooth", *smooth);
    FTBERT_CHECK(smooth->scalar_type() == at::kFloat && smooth->device() == like.device() && smooth->dim() == 1 &&
                     smooth->size(0) == cols,
                 "smooth: expected contiguous Float ", shape_text({cols}), " on ", like.device().str(), ", got ",
                 describe(*smooth));
  }
  return {out.data_ptr(), &formats::byte_rows, data<float>(smooth)};
}

Tensor in_tiles(const Tensor& a) {
  if (a.is_cpu()) return a.clone();
  constexpr int64_t kAligned = 256;
  const int64_t size = a.element_size(), first = reinterpret_cast<intptr_t>(a.const_data_ptr()) % kAligned / size;
  const Tensor memory = at::empty({rows_in_tiles(a.size(0)) * a.size(1) + kAligned / size}, a.options());
  memory.view(at::kByte).fill_(0xff);  // NaN in every type of float
  const Tensor made = memory.narrow(0, first, a.numel()).view(a.sizes());
  made.copy_(a);
  return made;
}

void operands(const Tensor& a, const Tensor& weight, const OptionalTensor& bias) {
  elements("a", a, 2);
  rank("weight", weight, 2);
  count("n, the rows of weight", weight.size(0), 1);
  count("k, the columns of a", a.size(1), 1);
  same("weight", weight, a, {weight.size(0), a.size(1)});
  same("bias", bias, a, {weight.size(0)});
}

void q8_0_operands(const Tensor& a, const Tensor& weight, const Tensor& scales, const OptionalTensor& bias) {
  elements("a", a, 2);
  check_q8_0(weight, scales, "weight");
  FTBERT_CHECK(weight.size(1) == a.size(1) && weight.device() == a.device(), "weight: expected int8 [n, ", a.size(1),
               "] on ", a.device().str(), ", got ", describe(weight));
  same("bias", bias, a, {weight.size(0)});
}

const Format& scales(const char* name, const Tensor& t, const Tensor& like, int64_t rows) {
  FTBERT_CHECK(t.dim() == 1 && (t.size(0) == 1 || t.size(0) == rows) && t.scalar_type() == at::kFloat &&
                   t.device() == like.device() && t.is_contiguous() && has_data(t),
               name, ": expected contiguous Float [1]", rows > 1 ? " or " + shape_text({rows}) : "", " on ",
               like.device().str(), ", got ", describe(t));
  return t.size(0) == 1 ? formats::e4m3_tensor : formats::e4m3;
}

const Format& e4m3_operands(const Tensor& a, const Tensor& a_scale, const Tensor& weight, const Tensor& weight_scale,
                            const OptionalTensor& bias, at::ScalarType dtype) {
  rank("a", a, 2);
  rank("weight", weight, 2);
  const int64_t n = weight.size(0);
  count("n, the rows of weight", n, 1);
  count("k, the columns of a", a.size(1), 1);
  FTBERT_CHECK(a.scalar_type() == at::kFloat8_e4m3fn, "a: expected float8_e4m3fn, got ", describe(a));
  same("weight", weight, a, {n, a.size(1)});
  FTBERT_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == n && bias->scalar_type() == dtype &&
                         bias->device() == a.device() && bias->is_contiguous() && has_data(*bias)),
               "bias: expected contiguous ", at::toString(dtype), " ", shape_text({n}), " on ", a.device().str(),
               ", got ", describe(*bias));
  scales("a_scale", a_scale, a, 1);
  return scales("weight_scale", weight_scale, a, n);
}

Heads heads_of(const Tensor& qkv, int64_t heads, int64_t kv_heads, std::optional<double> scale) {
  const int64_t cols = qkv.size(1), kv = kv_heads == 0 ? heads : kv_heads;
  FTBERT_CHECK(heads > 0 && heads <= cols && kv > 0 && kv <= heads && heads % kv == 0 && cols % (heads + 2 * kv) == 0,
               "qkv: expected [tokens, (heads + 2*kv_heads) * head_size] and heads a multiple of kv_heads, got ",
               describe(qkv), " for ", heads, " heads and ", kv, " of keys and values");
  const int64_t size = cols / (heads + 2 * kv);
  return {heads, kv, size, scale ? static_cast<float>(*scale) : 1.0f / std::sqrt(static_cast<float>(size))};
}

}  // namespace ftbert::binding
