// torch.ops.ftbert.*: the kernels that go over the elements of a matrix.
#include <ATen/ops/empty.h>

#include "binding/define_op.h"
#include "core/types.h"
#include "kernels/kernels.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

void bias_act_in_place(const Tensor& x, const OptionalTensor& bias, const std::string& activation) {
  elements("x", x, 2);
  same("bias", bias, x, {x.size(1)});
  const Activation act = parse_activation(activation);
  if (x.numel() == 0) return;
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    add_bias_act<Device, T>(call.context, data<T>(x), data<T>(bias), act, x.size(0), x.size(1));
  });
}

Tensor quantise_op(const Tensor& x, const Tensor& scale) {
  elements("x", x, 2);
  const Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat8_e4m3fn));
  const Operand to = scaled_e4m3("out", out, scale, x, x.sizes());
  if (x.numel() == 0) return out;
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    quantise<Device, T>(call.context, data<T>(x), x.size(0), x.size(1), to);
  });
  return out;
}

// x [rows, cols], smooth [cols] -> byte rows (core/format.h) of x * smooth.
Tensor byte_rows_op(const Tensor& x, const OptionalTensor& smooth) {
  elements("x", x, 2);
  const Tensor out = at::empty({x.size(0), byte_row_bytes(x.size(1))}, x.options().dtype(at::kByte));
  const Operand to = byte_rows("x", out, smooth, x, x.size(0), x.size(1));
  if (x.size(0) == 0) return out;
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    quantise<Device, T>(call.context, data<T>(x), x.size(0), x.size(1), to);
  });
  return out;
}

// x [rows, 2 * cols], bias [2 * cols] -> [rows, cols], with a scale in e4m3.
Tensor bias_gate(const Tensor& x, const OptionalTensor& bias, const std::string& activation,
                 const OptionalTensor& scale) {
  elements("x", x, 2);
  FTBERT_CHECK(x.size(1) % 2 == 0, "x: expected columns of gate and up in turns, got ", describe(x));
  same("bias", bias, x, {x.size(1)});
  const Activation act = parse_activation(activation);
  const int64_t rows = x.size(0), cols = x.size(1) / 2;
  const Tensor out = at::empty({rows, cols}, scale ? x.options().dtype(at::kFloat8_e4m3fn) : x.options());
  const Operand scaled = scale ? scaled_e4m3("out", out, scale, x, {rows, cols}) : Operand();
  if (x.numel() == 0) return out;
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    add_bias_gate<Device, T>(call.context, Operand::of(data<T>(x)), data<T>(bias), act, rows, cols,
                             scale ? scaled : Operand::of(data<T>(out)));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m, "add_bias_act_(Tensor(a!) x, Tensor? bias, str activation) -> ()", &bias_act_in_place);
  define_op(m, "add_bias_gate(Tensor x, Tensor? bias, str activation, Tensor? scale=None) -> Tensor", &bias_gate);
  define_op(m, "quantise(Tensor x, Tensor scale) -> Tensor", &quantise_op);
  define_op(m, "byte_rows(Tensor x, Tensor? smooth=None) -> Tensor", &byte_rows_op);
}

}  // namespace ftbert::binding
