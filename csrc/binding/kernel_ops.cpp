// torch.ops.ftbert.*: the kernels that heads, pooling and sampling call by themselves. The ops of all other kernels are
// in tests/ops/, a library that tests and benchmarks load. Fakes are in ftbert/_fake.py.
#include <ATen/ops/empty.h>

#include "binding/define_op.h"
#include "binding/op_checks.h"
#include "core/types.h"
#include "kernels/kernels.h"

namespace ftbert::binding {
namespace {

// With a scale in e4m3.
Tensor bias_act(const Tensor& x, const OptionalTensor& bias, const std::string& activation,
                const OptionalTensor& scale) {
  elements("x", x, 2);
  same("bias", bias, x, {x.size(1)});
  const Activation act = parse_activation(activation);
  const Tensor out = x.clone();
  const Tensor small = scale ? at::empty(x.sizes(), x.options().dtype(at::kFloat8_e4m3fn)) : out;
  const Operand to = scale ? scaled_e4m3("out", small, scale, x, x.sizes()) : Operand();
  if (x.numel() == 0) return small;
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    add_bias_act<Device, T>(call.context, data<T>(out), data<T>(bias), act, x.size(0), x.size(1), to);
  });
  return small;
}

Tensor restore_op(const Tensor& packed, const Tensor& packed_index) {
  elements("packed", packed, 2);
  integers("packed_index", packed_index, packed, at::kInt, 0);
  check_range("packed_index", packed_index, packed_index.size(0), -1, packed.size(0));
  Tensor out = at::empty({packed_index.size(0), packed.size(1)}, packed.options());
  run(packed, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    restore_padding<Device, T>(call.context, data<T>(packed), data<int32_t>(packed_index), packed_index.size(0),
                               packed.size(1), data<T>(out));
  });
  return out;
}

Tensor pooling_op(const Tensor& hidden, const OptionalTensor& cu, const std::string& mode, bool normalize) {
  elements("hidden", hidden, 2);
  const PoolingMode pooling_mode = parse_pooling(mode);
  const int64_t batch = cu ? check_offsets(*cu, hidden, hidden.size(0)) : hidden.size(0), cols = hidden.size(1);
  Tensor out = at::empty({batch, cols}, hidden.options().dtype(at::kFloat));
  run(hidden, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    pooling<Device, T>(call.context, data<T>(hidden), data<int32_t>(cu), batch, cols, pooling_mode, normalize,
                       data<float>(out));
  });
  return out;
}

// logits [rows, vocab] -> int64 [rows], -1 where a row's largest number is no finite one.
Tensor argmax_op(const Tensor& logits) {
  elements("logits", logits, 2);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  count("vocab", vocab, 1);
  const Tensor ids = at::empty({rows}, logits.options().dtype(at::kLong));
  if (rows == 0) return ids;
  run(logits, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    argmax<Device, T>(call.context, data<T>(logits), rows, vocab, data<int64_t>(ids));
  });
  return ids;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m, "add_bias_act(Tensor x, Tensor? bias, str activation, Tensor? scale=None) -> Tensor", &bias_act);
  define_op(m, "restore_padding(Tensor packed, Tensor packed_index) -> Tensor", &restore_op);
  define_op(m, "pooling(Tensor hidden, Tensor? cu_seqlens, str mode, bool normalize) -> Tensor", &pooling_op);
  define_op(m, "argmax(Tensor logits) -> Tensor", &argmax_op);
}

}  // namespace ftbert::binding
