// torch.ops.ftbert.norm_forward and norm_backward: LayerNorm and RMSNorm of training. CUDA is here; the CPU's
// implementation and shapes are registered by ftbert/norm/ops.py, gradients in training_norm_autograd.cpp.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "binding/define_op.h"
#include "binding/op_checks.h"
#include "kernels/norm/training_norms.h"

namespace ftbert::binding {
namespace {

Operand operand(const OptionalTensor& t) {
  return t ? Operand{t->numel() ? data<void>(*t) : nullptr, &plain_format(dtype_of(t->scalar_type()))} : Operand();
}

// Of this shape, dense. `expected`: the shape in words.
OptionalTensor matrix(const char* name, const OptionalTensor& t, const Tensor& x, at::IntArrayRef shape,
                      const std::string& expected) {
  if (!t) return std::nullopt;
  element_tensor(name, *t, x);
  FTBERT_CHECK(t->sizes() == shape, name, ": expected ", expected, ", got ", describe(*t));
  return t->contiguous();
}
OptionalTensor matrix(const char* name, const OptionalTensor& t, const Tensor& x) {
  return matrix(name, t, x, x.sizes(), shape_text(x.sizes()));
}

// The arguments of both ops that describe the norm. x ends in normalized_shape.
struct NormArguments : TrainingNorm {
  OptionalTensor weight, bias;  // contiguous

  NormArguments(const char* name, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                at::IntArrayRef shape, double eps, const std::string& kind, double offset)
      : TrainingNorm{.kind = kind == "layer" ? NormKind::layer : NormKind::rms,
                     .rows = 1,
                     .cols = 1,
                     .eps = static_cast<float>(eps),
                     .offset = static_cast<float>(offset),
                     .gamma = {},
                     .beta = {}} {
    FTBERT_CHECK(kind == "layer" || kind == "rms", "kind: expected layer or rms, got ", kind);
    FTBERT_CHECK(eps > 0, "eps: expected more than 0, got ", eps);
    element_tensor(name, x, x);
    const auto outer = static_cast<int64_t>(x.dim()) - static_cast<int64_t>(shape.size());
    FTBERT_CHECK(!shape.empty() && outer >= 0 && x.sizes().slice(outer) == shape, name,
                 ": expected a shape that ends in normalized_shape ", shape_text(shape), ", got ", describe(x));
    for (const int64_t size : x.sizes().slice(0, outer)) rows *= size;
    for (const int64_t size : shape) cols *= size;
    FTBERT_CHECK(cols > 0 && cols < (1 << 30), "normalized_shape: expected 1 to 2^30 - 1 elements, got ",
                 shape_text(shape));
    FTBERT_CHECK(!bias || kind == "layer", "bias: expected none beside kind rms");
    const std::string expected = "normalized_shape " + shape_text(shape);
    gamma = operand(this->weight = matrix("weight", weight, x, shape, expected));
    beta = operand(this->bias = matrix("bias", bias, x, shape, expected));
  }
};

Tensor row_numbers(const char* name, const OptionalTensor& t, const Tensor& x, int64_t rows) {
  FTBERT_CHECK(t, name, ": expected float32 ", shape_text({rows}), ", got none");
  plain(name, *t);
  FTBERT_CHECK(t->scalar_type() == at::kFloat && t->dim() == 1 && t->size(0) == rows && t->device() == x.device(), name,
               ": expected float32 ", shape_text({rows}), " on ", x.device().str(), ", got ", describe(*t));
  return t->contiguous();
}

Tensor dense(const Tensor& like, at::ScalarType type) {
  return at::empty(like.sizes(), like.options().dtype(type).memory_format(at::MemoryFormat::Contiguous));
}

// -> y in dtype, x + residual in their common type (without a residual: empty), float32 mean [rows] (of kind rms:
// empty) and rstd [rows]
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward_op(const Tensor& x_, const OptionalTensor& residual_,
                                                           const OptionalTensor& weight, const OptionalTensor& bias,
                                                           at::IntArrayRef shape, double eps, const std::string& kind,
                                                           double weight_offset, at::ScalarType dtype, bool) {
  const NormArguments of("x", x_, weight, bias, shape, eps, kind, weight_offset);
  const OptionalTensor x = x_.contiguous(), residual = matrix("residual", residual_, x_);
  FTBERT_CHECK(is_element(dtype), "dtype: expected float32, float16 or bfloat16, got ", at::toString(dtype));
  const auto floats = x->options().dtype(at::kFloat);
  const Tensor y = dense(*x, dtype);
  const Tensor sum =
      residual ? dense(*x, c10::promoteTypes(x->scalar_type(), residual->scalar_type())) : at::empty({0}, x->options());
  const Tensor mean = at::empty({of.kind == NormKind::layer ? of.rows : 0}, floats),
               rstd = at::empty({of.rows}, floats);
  if (of.rows == 0) return {y, sum, mean, rstd};
  on_gpu(*x, [&](auto& context, auto) {
    norm_forward(context, {of, operand(x), operand(residual), operand(sum), operand(y),
                           of.kind == NormKind::layer ? data<float>(mean) : nullptr, data<float>(rstd)});
  });
  return {y, sum, mean, rstd};
}

// -> the gradients of what was normalised, in dtype, of weight and of bias; empty where they are not asked for
std::tuple<Tensor, Tensor, Tensor> norm_backward_op(const Tensor& grad_, const OptionalTensor& grad_sum_,
                                                    const Tensor& saved_, bool from_output, const OptionalTensor& mean_,
                                                    const Tensor& rstd_, const OptionalTensor& weight,
                                                    const OptionalTensor& bias, at::IntArrayRef shape, double eps,
                                                    const std::string& kind, double weight_offset, at::ScalarType dtype,
                                                    bool weight_grad, bool bias_grad) {
  const NormArguments of("saved", saved_, weight, bias, shape, eps, kind, weight_offset);
  FTBERT_CHECK(is_element(dtype), "dtype: expected float32, float16 or bfloat16, got ", at::toString(dtype));
  const OptionalTensor saved = saved_.contiguous(), grad = matrix("grad", grad_, saved_);
  const OptionalTensor grad_sum = matrix("grad_sum", grad_sum_, saved_);
  const bool with_mean = of.kind == NormKind::layer && !from_output;
  const Tensor mean = with_mean ? row_numbers("mean", mean_, saved_, of.rows) : Tensor();
  const Tensor rstd = row_numbers("rstd", rstd_, saved_, of.rows);
  FTBERT_CHECK(of.weight || !weight_grad, "weight_grad: expected false without a weight");
  FTBERT_CHECK(of.bias || !bias_grad, "bias_grad: expected false without a bias");
  const auto like = [&](const OptionalTensor& t, bool asked) {
    const auto options = saved->options().dtype(t ? t->scalar_type() : dtype);
    if (asked && of.rows == 0) return at::zeros(shape, options);
    return asked ? at::empty(shape, options) : at::empty({0}, options);
  };
  const Tensor grad_x = dense(*saved, dtype);
  const Tensor grad_weight = like(of.weight, weight_grad), grad_bias = like(of.bias, bias_grad);
  if (of.rows == 0) return {grad_x, grad_weight, grad_bias};
  on_gpu(*saved, [&](auto& context, auto) {
    OptionalTensor partials;
    if (weight_grad || bias_grad) partials = at::empty({2, norm_partials(context, of.rows), of.cols}, rstd.options());
    norm_backward(context, {of, operand(grad), operand(grad_sum), operand(saved), from_output,
                            with_mean ? data<float>(mean) : nullptr, data<float>(rstd), operand(grad_x),
                            operand(grad_weight), operand(grad_bias), data<float>(partials)});
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op_but_cpu(m,
                    "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int[] normalized_shape, "
                    "float eps, str kind, float weight_offset, ScalarType dtype, bool memory_efficient) -> (Tensor, "
                    "Tensor, Tensor, Tensor)",
                    &norm_forward_op);
  define_op_but_cpu(m,
                    "norm_backward(Tensor grad, Tensor? grad_sum, Tensor saved, bool from_output, Tensor? mean, Tensor "
                    "rstd, Tensor? weight, Tensor? bias, int[] normalized_shape, float eps, str kind, float "
                    "weight_offset, ScalarType dtype, bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)",
                    &norm_backward_op);
}

}  // namespace ftbert::binding
