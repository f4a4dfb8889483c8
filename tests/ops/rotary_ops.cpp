// torch.ops.ftbert.*: the kernels of rotary positions and of norms over heads.
#include <ATen/ops/empty.h>

#include "binding/define_op.h"
#include "gemm/gpu/turned_product.h"
#include "head_words.h"
#include "kernels/kernels.h"

namespace ftbert::binding {
namespace {

// frequencies float64 [pairs] -> [positions, pairs, 2]
Tensor table(const Tensor& frequencies, double amplitude, int64_t positions) {
  integers("frequencies", frequencies, frequencies, at::kDouble, 1);
  count("positions", positions, 0, 1 << 21);
  const int64_t pairs = frequencies.size(0);
  const Tensor on_host = frequencies.to(at::kCPU);
  Tensor out = at::empty({positions, pairs, 2}, frequencies.options().dtype(at::kFloat));
  run(frequencies.device(), DType::fp32, [&]<class Device>(auto, CallContext<Device>& call) {
    rotary_table<Device>(call.context, data<double>(on_host), pairs, amplitude, positions, data<float>(out));
  });
  return out;
}

// frequencies float64 [pairs], positions int32 [tokens], cu_seqlens int32 [count + 1] -> [tokens, pairs, 2]
Tensor angles(const Tensor& frequencies, double amplitude, double factor, int64_t trained, const Tensor& positions,
              const Tensor& cu_seqlens) {
  integers("frequencies", frequencies, positions, at::kDouble, 2);
  integers("positions", positions, positions, at::kInt, 0);
  count("trained", trained, 1);
  FTBERT_CHECK(factor > 0, "factor: expected a number above 0, got ", factor);
  const int64_t pairs = frequencies.size(0), tokens = positions.size(0);
  const int64_t sequences = check_offsets(cu_seqlens, positions, tokens);
  const Tensor on_host = frequencies.to(at::kCPU), rows = at::empty_like(positions);
  Tensor out = at::empty({tokens, pairs, 2}, frequencies.options().dtype(at::kFloat));
  run(frequencies.device(), DType::fp32, [&]<class Device>(auto, CallContext<Device>& call) {
    rotary_angles<Device>(call.context, data<double>(on_host), pairs, amplitude, {factor, trained},
                          data<int32_t>(positions), data<int32_t>(cu_seqlens), sequences, tokens, data<float>(out),
                          data<int32_t>(rows));
  });
  return out;
}

Tensor rotate(const Tensor& qkv, const OptionalTensor& positions, const OptionalTensor& table, int64_t heads,
              int64_t kv_heads, bool interleaved, const std::string& kind, const OptionalTensor& q_gamma,
              const OptionalTensor& q_beta, const OptionalTensor& k_gamma, const OptionalTensor& k_beta, double eps,
              double offset, const std::string& rounding) {
  rank("qkv", qkv, 2);
  const at::ScalarType type = qkv.scalar_type();
  if (!(qkv.is_cpu() && type == at::kBFloat16)) elements("qkv", qkv, 2);
  const Heads h = heads_of(qkv, heads, kv_heads);
  const Tensor stream = at::empty({0}, qkv.options().dtype(qkv.is_cpu() ? at::kFloat : type));
  const HeadWords words(qkv, stream, h, positions, table, interleaved, kind, q_gamma, q_beta, k_gamma, k_beta, eps,
                        offset, rounding);
  const Tensor out = qkv.clone();
  run(qkv.device(), dtype_of(stream.scalar_type()),
      [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
        // The positions may have been written just now.
        if constexpr (std::is_same_v<Device, Cuda>) call.context.overlap = false;
        rotary<Device, T>(call.context, h, words.rules<T>(), qkv.size(0),
                          {out.mutable_data_ptr(), &plain_format(dtype_of(type))});
      });
  return out;
}

// rotary of a product, by a variant of a kernel of ours that contains it; throws where it cannot. With scales a and
// weight are E4M3, and all else is of that dtype.
Tensor linear_turned_op(const Tensor& a, const Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& positions, const OptionalTensor& table, int64_t heads,
                        const std::string& kernel, const std::string& variant, int64_t kv_heads, bool interleaved,
                        const std::string& kind, const OptionalTensor& q_gamma, const OptionalTensor& q_beta,
                        const OptionalTensor& k_gamma, const OptionalTensor& k_beta, double eps, double offset,
                        const std::string& rounding, const OptionalTensor& a_scale, const OptionalTensor& weight_scale,
                        std::optional<at::ScalarType> dtype) {
  FTBERT_CHECK(a_scale.has_value() == weight_scale.has_value() && a_scale.has_value() == dtype.has_value(),
               "a_scale, weight_scale, dtype: expected all of them or none");
  const Format* stored = nullptr;  // weight, in E4M3
  if (a_scale)
    stored = &e4m3_operands(a, *a_scale, weight, *weight_scale, bias, *dtype);
  else
    operands(a, weight, bias);
  const OwnChoice own = find_own(kernel, variant);
  FTBERT_CHECK(own, "there is no product ", kernel, " ", variant);
  const Tensor out = at::empty({a.size(0), weight.size(0)}, a.options().dtype(dtype.value_or(a.scalar_type())));
  const Heads h = heads_of(out, heads, kv_heads);
  const HeadWords words(out, out, h, positions, table, interleaved, kind, q_gamma, q_beta, k_gamma, k_beta, eps, offset,
                        rounding);
  run(out, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    if constexpr (kNormInsideProducts<Device, T>) {
      call.context.overlap = false;  // as above
      const DType type = kDType<T>;
      const Product product{.m = a.size(0),
                            .n = weight.size(0),
                            .k = a.size(1),
                            .a = stored ? stored->numbers : type,
                            .b = stored ? stored : kFormat<T>,
                            .c = type,
                            .epilogue = {.bias = bias.has_value(), .heads = head_columns(h, words.rules<T>())}};
      FTBERT_CHECK(product.epilogue.heads, "products cannot norm and turn heads by these rules");
      const Tensor rows = in_tiles(a);
      const ProductData at{.a = data<void>(rows),
                           .b = data<void>(weight),
                           .bias = data<T>(bias),
                           .c = out.mutable_data_ptr(),
                           .a_scale = data<float>(a_scale),
                           .b_scale = data<float>(weight_scale),
                           .stream = type,
                           .heads = h,
                           .rules = rules_over<void>(words.rules<T>())};
      run_own(call.context, own, product, at);
    } else {
      fail("linear_turned: expected float16 or bfloat16 on a GPU, got ", describe(a));
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m, "rotary_table(Tensor frequencies, float amplitude, SymInt positions) -> Tensor", &table);
  define_op(m,
            "rotary_angles(Tensor frequencies, float amplitude, float factor, int trained, Tensor positions, "
            "Tensor cu_seqlens) -> Tensor",
            &angles);
  define_op(m,
            "rotary(Tensor qkv, Tensor? positions, Tensor? table, int heads, int kv_heads=0, bool interleaved=False, "
            "str kind='rms', Tensor? q_gamma=None, Tensor? q_beta=None, Tensor? k_gamma=None, Tensor? k_beta=None, "
            "float eps=1e-6, float offset=0., str rounding='once') -> Tensor",
            &rotate);
  define_cuda_op(m,
                 "linear_turned(Tensor a, Tensor weight, Tensor? bias, Tensor? positions, Tensor? table, int heads, "
                 "str kernel, str variant, int kv_heads=0, bool interleaved=False, str kind='rms', Tensor? "
                 "q_gamma=None, Tensor? q_beta=None, Tensor? k_gamma=None, Tensor? k_beta=None, float eps=1e-6, float "
                 "offset=0., str rounding='once', Tensor? a_scale=None, Tensor? weight_scale=None, ScalarType? "
                 "dtype=None) -> Tensor",
                 &linear_turned_op);
}

}  // namespace ftbert::binding
