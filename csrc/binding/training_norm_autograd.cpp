// The gradients of norm_forward. In C++, since a training step of small kernels is bound by the host: an autograd
// function in Python takes it several times as long as both launches.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "binding/op_checks.h"

namespace ftbert::binding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Calls of the ops below autograd, by the signatures in training_norm_ops.cpp.
using ForwardSignature = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&,
                                                                    const OptionalTensor&, const OptionalTensor&,
                                                                    at::IntArrayRef, double, const std::string&, double,
                                                                    at::ScalarType, bool);
using BackwardSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&, bool,
                                                             const OptionalTensor&, const Tensor&,
                                                             const OptionalTensor&, const OptionalTensor&,
                                                             at::IntArrayRef, double, const std::string&, double,
                                                             at::ScalarType, bool, bool);

template <class Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

OptionalTensor there(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }
Tensor or_none(const OptionalTensor& t) { return t.value_or(Tensor()); }
Tensor in_type(const Tensor& grad, int64_t type) { return grad.to(static_cast<at::ScalarType>(type)); }

// The dispatcher lets None through where a tensor is expected, and what is called first reads its device.
void present(const char* name, const Tensor& t) { FTBERT_CHECK(t.defined(), name, ": expected a tensor, got None"); }

// norm_backward, which has no gradient of its own.
struct NormGradient : Function<NormGradient> {
  // arguments: the op's.
  template <class... Arguments>
  static variable_list forward(AutogradContext*, const Arguments&... arguments) {
    static const auto backward = op<BackwardSignature>("ftbert::norm_backward");
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [x, w, b] = backward.call(arguments...);
    return {x, w, b};
  }
  static variable_list backward(AutogradContext*, variable_list) {
    fail(
        "trying to differentiate ftbert's norms twice, but the gradient of their gradient is not implemented; "
        "torch.nn.LayerNorm and RMSNorm have it (ftbert.norm.unpatch)");
  }
};

struct NormFunction : Function<NormFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, at::IntArrayRef shape,
                               double eps, const std::string& kind, double offset, at::ScalarType dtype,
                               bool memory_efficient) {
    static const auto forward = op<ForwardSignature>("ftbert::norm_forward");
    const auto [y, sum, mean, rstd] = [&] {
      const at::AutoDispatchBelowADInplaceOrView below;
      return forward.call(x, residual, weight, bias, shape, eps, kind, offset, dtype, memory_efficient);
    }();
    const Tensor& normalised = residual ? sum : x;
    // As many tensors in either mode: activation checkpointing counts them.
    ctx->save_for_backward({memory_efficient ? y : normalised, mean, rstd, or_none(weight), or_none(bias)});
    auto& kept = ctx->saved_data;
    kept["from_output"] = memory_efficient;
    kept["shape"] = shape.vec();
    kept["eps"] = eps;
    kept["kind"] = kind;
    kept["offset"] = offset;
    kept["type"] = static_cast<int64_t>(normalised.scalar_type());
    kept["x_type"] = static_cast<int64_t>(x.scalar_type());
    kept["residual_type"] = residual ? static_cast<int64_t>(residual->scalar_type()) : int64_t{-1};
    ctx->mark_non_differentiable(residual ? variable_list{mean, rstd} : variable_list{sum, mean, rstd});
    ctx->set_materialize_grads(false);
    return {y, sum, mean, rstd};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto& kept = ctx->saved_data;
    const Tensor &weight = saved[3], &bias = saved[4];
    const int64_t residual_type = kept["residual_type"].toInt();
    // Edges are counted without absent inputs.
    size_t edge = 0;
    const auto needed = [&](bool present) { return present && ctx->needs_input_grad(edge++); };
    const bool of_x = needed(true), of_residual = needed(residual_type >= 0), of_weight = needed(weight.defined()),
               of_bias = needed(bias.defined());
    variable_list made(10);  // of all arguments
    Tensor grad_x = grads[1];
    if (grads[0].defined()) {
      const std::vector<int64_t> shape = kept["shape"].toIntVector();
      const variable_list of = NormGradient::apply(
          grads[0], there(grads[1]), saved[0], kept["from_output"].toBool(), there(saved[1]), saved[2], there(weight),
          there(bias), at::IntArrayRef(shape), kept["eps"].toDouble(), kept["kind"].toStringRef(),
          kept["offset"].toDouble(), static_cast<at::ScalarType>(kept["type"].toInt()), of_weight, of_bias);
      grad_x = of[0];
      if (of_weight) made[2] = of[1];
      if (of_bias) made[3] = of[2];
    }
    if (grad_x.defined()) {
      if (of_x) made[0] = in_type(grad_x, kept["x_type"].toInt());
      if (of_residual) made[1] = in_type(grad_x, residual_type);
    }
    return made;
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward(const Tensor& x, const OptionalTensor& residual,
                                                        const OptionalTensor& weight, const OptionalTensor& bias,
                                                        at::IntArrayRef shape, double eps, const std::string& kind,
                                                        double offset, at::ScalarType dtype, bool memory_efficient) {
  present("x", x);
  const variable_list made =
      NormFunction::apply(x, residual, weight, bias, shape, eps, kind, offset, dtype, memory_efficient);
  return {made[0], made[1], made[2], made[3]};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad, const OptionalTensor& grad_sum,
                                                 const Tensor& saved, bool from_output, const OptionalTensor& mean,
                                                 const Tensor& rstd, const OptionalTensor& weight,
                                                 const OptionalTensor& bias, at::IntArrayRef shape, double eps,
                                                 const std::string& kind, double offset, at::ScalarType dtype,
                                                 bool weight_grad, bool bias_grad) {
  present("grad", grad);
  present("saved", saved);
  present("rstd", rstd);
  const variable_list made = NormGradient::apply(grad, grad_sum, saved, from_output, mean, rstd, weight, bias, shape,
                                                 eps, kind, offset, dtype, weight_grad, bias_grad);
  return {made[0], made[1], made[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(ftbert, Autograd, m) {
  m.impl("norm_forward", &norm_forward);
  m.impl("norm_backward", &norm_backward);
}

}  // namespace ftbert::binding
