// torch.ops.ftbert.rms_norm, rope, silu_mul: kernels by the names that llama.cpp has for their work, beside
// quantize_q8_1, dequantize_q8_0 (q8_0_ops.cpp) and product (product_ops.cpp).
#include <ATen/ops/empty.h>

#include "binding/define_op.h"
#include "kernels/kernels.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

// x [rows, cols], weight [cols] -> x / sqrt(mean of squares + eps) * weight
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  elements("x", x, 2);
  const int64_t rows = x.size(0), cols = x.size(1);
  same("weight", weight, x, {cols});
  FTBERT_CHECK(eps > 0, "eps: expected more than 0, got ", eps);
  const Tensor out = at::empty({rows, cols}, x.options());
  if (out.numel() == 0) return out;
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    const Norm<T> norm{.kind = NormKind::rms, .gamma = data<T>(weight), .eps = static_cast<float>(eps)};
    add_bias_input_layernorm<Device, T>(call.context, data<T>(x), nullptr, nullptr, norm, rows, cols,
                                        {.normed = data<T>(out)});
  });
  return out;
}

// x [tokens, heads, head_size], positions int32 [tokens], table float [positions, head_size / 2, 2] of rotary_table ->
// pairs (i, i + head_size / 2), or with `interleaved` neighbours, turned by the token's position
Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& table, bool interleaved) {
  elements("x", x, 3);
  const Heads heads{.count = x.size(1), .kv = 0, .size = x.size(2)};
  rank("table", table, 3);
  FTBERT_CHECK(heads.count > 0 && heads.size > 0 && table.scalar_type() == at::kFloat && table.device() == x.device() &&
                   table.is_contiguous() && has_data(table) && table.size(0) > 0 && 2 * table.size(1) == heads.size &&
                   table.size(2) == 2 && reinterpret_cast<uintptr_t>(table.const_data_ptr()) % 16 == 0,
               "table: expected contiguous Float [positions, head_size/2, 2] on ", x.device().str(),
               " that begins at 16 bytes, got ", describe(table), " beside x ", describe(x));
  integers("positions", positions, x, at::kInt, x.size(0));
  check_range("positions", positions, x.size(0), 0, table.size(0));
  const Tensor out = x.clone();
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    if constexpr (std::is_same_v<Device, Cuda>) call.context.overlap = false;  // positions may be written just now
    const Rotation rotation{data<float>(table), table.size(0), heads.size, interleaved};
    rotary<Device, T>(call.context, heads, {.rotation = rotation, .positions = data<int32_t>(positions)}, x.size(0),
                      Operand::of(data<T>(out)));
  });
  return out;
}

// x [rows, 2 * cols], gate and up in turns -> [rows, cols], silu(gate) * up
Tensor silu_mul(const Tensor& x) {
  elements("x", x, 2);
  FTBERT_CHECK(x.size(1) % 2 == 0, "x: expected columns of gate and up in turns, got ", describe(x));
  const int64_t rows = x.size(0), cols = x.size(1) / 2;
  const Tensor out = at::empty({rows, cols}, x.options());
  if (out.numel() == 0) return out;
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    add_bias_gate<Device, T>(call.context, Operand::of(data<T>(x)), nullptr, Activation::silu, rows, cols,
                             Operand::of(data<T>(out)));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m, "rms_norm(Tensor x, Tensor weight, float eps=1e-5) -> Tensor", &rms_norm);
  define_op(m, "rope(Tensor x, Tensor positions, Tensor table, bool interleaved=False) -> Tensor", &rope);
  define_op(m, "silu_mul(Tensor x) -> Tensor", &silu_mul);
}

}  // namespace ftbert::binding
