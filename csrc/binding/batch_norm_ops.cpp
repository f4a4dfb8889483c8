// torch.ops.ftbert.batch_norm_*, relu_with_mask and relu_backward_from_mask. CUDA is here; the CPU's implementations,
// shapes and gradients are registered by ftbert/norm/batch_norm_ops.py.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "binding/define_op.h"
#include "binding/op_checks.h"
#include "kernels/norm/batch_norm.h"

namespace ftbert::binding {
namespace {

// ---- how tensors lie -----------------------------------------------------------------------------------------------

// [batch, ..., channels] in memory, where that is another order than [batch, channels, ...]: channels_last, and rank 3
// in the same way.
bool channels_last(const Tensor& x) { return x.dim() > 2 && !x.is_contiguous() && x.movedim(1, -1).is_contiguous(); }

// x itself where its elements lie densely in one of the two orders.
Tensor dense(const Tensor& x) { return channels_last(x) ? x : x.contiguous(); }

// t, of x's shape, in the order of x, which is dense.
Tensor ordered_as(const Tensor& x, const Tensor& t) {
  if (!channels_last(x)) return t.contiguous();
  return t.movedim(1, -1).contiguous().movedim(-1, 1);
}

ChannelLayout layout_of(const Tensor& x) {
  const int64_t channels = x.size(1), of_each = x.numel() / std::max<int64_t>(channels, 1);
  if (channels == 1) return {1, 1, of_each};
  if (channels_last(x)) return {of_each, channels, 1};
  return {x.size(0), channels, x.size(0) ? of_each / x.size(0) : 0};
}

// ---- checks --------------------------------------------------------------------------------------------------------

void input(const Tensor& x) {
  element_tensor("x", x, x);
  FTBERT_CHECK(x.dim() >= 2, "x: expected [batch, channels, ...], got ", describe(x));
}

void alike(const char* name, const OptionalTensor& t, const Tensor& x) {
  if (!t) return;
  plain(name, *t);
  FTBERT_CHECK(t->sizes() == x.sizes() && t->scalar_type() == x.scalar_type() && t->device() == x.device(), name,
               ": expected ", describe(x), " as x is, got ", describe(*t));
}

// The vector of x's channels, contiguous.
OptionalTensor channel_tensor(const char* name, const OptionalTensor& t, const Tensor& x) {
  if (!t) return t;
  plain(name, *t);
  FTBERT_CHECK(t->dim() == 1 && t->size(0) == x.size(1) && t->device() == x.device() &&
                   (t->scalar_type() == at::kFloat || t->scalar_type() == x.scalar_type()),
               name, ": expected Float or ", at::toString(x.scalar_type()), " [", x.size(1), "] on ", x.device().str(),
               ", got ", describe(*t));
  return t->contiguous();
}

ChannelVector channel_vector(const OptionalTensor& t) {
  return t && t->numel() ? ChannelVector{data<void>(*t), dtype_of(t->scalar_type())} : ChannelVector();
}

// A tensor that a kernel writes into: autograd learns that it is another one now.
void written(const char* name, const OptionalTensor& t) {
  if (!t) return;
  FTBERT_CHECK(t->is_contiguous(), name, ": expected a contiguous tensor, in which results are stored");
  t->unsafeGetTensorImpl()->bump_version();
}

int64_t words(int64_t elements) { return (elements + 31) / 32; }

void mask_of(const Tensor& mask, const Tensor& x) {
  plain("mask", mask);
  FTBERT_CHECK(mask.dim() == 1 && mask.scalar_type() == at::kInt && mask.size(0) == words(x.numel()) &&
                   mask.device() == x.device() && mask.is_contiguous(),
               "mask: expected contiguous Int [", words(x.numel()), "] on ", x.device().str(),
               ", a bit for each element of ", describe(x), ", got ", describe(mask));
}

Activation activation_of(const std::string& name) {
  FTBERT_CHECK(name == "none" || name == "relu" || name == "silu", "activation: expected none, relu or silu, got ",
               name);
  return parse_activation(name);
}

// What the ops of a norm have in common. x is dense.
struct NormOperands {
  OptionalTensor weight, bias, mean, var;
  float eps;

  NormOperands(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
               const Tensor& var, double eps)
      : weight(channel_tensor("weight", weight, x)),
        bias(channel_tensor("bias", bias, x)),
        mean(channel_tensor("mean", mean, x)),
        var(channel_tensor("var", var, x)),
        eps(static_cast<float>(eps)) {
    FTBERT_CHECK(eps > 0, "eps: expected more than 0, got ", eps);
  }
  BatchNormVectors vectors() const {
    return {channel_vector(weight), channel_vector(bias), channel_vector(mean), channel_vector(var), eps};
  }
};

Tensor partials_of(const Context<Cuda>& context, const Tensor& x, const ChannelLayout& layout) {
  return at::empty({batch_norm_partials(context, layout)}, x.options().dtype(at::kFloat));
}

uint32_t* words_of(const Tensor& mask) { return mask.numel() ? static_cast<uint32_t*>(data<void>(mask)) : nullptr; }

// ---- ops -----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> statistics(const Tensor& given, const OptionalTensor& running_mean,
                                      const OptionalTensor& running_var, const OptionalTensor& batches,
                                      std::optional<double> momentum) {
  input(given);
  const Tensor x = dense(given);
  const int64_t channels = x.size(1);
  channel_tensor("running_mean", running_mean, x);
  channel_tensor("running_var", running_var, x);
  if (batches) plain("num_batches_tracked", *batches);
  FTBERT_CHECK(
      !batches || (batches->numel() == 1 && batches->scalar_type() == at::kLong && batches->device() == x.device()),
      "num_batches_tracked: expected one Long on ", x.device().str(), ", got ", describe(*batches));
  FTBERT_CHECK(momentum || batches || !(running_mean || running_var),
               "momentum: expected a number, or num_batches_tracked for the mean over all batches");
  const ChannelLayout layout = layout_of(x);
  FTBERT_CHECK(x.numel() == 0 || layout.per_channel() > 1,
               "x: expected more than 1 value per channel when training, got ", describe(x));
  const at::TensorOptions options = x.options().dtype(at::kFloat);
  if (x.numel() == 0) {
    if (batches) batches->add_(1);
    return {at::zeros({channels}, options), at::zeros({channels}, options)};
  }
  written("running_mean", running_mean);
  written("running_var", running_var);
  written("num_batches_tracked", batches);
  const Tensor mean = at::empty({channels}, options), var = at::empty({channels}, options);
  const RunningStatistics running{channel_vector(running_mean), channel_vector(running_var), data<int64_t>(batches),
                                  static_cast<float>(momentum.value_or(0)), !momentum && batches};
  on_gpu(x, [&]<class T>(Context<Cuda>& context, T) {
    const Tensor partials = partials_of(context, x, layout);
    batch_norm_statistics<T>(context, data<T>(x), layout, data<float>(partials), running, data<float>(mean),
                             data<float>(var));
  });
  return {mean, var};
}

// -> y, and the mask of relu if wanted
std::tuple<Tensor, Tensor> apply(const Tensor& given, const OptionalTensor& added, const OptionalTensor& weight,
                                 const OptionalTensor& bias, const Tensor& mean, const Tensor& var, double eps,
                                 const std::string& activation, bool, bool mask) {
  input(given);
  alike("addend", added, given);
  const Tensor x = dense(given);
  const OptionalTensor addend = added ? OptionalTensor(ordered_as(x, *added)) : std::nullopt;
  const NormOperands norm(x, weight, bias, mean, var, eps);
  const Activation act = activation_of(activation);
  const bool masked = mask && act == Activation::relu;
  const Tensor y = at::empty_like(x), bits = at::empty({masked ? words(x.numel()) : 0}, x.options().dtype(at::kInt));
  if (x.numel() == 0) return {y, bits};
  on_gpu(x, [&]<class T>(Context<Cuda>& context, T) {
    batch_norm_apply<T>(context,
                        {data<T>(x), data<T>(addend), layout_of(x), norm.vectors(), act, data<T>(y), words_of(bits)});
  });
  return {y, bits};
}

// wanted: gradients of x, of addend, and of weight and bias; the others are empty. training: mean and var are x's.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& given_dy, const Tensor& given,
                                                    const OptionalTensor& added, const OptionalTensor& mask,
                                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                                    const Tensor& mean, const Tensor& var, double eps,
                                                    const std::string& activation, bool training,
                                                    std::array<bool, 3> wanted) {
  input(given);
  alike("dy", given_dy, given);
  alike("addend", added, given);
  const Tensor x = dense(given), dy = ordered_as(x, given_dy);
  const NormOperands norm(x, weight, bias, mean, var, eps);
  const Activation act = activation_of(activation);
  const bool reads_addend = added && act == Activation::silu, reads_mask = act == Activation::relu;
  const OptionalTensor addend = reads_addend ? OptionalTensor(ordered_as(x, *added)) : std::nullopt;
  FTBERT_CHECK(!reads_mask || mask, "mask: expected the one that batch_norm_apply has made, got none");
  if (reads_mask) mask_of(*mask, x);

  const auto made_if = [](bool made, const Tensor& like) {
    return made ? at::empty_like(like) : at::empty({0}, like.options());
  };
  const auto vector_if = [&](const OptionalTensor& t) { return made_if(t && wanted[2], t ? *t : mean); };
  const Tensor dx = made_if(wanted[0], x), d_addend = made_if(wanted[1], x);
  const Tensor d_weight = vector_if(norm.weight), d_bias = vector_if(norm.bias);
  const std::tuple made(dx, d_addend, d_weight, d_bias);
  if (x.numel() == 0) {
    d_weight.zero_();
    d_bias.zero_();
    return made;
  }
  on_gpu(x, [&]<class T>(Context<Cuda>& context, T) {
    const ChannelLayout layout = layout_of(x);
    const BatchNormBackward<T> call{
        data<T>(dy), data<T>(x), data<T>(addend), reads_mask ? words_of(*mask) : nullptr, layout, norm.vectors(), act};
    Tensor sums;
    if (wanted[2] || (training && wanted[0])) {
      sums = at::empty({2, layout.channels}, x.options().dtype(at::kFloat));
      const Tensor partials = partials_of(context, x, layout);
      batch_norm_backward_sums<T>(context, call, data<float>(partials), data<float>(sums), channel_vector(d_weight),
                                  channel_vector(d_bias));
    }
    if (wanted[0] || wanted[1])
      batch_norm_backward_apply<T>(context, call, training && wanted[0] ? data<float>(sums) : nullptr,
                                   wanted[0] ? data<T>(dx) : nullptr, wanted[1] ? data<T>(d_addend) : nullptr);
  });
  return made;
}

std::tuple<Tensor, Tensor> relu(const Tensor& given) {
  element_tensor("x", given, given);
  const Tensor x = dense(given), y = at::empty_like(x),
               mask = at::empty({words(x.numel())}, x.options().dtype(at::kInt));
  on_gpu(x, [&]<class T>(Context<Cuda>& context, T) {
    relu_with_mask<T>(context, data<T>(x), x.numel(), data<T>(y), words_of(mask));
  });
  return {y, mask};
}

Tensor relu_backward(const Tensor& given, const Tensor& mask) {
  element_tensor("dy", given, given);
  mask_of(mask, given);
  const Tensor dy = dense(given), dx = at::empty_like(dy);
  on_gpu(dy, [&]<class T>(Context<Cuda>& context, T) {
    relu_backward_from_mask<T>(context, data<T>(dy), words_of(mask), dy.numel(), data<T>(dx));
  });
  return dx;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op_but_cpu(m,
                    "batch_norm_statistics(Tensor x, Tensor(a!)? running_mean=None, Tensor(b!)? running_var=None, "
                    "Tensor(c!)? num_batches_tracked=None, float? momentum=0.1) -> (Tensor, Tensor)",
                    &statistics);
  define_op_but_cpu(m,
                    "batch_norm_apply(Tensor x, Tensor? addend, Tensor? weight, Tensor? bias, Tensor mean, Tensor var, "
                    "float eps, str activation, bool training, bool mask) -> (Tensor, Tensor)",
                    &apply);
  define_op_but_cpu(m,
                    "batch_norm_backward(Tensor dy, Tensor x, Tensor? addend, Tensor? mask, Tensor? weight, Tensor? "
                    "bias, Tensor mean, Tensor var, float eps, str activation, bool training, bool[3] wanted) -> "
                    "(Tensor, Tensor, Tensor, Tensor)",
                    &backward);
  define_op_but_cpu(m, "relu_with_mask(Tensor x) -> (Tensor, Tensor)", &relu);
  define_op_but_cpu(m, "relu_backward_from_mask(Tensor dy, Tensor mask) -> Tensor", &relu_backward);
}

}  // namespace ftbert::binding
