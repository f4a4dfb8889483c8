// torch.ops.ftbert.int8_product: the CPU's int8 product by itself.
#include <ATen/ops/empty.h>

#include "binding/define_op.h"
#include "binding/packed_weight.h"
#include "core/format.h"
#include "gemm/gemm.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

// rows uint8 [m, byte_row_bytes(k)]: core/format.h; weight int8 [n, k], packed here -> float [m, n], or with a gate
// [m, n / 2]
Tensor int8_product_op(const Tensor& rows, const Tensor& weight, const Tensor& scales, const OptionalTensor& bias,
                       const std::string& activation, bool gated) {
  rank("rows", rows, 2);
  rank("weight", weight, 2);
  rank("scales", scales, 1);
  FTBERT_CHECK(rows.is_cpu() && weight.is_cpu() && scales.is_cpu(), "int8 products are computed on the CPU alone, got ",
               describe(rows), ", ", describe(weight), ", ", describe(scales));
  const int64_t m = rows.size(0), n = weight.size(0), k = weight.size(1);
  FTBERT_CHECK(weight.scalar_type() == at::kChar && n > 0 && k > 0 && k <= kMostInt8Depth,
               "weight: expected int8 [n, k], k at most ", kMostInt8Depth, ", got ", describe(weight));
  FTBERT_CHECK(rows.scalar_type() == at::kByte && rows.size(1) == byte_row_bytes(k), "rows: expected uint8 [m, ",
               byte_row_bytes(k), "] for a k of ", k, ", got ", describe(rows));
  FTBERT_CHECK(scales.scalar_type() == at::kFloat && scales.size(0) == n, "scales: expected float32 [", n, "], got ",
               describe(scales));
  same("bias", bias, scales, {n});
  FTBERT_CHECK(!gated || n % 2 == 0, "weight: expected rows of gate and up in turns, got ", describe(weight));
  const Ending<float> ending{.activation = parse_activation(activation), .gate = gated ? Gate::pairs : Gate::none};
  const Tensor out = at::empty({m, gated ? n / 2 : n}, scales.options());
  run(scales, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    if constexpr (std::is_same_v<Device, Cpu>) {
      const Tensor packed = pack_weight(weight);
      Linear<float> w{weight_matrix(formats::int8, packed, n, k), data<float>(bias)};
      w.weight.scale = data<float>(scales);
      const Operand a{data<void>(rows), &formats::byte_rows};
      linear(call.context, w, {a}, m, ending, Operand::of(data<float>(out)));
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m,
            "int8_product(Tensor rows, Tensor weight, Tensor scales, Tensor? bias, str activation, bool gated=False) "
            "-> Tensor",
            &int8_product_op);
}

}  // namespace ftbert::binding
