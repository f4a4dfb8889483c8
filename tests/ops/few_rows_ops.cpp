// torch.ops.ftbert.*: products of few rows.
#include <ATen/ops/empty.h>

#include "binding/define_op.h"
#include "binding/q8_0.h"
#include "gemm/gpu/own.h"
#include "norm_words.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

// activation(norm(a) @ weight^T + bias), with a residual plus that. weight [n, k] of a's type; or int8 [n, k] with
// scales fp16 [n, k / 32]. counter: int32 [1], 0 before and after; without it blocks have as many tiles each.
// -> [m, n], or with a gate [m, n / 2]
Tensor linear_few_rows(const Tensor& a, const Tensor& weight, const OptionalTensor& scales, const OptionalTensor& bias,
                       const std::string& activation, bool gated, const OptionalTensor& residual,
                       const OptionalTensor& gamma, const OptionalTensor& beta, double eps, const std::string& kind,
                       double offset, const std::string& rounding, const OptionalTensor& counter) {
  if (scales)
    q8_0_operands(a, weight, *scales, bias);
  else
    operands(a, weight, bias);
  const int64_t m = a.size(0), n = weight.size(0), k = a.size(1);
  same("bias", bias, a, {n});
  same("residual", residual, a, {m, n});
  same("gamma", gamma, a, {k});
  same("beta", beta, a, {k});
  FTBERT_CHECK(!gated || n % 2 == 0, "weight: expected rows of gate and up in turns, got ", describe(weight));
  FTBERT_CHECK(
      !counter || (counter->scalar_type() == at::kInt && counter->numel() == 1 && counter->device() == a.device()),
      "counter: expected one int32 on ", a.device().str(), ", got ", describe(*counter));
  const NormWords norm(gamma, beta, eps, kind, offset, rounding);
  const Tensor stored = scales ? pack_q8_0(weight, *scales) : weight;
  const DType type = dtype_of(a.scalar_type());
  const Product product{.m = m,
                        .n = n,
                        .k = k,
                        .a = type,
                        .b = scales ? &formats::q8_0 : &plain_format(type),
                        .c = type,
                        .before = norm.kind == NormKind::none ? Before::nothing : Before::norm_rows,
                        .epilogue = {.bias = bias.has_value(),
                                     .activation = parse_activation(activation),
                                     .gate = gated ? Gate::pairs : Gate::none,
                                     .residual = residual.has_value()}};
  Tensor out = residual ? residual->clone() : at::empty({m, product.epilogue.columns(n)}, a.options());
  const c10::DeviceGuard guard(a.device());
  CallContext<Cuda> call(a.device());
  Context<Cuda>& context = call.for_products();
  context.overlap = false;
  const OwnChoice own = find_own("few_rows", "8x8");
  FTBERT_CHECK(own, "this build has no product few_rows");
  run_own(context, own, product,
          {.a = a.const_data_ptr(),
           .b = stored.const_data_ptr(),
           .bias = bias ? bias->const_data_ptr() : nullptr,
           .c = out.mutable_data_ptr(),
           .norm = norm.untyped(gamma, beta),
           .tile_count = counter ? reinterpret_cast<uint32_t*>(counter->mutable_data_ptr<int32_t>()) : nullptr});
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_cuda_op(m,
                 "linear_few_rows(Tensor a, Tensor weight, Tensor? scales, Tensor? bias, str activation='none', bool "
                 "gated=False, Tensor? residual=None, Tensor? gamma=None, Tensor? beta=None, float eps=1e-05, str "
                 "kind='rms', float offset=0, str rounding='once', Tensor(a!)? counter=None) -> Tensor",
                 &linear_few_rows);
}

}  // namespace ftbert::binding
