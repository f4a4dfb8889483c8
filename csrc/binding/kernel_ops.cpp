// torch.ops.ftbert.*: every kernel by itself, for tests, benchmarks and heads; those of padding are in padding_ops.cpp.
// Fake implementations are in ftbert/_fake.py.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "binding/op_checks.h"
#include "core/types.h"
#include "gemm/gemm_fused.h"
#include "gemm/gemm_layernorm.h"
#include "kernels/kernels.h"
#include "weights.h"

namespace ftbert::binding {
namespace {

Tensor embeddings(const Tensor& ids, const OptionalTensor& types, const OptionalTensor& token_index, const Tensor& pos,
                  const Tensor& word, const OptionalTensor& position, const OptionalTensor& token_type,
                  const OptionalTensor& gamma, const OptionalTensor& beta, double eps) {
  rank("word", word, 2);
  const int64_t tokens = pos.size(0), cols = word.size(1);
  integers("positions", pos, word, at::kInt, 0);
  integers("input_ids", ids, word, at::kLong, token_index ? 0 : tokens);
  if (types) integers("token_type_ids", *types, word, at::kLong, ids.size(0));
  if (position) same("position", position, word, {position->size(0), cols});
  if (token_type) same("token_type", token_type, word, {token_type->size(0), cols});
  same("gamma", gamma, word, {cols});
  same("beta", beta, word, {cols});
  Tensor out = at::empty({tokens, cols}, word.options());
  run(word, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    const EmbeddingTables<T> tables{data<T>(word),
                                    data<T>(position),
                                    data<T>(token_type),
                                    data<T>(gamma),
                                    data<T>(beta),
                                    word.size(0),
                                    position ? position->size(0) : 0,
                                    token_type ? token_type->size(0) : 0,
                                    static_cast<float>(eps)};
    embeddings_layernorm<typename decltype(backend)::Device, T>(context, tables, data<int64_t>(ids),
                                                                data<int64_t>(types), data<int64_t>(token_index),
                                                                data<int32_t>(pos), tokens, cols, data<T>(out));
  });
  return out;
}

std::tuple<Tensor, Tensor> layernorm(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& input,
                                     const Tensor& gamma, const Tensor& beta, double eps) {
  rank("x", x, 2);
  const int64_t cols = x.size(1);
  same("bias", bias, x, {cols});
  same("input", input, x, x.sizes());
  same("gamma", gamma, x, {cols});
  same("beta", beta, x, {cols});
  Tensor out = at::empty_like(x), sum = at::empty_like(x);
  run(x, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    add_bias_input_layernorm<typename decltype(backend)::Device, T>(
        context, data<T>(x), data<T>(bias), data<T>(input), data<T>(gamma), data<T>(beta), static_cast<float>(eps),
        x.size(0), cols, data<T>(sum), data<T>(out));
  });
  return {out, sum};
}

void bias_act_in_place(const Tensor& x, const OptionalTensor& bias, const std::string& activation) {
  rank("x", x, 2);
  same("bias", bias, x, {x.size(1)});
  const Activation act = parse_activation(activation);
  run(x, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    add_bias_act<typename decltype(backend)::Device, T>(context, data<T>(x), data<T>(bias), act, x.size(0), x.size(1));
  });
}

Tensor bias_act(const Tensor& x, const OptionalTensor& bias, const std::string& activation) {
  const Tensor out = x.clone();
  bias_act_in_place(out, bias, activation);
  return out;
}

Tensor attend(const Tensor& qkv, const Tensor& cu, int64_t max_seqlen, int64_t heads,
              const OptionalTensor& relative_bias, const OptionalTensor& columns, bool bf16) {
  rank("qkv", qkv, 2);
  FTBERT_CHECK(!bf16 || qkv.is_cpu(), "bf16: operands are rounded on the CPU alone; elsewhere qkv itself may be bf16");
  integers("cu_seqlens", cu, qkv, at::kInt, 1);
  FTBERT_CHECK(heads > 0 && qkv.size(1) % (3 * heads) == 0, "qkv: expected [tokens, 3*heads*head_size], got ",
               describe(qkv), " for ", heads, " heads");
  const int64_t hidden = qkv.size(1) / 3, head_size = hidden / heads;
  same("relative_bias", relative_bias, qkv, {heads, relative_bias ? relative_bias->size(1) : 0});
  if (columns) integers("columns", *columns, qkv, at::kInt, qkv.size(0));
  const int64_t span = relative_bias ? (relative_bias->size(1) + 1) / 2 : 0;
  FTBERT_CHECK(!relative_bias || columns || max_seqlen <= span, "relative_bias: expected distances up to ", max_seqlen,
               ", got them below ", span);
  Tensor out = at::empty({qkv.size(0), hidden}, qkv.options());
  run(qkv, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    using Device = typename decltype(backend)::Device;
    FTBERT_CHECK((attention_supports<Device, T>(context, head_size)), "attention: no fused kernel for head size ",
                 head_size, " here; the general path takes any");
    const Tensor scratch = at::empty({static_cast<int64_t>(attention_scratch_bytes<Device, T>(max_seqlen, head_size))},
                                     qkv.options().dtype(at::kByte));
    if constexpr (std::is_same_v<Device, Cpu>)
      context.bf16 = bf16;
    else
      context.offsets_early = false;  // they may have been written just now
    attention<Device, T>(context, data<T>(qkv), qkv.size(0), 0, data<int32_t>(cu),
                         {data<T>(relative_bias), data<int32_t>(columns), span}, cu.size(0) - 1, max_seqlen, max_seqlen,
                         heads, head_size, scratch.data_ptr(), data<T>(out));
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> qkv_bias(const Tensor& qkv, const OptionalTensor& bias, const Tensor& cu,
                                            int64_t seq, int64_t heads) {
  rank("qkv", qkv, 2);
  integers("cu_seqlens", cu, qkv, at::kInt, 1);
  same("bias", bias, qkv, {qkv.size(1)});
  const int64_t batch = cu.size(0) - 1, head_size = qkv.size(1) / 3 / heads;
  const auto make = [&] { return at::empty({batch, heads, seq, head_size}, qkv.options()); };
  Tensor q = make(), k = make(), v = make();
  run(qkv, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    add_qkv_bias<typename decltype(backend)::Device, T>(context, data<T>(qkv), data<T>(bias), 0, data<int32_t>(cu),
                                                        batch, seq, heads, head_size, data<T>(q), data<T>(k),
                                                        data<T>(v));
  });
  return {q, k, v};
}

Tensor softmax_op(const Tensor& scores, const Tensor& cu, double scale, const OptionalTensor& relative_bias,
                  const OptionalTensor& columns, at::ScalarType type) {
  rank("scores", scores, 4);
  FTBERT_CHECK(scores.scalar_type() == at::kFloat, "scores: expected float32");
  integers("cu_seqlens", cu, scores, at::kInt, scores.size(0) + 1);
  Tensor out = at::empty(scores.sizes(), scores.options().dtype(type));
  same("relative_bias", relative_bias, out, {scores.size(1), relative_bias ? relative_bias->size(1) : 0});
  if (columns) integers("columns", *columns, scores, at::kInt, 0);
  const int64_t span = relative_bias ? (relative_bias->size(1) + 1) / 2 : 0;
  run(out, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    softmax<typename decltype(backend)::Device, T>(context, data<float>(scores), data<int32_t>(cu),
                                                   static_cast<float>(scale),
                                                   {data<T>(relative_bias), data<int32_t>(columns), span},
                                                   scores.size(0), scores.size(1), scores.size(2), data<T>(out));
  });
  return out;
}

Tensor transpose_op(const Tensor& x, const Tensor& cu, int64_t tokens) {
  rank("x", x, 4);
  integers("cu_seqlens", cu, x, at::kInt, x.size(0) + 1);
  Tensor out = at::empty({tokens, x.size(1) * x.size(3)}, x.options());
  run(x, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    transpose<typename decltype(backend)::Device, T>(context, data<T>(x), 0, data<int32_t>(cu), x.size(0), x.size(2),
                                                     x.size(1), x.size(3), data<T>(out));
  });
  return out;
}

Tensor pooling_op(const Tensor& hidden, const Tensor& cu, const std::string& mode, bool normalize) {
  rank("hidden", hidden, 2);
  integers("cu_seqlens", cu, hidden, at::kInt, 1);
  const PoolingMode pooling_mode = parse_pooling(mode);
  const int64_t batch = cu.size(0) - 1, cols = hidden.size(1);
  Tensor out = at::empty({batch, cols}, hidden.options().dtype(at::kFloat));
  run(hidden, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    pooling<typename decltype(backend)::Device, T>(context, data<T>(hidden), data<int32_t>(cu), batch, cols,
                                                   pooling_mode, normalize, data<float>(out));
  });
  return out;
}

Tensor linear_op(const Tensor& a, const Tensor& weight, const OptionalTensor& bias, const std::string& activation) {
  rank("a", a, 2);
  rank("weight", weight, 2);
  const int64_t m = a.size(0), n = weight.size(0), k = weight.size(1);
  same("weight", weight, a, {n, a.size(1)});
  same("bias", bias, a, {n});
  const Activation act = parse_activation(activation);
  Tensor out = at::empty({m, n}, a.options());
  run(a, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    if constexpr (std::is_same_v<typename decltype(backend)::Device, Cuda>)
      context.overlap = false;  // the weights may have been written just now
    Tensor packed = a.is_cpu() ? pack_weight(weight) : Tensor();
    const Linear<T> w{data<T>(weight), packed.defined() ? &packed : nullptr, data<T>(bias), n, k};
    const T* result =
        linear<typename decltype(backend)::Device, T>(context, w, data<T>(a), m, {bias.has_value(), act}, data<T>(out));
    if (result != data<T>(out)) std::copy(result, result + m * n, data<T>(out));
  });
  return out;
}

// -> [m, n]; throws where the variant cannot do it
Tensor linear_fused(const Tensor& a, const Tensor& weight, const OptionalTensor& bias, const std::string& activation,
                    int64_t variant) {
  rank("a", a, 2);
  rank("weight", weight, 2);
  const int64_t m = a.size(0), n = weight.size(0), k = weight.size(1);
  same("weight", weight, a, {n, a.size(1)});
  same("bias", bias, a, {n});
  const c10::DeviceGuard guard(a.device());
  CallContext<Cuda> call(a.device());
  FusedGemm gemm{m,
                 n,
                 k,
                 dtype_of(a.scalar_type()),
                 parse_activation(activation),
                 a.const_data_ptr(),
                 weight.const_data_ptr(),
                 bias ? bias->const_data_ptr() : nullptr};
  Tensor out = at::empty({m, n}, a.options());
  gemm.c = out.mutable_data_ptr();
  call.context.overlap = false;  // as above
  run_fused_gemm(call.context, static_cast<int>(variant), gemm);
  return out;
}

// -> [m, n]; throws where the variant cannot do it
Tensor linear_layernorm_op(const Tensor& a, const Tensor& weight, const OptionalTensor& bias, const Tensor& input,
                           const Tensor& gamma, const Tensor& beta, double eps, int64_t variant) {
  rank("a", a, 2);
  rank("weight", weight, 2);
  const int64_t m = a.size(0), n = weight.size(0), k = weight.size(1), moments = norm_gemm_moments(m);
  same("weight", weight, a, {n, a.size(1)});
  same("bias", bias, a, {n});
  same("input", input, a, {m, n});
  same("gamma", gamma, a, {n});
  same("beta", beta, a, {n});
  const c10::DeviceGuard guard(a.device());
  CallContext<Cuda> call(a.device());
  Tensor out = input.clone(), said = at::empty({moments}, a.options().dtype(at::kLong));
  call.context.overlap = false;  // as above
  run_norm_gemm(
      call.context, static_cast<int>(variant),
      {m, n, k, dtype_of(a.scalar_type()), static_cast<float>(eps), a.const_data_ptr(), weight.const_data_ptr(),
       bias ? bias->const_data_ptr() : nullptr, gamma.const_data_ptr(), beta.const_data_ptr(), out.mutable_data_ptr(),
       static_cast<uint64_t*>(said.mutable_data_ptr()), moments});
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  m.def(
      "embeddings_layernorm(Tensor input_ids, Tensor? token_type_ids, Tensor? token_index, Tensor positions, Tensor "
      "word, "
      "Tensor? position, Tensor? token_type, Tensor? gamma, Tensor? beta, float eps) -> Tensor");
  m.def(
      "add_bias_input_layernorm(Tensor x, Tensor? bias, Tensor? input, Tensor gamma, Tensor beta, float eps) -> "
      "(Tensor, Tensor)");
  m.def("add_bias_act(Tensor x, Tensor? bias, str activation) -> Tensor");
  m.def("add_bias_act_(Tensor(a!) x, Tensor? bias, str activation) -> ()");
  m.def(
      "attention(Tensor qkv, Tensor cu_seqlens, SymInt max_seqlen, int heads, Tensor? relative_bias=None, Tensor? "
      "columns=None, bool bf16=False) -> Tensor");
  m.def("add_qkv_bias(Tensor qkv, Tensor? bias, Tensor cu_seqlens, SymInt seq, int heads) -> (Tensor, Tensor, Tensor)");
  m.def(
      "softmax(Tensor scores, Tensor cu_seqlens, float scale, Tensor? relative_bias, Tensor? columns, ScalarType "
      "dtype) -> Tensor");
  m.def("transpose(Tensor x, Tensor cu_seqlens, SymInt tokens) -> Tensor");
  m.def("pooling(Tensor hidden, Tensor cu_seqlens, str mode, bool normalize) -> Tensor");
  m.def("linear_fused(Tensor a, Tensor weight, Tensor? bias, str activation, int variant) -> Tensor");
  m.def(
      "linear_layernorm(Tensor a, Tensor weight, Tensor? bias, Tensor input, Tensor gamma, Tensor beta, float eps, "
      "int variant) -> Tensor");
  m.def("linear(Tensor a, Tensor weight, Tensor? bias, str activation) -> Tensor");
}

// One implementation for both devices: the core's own switch chooses.
#define FTBERT_KERNEL_OPS(m)                      \
  m.impl("embeddings_layernorm", &embeddings);    \
  m.impl("add_bias_input_layernorm", &layernorm); \
  m.impl("add_bias_act", &bias_act);              \
  m.impl("add_bias_act_", &bias_act_in_place);    \
  m.impl("attention", &attend);                   \
  m.impl("add_qkv_bias", &qkv_bias);              \
  m.impl("softmax", &softmax_op);                 \
  m.impl("transpose", &transpose_op);             \
  m.impl("pooling", &pooling_op);                 \
  m.impl("linear", &linear_op)
TORCH_LIBRARY_IMPL(ftbert, CPU, m) { FTBERT_KERNEL_OPS(m); }
TORCH_LIBRARY_IMPL(ftbert, CUDA, m) {
  FTBERT_KERNEL_OPS(m);
  m.impl("linear_fused", &linear_fused);
  m.impl("linear_layernorm", &linear_layernorm_op);
}

}  // namespace ftbert::binding
