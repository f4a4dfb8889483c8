// torch.ops.ftbert.*: matrix products.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>

#include "binding/define_op.h"
#include "binding/packed_weight.h"
#include "binding/q8_0.h"
#include "gemm/gpu/contained_norm.h"
#include "gemm/gpu/own.h"
#include "head_words.h"

namespace ftbert::binding {
namespace {

// gated: the rows of weight are those of gate and up in turns
Gate gate_of(bool gated, const Tensor& weight) {
  FTBERT_CHECK(!gated || weight.size(0) % 2 == 0, "weight: expected rows of gate and up in turns, got ",
               describe(weight));
  return gated ? Gate::pairs : Gate::none;
}

// What stands around a product beside its activation.
struct Around {
  OptionalTensor before, residual, after;  // gammas [k] and [n]; [m, n]
  NormWords first, last;
  bool beside;
  Heads heads;
  std::optional<HeadWords> words;
};

// A product by `linear`, and by kernels the parts that `linear` leaves. apart: `linear` is asked for the product alone.
// out has room for the numbers that a gate reads, said for exchanged moments.
template <class Device, class T>
void run_product(Context<Device>& context, const Linear<T>& w, const Tensor& a, Activation activation, Gate gate,
                 const Around& around, bool apart, const Tensor& out, const Tensor& sum, const Tensor& normed,
                 const Tensor& said) {
  const int64_t m = a.size(0), n = w.weight.n, k = w.weight.k;
  const Norm<T> before = around.first.of<T>(around.before, {}), after = around.last.of<T>(around.after, {});
  Ending<T> wish{.activation = activation, .gate = gate};
  const auto in_step = [&](const Epilogue& epilogue, Before norm) {
    Product product = product_of(w, m, epilogue);
    product.before = norm;
    return !apart && is_one_kernel(context, w, product);
  };
  const Tensor rows = in_tiles(a);
  Edge<T> from{Operand::of(data<T>(rows))};
  if (before && !sum.defined() && in_step({.bias = true, .activation = activation, .gate = gate}, Before::norm_rows)) {
    from.pending = before, wish.deferral.by = NormedBy::reader;
  } else if (before) {
    add_bias_input_layernorm<Device, T>(context, data<T>(a), nullptr, nullptr, before, m, k, {.normed = data<T>(rows)});
  }
  ExchangedMoments moments{static_cast<uint64_t*>(said.mutable_data_ptr()), said.numel()};
  Residual<T> residual{.rows = m, .norm = after, .exchanged = &moments};
  if (sum.defined()) {
    residual.stream = {Operand::of(data<T>(sum))};
    (around.beside ? residual.to.sum : residual.to.normed) = data<T>(sum);
    if (around.beside) residual.to.copy = Operand::of(data<T>(normed));
    if (!after && in_step({.bias = true, .residual = true}, Before::nothing)) wish.deferral.by = NormedBy::reader;
    wish.bias = false;
    if (!apart) wish.residual = &residual;
  }
  HeadsWish<T> heads{around.heads, {}};
  if (around.words) heads.rules = around.words->rules<T>();
  if (around.words && !apart) wish.heads = &heads;
  const Made<T> made = linear(context, w, from, m, wish, Operand::of(data<T>(out)));
  const Operand& at = made.rows.rows;
  if (sum.defined() && !made.added)
    add_bias_input_layernorm<Device, T>(context, at.as<T>(), w.bias, data<T>(sum), after, m, n, residual.to);
  if (sum.defined()) return;
  if (at.data != data<T>(out)) copy_on_device(context, at.as<T>(), data<T>(out), out.nbytes());
  if (around.words && !made.heads) rotary<Device, T>(context, around.heads, heads.rules, m, Operand::of(data<T>(out)));
}

// norm(a) @ weight^T + bias, activated or gated; or its heads as `rotary` leaves them; or added to a residual, and the
// sum normed. before [k], after [n]: gammas. With scales weight is int8, and both stand for a matrix in q8_0.
// -> [m, n], with a gate [m, n / 2], `beside` [2, m, n], the sum and its norm
Tensor product_op(const Tensor& a, const Tensor& weight, const OptionalTensor& bias, const std::string& activation,
                  bool gated, const OptionalTensor& scales, const OptionalTensor& before,
                  const OptionalTensor& residual, const OptionalTensor& after, bool beside, const std::string& kind,
                  double eps, double offset, const std::string& rounding, int64_t heads, int64_t kv_heads,
                  const OptionalTensor& positions, const OptionalTensor& table, bool apart) {
  if (scales)
    q8_0_operands(a, weight, *scales, bias);
  else
    operands(a, weight, bias);
  const int64_t m = a.size(0), n = weight.size(0), k = weight.size(1);
  same("before", before, a, {k});
  same("residual", residual, a, {m, n});
  same("after", after, a, {n});
  const Activation act = parse_activation(activation);
  const Gate gate = gate_of(gated, weight);
  FTBERT_CHECK(!residual || (act == Activation::none && !gated && heads == 0),
               "residual: expected no activation, gate or heads beside it");
  FTBERT_CHECK((!after || residual) && (!beside || after), "after, beside: expected with a residual, and with `after`");
  const int64_t cols = gated ? n / 2 : n;
  const Tensor memory = at::empty({m * (gated ? cols + n : n)}, a.options());
  const Tensor out = memory.narrow(0, 0, m * cols).view({m, cols});
  const Tensor sum = residual ? in_tiles(*residual) : Tensor();
  const Tensor normed = residual ? at::empty_like(sum) : Tensor();
  const Tensor said = at::empty({exchanged_moment_count(m)}, a.options().dtype(at::kLong));
  Around around{
      before, residual, after, {before, {}, eps, kind, offset, rounding}, {after, {}, eps, kind, offset, rounding},
      beside, {},       {}};
  const OptionalTensor none;
  if (heads > 0) {
    around.heads = heads_of(out, heads, kv_heads);
    around.words.emplace(out, out, around.heads, positions, table, false, "rms", none, none, none, none, eps, 0.0,
                         "once");
  }
  run(a, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    const Tensor read = scales ? pack_q8_0(weight, *scales) : a.is_cpu() ? pack_weight(weight) : weight;
    const Linear<T> w{weight_matrix(scales ? formats::q8_0 : *kFormat<T>, read, n, k), data<T>(bias)};
    Context<Device>& context = call.for_products(weight_scratch_bytes(call.context, w, m));
    if constexpr (std::is_same_v<Device, Cuda>) context.overlap = false;  // the weights may have been written just now
    check_product_exists(context, w);
    run_product(context, w, a, act, gate, around, apart, out, sum, normed, said);
  });
  return beside ? at::stack({sum, normed}) : residual ? sum : out;
}

// A product by a variant of a kernel of ours; throws where there is none, or it cannot do the product. overlap as
// above.
void run_variant(const std::string& kernel, const std::string& variant, const Tensor& a, const Product& product,
                 const ProductData& data) {
  const OwnChoice own = find_own(kernel, variant);
  FTBERT_CHECK(own, "there is no product ", kernel, " ", variant);
  CallContext<Cuda> call(a.device());
  Context<Cuda>& context = call.for_products();
  context.overlap = false;
  run_own(context, own, product, data);
}

const void* data_or_none(const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; }

// activation(norm(a) @ weight^T + bias), with a residual plus that. With scales weight is int8, and both stand for a
// matrix in q8_0. gamma, beta [k]: of the norm. counter: int32 [1], 0 before and after; without it blocks have as many
// tiles each. -> [m, n], or with a gate [m, n / 2]
Tensor linear_own(const Tensor& a, const Tensor& weight, const OptionalTensor& bias, const std::string& activation,
                  const std::string& kernel, const std::string& variant, bool gated, const OptionalTensor& scales,
                  const OptionalTensor& residual, const OptionalTensor& gamma, const OptionalTensor& beta, double eps,
                  const std::string& kind, double offset, const std::string& rounding, const OptionalTensor& counter) {
  if (scales)
    q8_0_operands(a, weight, *scales, bias);
  else
    operands(a, weight, bias);
  const int64_t m = a.size(0), n = weight.size(0), k = a.size(1);
  same("residual", residual, a, {m, n});
  same("gamma", gamma, a, {k});
  same("beta", beta, a, {k});
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
                                     .gate = gate_of(gated, weight),
                                     .residual = residual.has_value()}};
  const Tensor rows = in_tiles(a);
  Tensor out = residual ? residual->clone() : at::empty({m, product.epilogue.columns(n)}, a.options());
  run_variant(kernel, variant, a, product,
              {.a = rows.const_data_ptr(),
               .b = stored.const_data_ptr(),
               .bias = data_or_none(bias),
               .c = out.mutable_data_ptr(),
               .norm = norm.untyped(gamma, beta),
               .tile_count = counter ? reinterpret_cast<uint32_t*>(counter->mutable_data_ptr<int32_t>()) : nullptr});
  return out;
}

// Matrices in E4M3 with their scales. dtype: of the bias, and of the result without out_scale, with which it is E4M3.
// kernel, variant: of ours, or "" for what the plans choose. -> [m, n], or with a gate [m, n / 2]
Tensor linear_e4m3(const Tensor& a, const Tensor& a_scale, const Tensor& weight, const Tensor& weight_scale,
                   const OptionalTensor& bias, at::ScalarType dtype, const std::string& activation, bool gated,
                   const OptionalTensor& out_scale, const std::string& kernel, const std::string& variant) {
  const Format& stored = e4m3_operands(a, a_scale, weight, weight_scale, bias, dtype);
  const int64_t m = a.size(0), n = weight.size(0), k = weight.size(1);
  if (out_scale) scales("out_scale", *out_scale, a, 1);
  const Epilogue epilogue{
      .bias = bias.has_value(), .activation = parse_activation(activation), .gate = gate_of(gated, weight)};
  const int64_t cols = epilogue.columns(n);
  Tensor out;
  run(a.device(), dtype_of(dtype), [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    Context<Device>& context = call.for_products();
    const Linear<T> w{
        {.data = weight.const_data_ptr(), .format = &stored, .n = n, .k = k, .scale = data<float>(weight_scale)},
        data<T>(bias),
        data<float>(a_scale)};
    check_product_exists(context, w);
    if constexpr (std::is_same_v<Device, Cuda>) {
      context.overlap = false;
      const Tensor rows = in_tiles(a);
      const Operand from{data<void>(rows), &formats::e4m3_tensor, data<float>(a_scale)};
      Tensor memory = at::empty({m * (gated ? cols + n : n)}, a.options().dtype(dtype));  // also for numbers of T
      Operand to{memory.mutable_data_ptr(), kFormat<T>};
      if (out_scale) to.format = &formats::e4m3_tensor, to.scale = data<float>(out_scale);
      DType made = to.dtype();
      if (kernel.empty()) {
        made = linear(context, w, {from}, m, {.activation = epilogue.activation, .gate = epilogue.gate}, to)
                   .rows.rows.dtype();
      } else if (m > 0) {
        run_variant(kernel, variant, a, product_of(w, m, from, to.dtype(), epilogue),
                    {.a = from.data,
                     .b = w.weight.data,
                     .bias = w.bias,
                     .c = to.data,
                     .a_scale = from.scale,
                     .b_scale = w.weight.template scales<float>(),
                     .c_scale = to.scale,
                     .stream = kDType<T>});
      }
      const Tensor typed = made == DType::e4m3 ? memory.view(at::kFloat8_e4m3fn) : memory;
      out = typed.narrow(0, 0, m * cols).view({m, cols});
    }
  });
  return out;
}

// A product, the residual sum and the norm of it, by a kernel that contains all of them. With a_scale and weight_scale
// a and weight are E4M3, and all else is of input's type; with copy_scale the norm is then stored in E4M3 too, or with
// keep_sum instead. turn: of products that share `said`, with words for exchanged moments, or with 0 memory of its own.
// -> norm, sum and that copy, each [m, n] or of no rows
std::tuple<Tensor, Tensor, Tensor> linear_norm(const Tensor& a, const Tensor& weight, const OptionalTensor& bias,
                                               const Tensor& input, const Tensor& gamma, const OptionalTensor& beta,
                                               double eps, const std::string& variant, const std::string& kind,
                                               double offset, const std::string& rounding, bool keep_sum,
                                               const OptionalTensor& a_scale, const OptionalTensor& weight_scale,
                                               const OptionalTensor& copy_scale, const OptionalTensor& said,
                                               int64_t turn) {
  FTBERT_CHECK(a_scale.has_value() == weight_scale.has_value(), "a_scale, weight_scale: expected both or none");
  const Format* stored = nullptr;  // weight, in E4M3
  if (a_scale)
    stored = &e4m3_operands(a, *a_scale, weight, *weight_scale, bias, input.scalar_type());
  else
    operands(a, weight, bias);
  const int64_t m = a.size(0), n = weight.size(0), moments = exchanged_moment_count(m);
  elements("input", input, 2);
  FTBERT_CHECK(
      input.scalar_type() != at::kFloat && input.device() == a.device() && input.size(0) == m && input.size(1) == n,
      "input: expected 16-bit elements ", shape_text({m, n}), " on ", a.device().str(), ", got ", describe(input));
  if (!a_scale) same("input", input, a, {m, n});
  same("gamma", gamma, input, {n});
  same("beta", beta, input, {n});
  FTBERT_CHECK(!copy_scale || a_scale, "copy_scale: expected beside operands in e4m3");
  if (copy_scale) scales("copy_scale", *copy_scale, a, 1);
  count("turn", turn, 0);
  FTBERT_CHECK(said ? said->scalar_type() == at::kLong && said->device() == a.device() && said->is_contiguous() &&
                          said->numel() >= moments
                    : turn == 0,
               "said: expected contiguous Long of at least ", moments, " on ", a.device().str(), ", or turn 0");
  const NormWords norm(gamma, beta, eps, kind, offset, rounding);
  const Tensor shared = said ? *said : at::empty({moments}, a.options().dtype(at::kLong));
  const auto made_if = [&](bool made, const at::TensorOptions& options) {
    return at::empty({made ? m : 0, n}, options);
  };
  const Tensor rows = in_tiles(a);
  Tensor c = in_tiles(input), copy = made_if(copy_scale.has_value(), a.options());
  Tensor beside = made_if(keep_sum && !copy_scale, input.options());
  const DType type = dtype_of(input.scalar_type());
  const Product product{.m = m,
                        .n = n,
                        .k = a.size(1),
                        .a = stored ? stored->numbers : type,
                        .b = stored ? stored : &plain_format(type),
                        .c = type,
                        .epilogue = {.bias = bias.has_value(),
                                     .residual = true,
                                     .after = keep_sum ? After::norm_beside : After::norm,
                                     .norm = norm.kind}};
  run_variant(keep_sum ? "wgmma_prenorm" : "wgmma_layernorm", variant, a, product,
              {.a = rows.const_data_ptr(),
               .b = weight.const_data_ptr(),
               .bias = data_or_none(bias),
               .c = c.mutable_data_ptr(),
               .a_scale = data<float>(a_scale),
               .b_scale = data<float>(weight_scale),
               .stream = type,
               .norm = norm.untyped(gamma, beta),
               .copy = copy_scale ? copy.mutable_data_ptr()
                       : keep_sum ? beside.mutable_data_ptr()
                                  : nullptr,
               .copy_scale = data<float>(copy_scale),
               .moments = {static_cast<uint64_t*>(shared.mutable_data_ptr()), shared.numel(), static_cast<int>(turn)}});
  return keep_sum ? std::tuple(beside, c, copy) : std::tuple(c, beside, copy);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m,
            "product(Tensor a, Tensor weight, Tensor? bias=None, str activation='none', bool gated=False, Tensor? "
            "scales=None, Tensor? before=None, Tensor? residual=None, Tensor? after=None, bool beside=False, str "
            "kind='layer', float eps=1e-05, float offset=0, str rounding='once', int heads=0, int kv_heads=0, Tensor? "
            "positions=None, Tensor? table=None, bool apart=False) -> Tensor",
            &product_op);
  define_cuda_op(m,
                 "linear_own(Tensor a, Tensor weight, Tensor? bias, str activation, str kernel, str variant, bool "
                 "gated=False, Tensor? scales=None, Tensor? residual=None, Tensor? gamma=None, Tensor? beta=None, "
                 "float eps=1e-05, str kind='rms', float offset=0, str rounding='once', Tensor(a!)? counter=None) -> "
                 "Tensor",
                 &linear_own);
  define_op(m,
            "linear_e4m3(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType dtype, "
            "str activation, bool gated=False, Tensor? out_scale=None, str kernel='', str variant='') -> Tensor",
            &linear_e4m3);
  define_cuda_op(m,
                 "linear_norm(Tensor a, Tensor weight, Tensor? bias, Tensor input, Tensor gamma, Tensor? beta, float "
                 "eps, str variant, str kind='layer', float offset=0, str rounding='once', bool sum=False, Tensor? "
                 "a_scale=None, Tensor? weight_scale=None, Tensor? copy_scale=None, Tensor(a!)? said=None, int "
                 "turn=0) -> (Tensor, Tensor, Tensor)",
                 &linear_norm);
}

}  // namespace ftbert::binding
