// torch.ops.ftbert.*: the kernels of rotary positions, as kernel_ops.cpp has the others.
#include <ATen/ops/empty.h>

#include <map>

#include "binding/define_op.h"
#include "binding/op_checks.h"
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

// A rotation where there is a table [positions, dims/2, 2], norms where there is a kind: layer or rms.
Tensor rotate(const Tensor& qkv, const OptionalTensor& positions, const OptionalTensor& angles, int64_t heads,
              int64_t kv_heads, bool interleaved, const std::string& norm, const OptionalTensor& q_gamma,
              const OptionalTensor& q_beta, const OptionalTensor& k_gamma, const OptionalTensor& k_beta, double eps,
              double offset, bool round_before_gamma) {
  rank("qkv", qkv, 2);
  const at::ScalarType type = qkv.scalar_type();
  if (!(qkv.is_cpu() && type == at::kBFloat16)) elements("qkv", qkv, 2);
  const Heads h = heads_of(qkv, heads, kv_heads);
  const Tensor stream = at::empty({0}, qkv.options().dtype(qkv.is_cpu() ? at::kFloat : type));
  const std::map<std::string, NormKind> kinds = {
      {"none", NormKind::none}, {"layer", NormKind::layer}, {"rms", NormKind::rms}};
  const auto kind = kinds.find(norm);
  FTBERT_CHECK(kind != kinds.end(), "norm: expected none, layer or rms, got ", norm);
  const bool normed = kind->second != NormKind::none;
  FTBERT_CHECK(normed == q_gamma.has_value() && normed == k_gamma.has_value(),
               "q_gamma, k_gamma: expected both with a norm, and none without one");
  for (const auto& [name, weight] : {std::pair("q_gamma", &q_gamma), std::pair("q_beta", &q_beta),
                                     std::pair("k_gamma", &k_gamma), std::pair("k_beta", &k_beta)})
    same(name, *weight, stream, {h.size});
  Rotation rotation;
  if (angles) {
    rank("table", *angles, 3);
    FTBERT_CHECK(angles->scalar_type() == at::kFloat && angles->device() == qkv.device() && angles->size(0) > 0 &&
                     angles->size(1) > 0 && 2 * angles->size(1) <= h.size && angles->size(2) == 2 &&
                     reinterpret_cast<uintptr_t>(angles->const_data_ptr()) % 16 == 0,
                 "table: expected Float [positions, up to head_size/2, 2] on ", qkv.device().str(),
                 " that begins at 16 bytes, got ", describe(*angles), " for head_size ", h.size);
    FTBERT_CHECK(positions, "positions: expected with a table");
    integers("positions", *positions, qkv, at::kInt, qkv.size(0));
    check_range("positions", *positions, qkv.size(0), 0, angles->size(0));
    rotation = {data<float>(*angles), angles->size(0), 2 * angles->size(1), interleaved};
  }
  const Tensor out = qkv.clone();
  run(qkv.device(), dtype_of(stream.scalar_type()),
      [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
        // The positions may have been written just now.
        if constexpr (std::is_same_v<Device, Cuda>) call.context.overlap = false;
        const auto norm_of = [&](const OptionalTensor& gamma, const OptionalTensor& beta) {
          return Norm<T>{kind->second,
                         data<T>(gamma),
                         data<T>(beta),
                         static_cast<float>(eps),
                         static_cast<float>(offset),
                         round_before_gamma ? NormRounding::before_gamma : NormRounding::once};
        };
        const HeadRules<T> rules{norm_of(q_gamma, q_beta), norm_of(k_gamma, k_beta), rotation,
                                 data<int32_t>(positions)};
        rotary<Device, T>(call.context, h, rules, qkv.size(0),
                          {.data = out.mutable_data_ptr(), .dtype = dtype_of(type)});
      });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m, "rotary_table(Tensor frequencies, float amplitude, SymInt positions) -> Tensor", &table);
  define_op(m,
            "rotary(Tensor qkv, Tensor? positions, Tensor? table, int heads, int kv_heads=0, bool interleaved=False, "
            "str norm=\"none\", Tensor? q_gamma=None, Tensor? q_beta=None, Tensor? k_gamma=None, Tensor? k_beta=None, "
            "float eps=1e-6, float offset=0., bool round_before_gamma=False) -> Tensor",
            &rotate);
}

}  // namespace ftbert::binding
