// torch.ops.ftbert.int8_product: the product of byte rows by a matrix in int8, by itself.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include "binding/define_op.h"
#include "binding/packed_weight.h"
#include "core/format.h"
#include "gemm/gemm.h"
#include "gemm/gpu/own.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

// rows uint8 [m, byte_row_bytes(k)]: core/format.h; weight int8 [n, k], packed here. -> [m, n], or with a gate
// [m, n / 2], float on the CPU, on a GPU of dtype, which is the bias's too. variant: of mma_tile, or "" for what the
// plans choose.
Tensor int8_product_op(const Tensor& rows, const Tensor& weight, const Tensor& scales, const OptionalTensor& bias,
                       const std::string& activation, bool gated, at::ScalarType dtype, const std::string& variant) {
  rank("rows", rows, 2);
  rank("weight", weight, 2);
  rank("scales", scales, 1);
  const int64_t m = rows.size(0), n = weight.size(0), k = weight.size(1);
  FTBERT_CHECK(weight.scalar_type() == at::kChar && n > 0 && k > 0 && k <= kMostInt8Depth,
               "weight: expected int8 [n, k], k at most ", kMostInt8Depth, ", got ", describe(weight));
  FTBERT_CHECK(rows.scalar_type() == at::kByte && rows.size(1) == byte_row_bytes(k) && rows.is_contiguous(),
               "rows: expected contiguous uint8 [m, ", byte_row_bytes(k), "] for a k of ", k, ", got ", describe(rows));
  FTBERT_CHECK(scales.scalar_type() == at::kFloat && scales.size(0) == n && scales.is_contiguous(),
               "scales: expected contiguous float32 [", n, "], got ", describe(scales));
  const Tensor out = at::empty({m, gated ? n / 2 : n}, scales.options().dtype(dtype));
  FTBERT_CHECK(weight.device() == rows.device() && scales.device() == rows.device(),
               "weight, scales: expected beside rows on ", rows.device().str(), ", got ", describe(weight), ", ",
               describe(scales));
  same("bias", bias, out, {n});
  FTBERT_CHECK(!gated || n % 2 == 0, "weight: expected rows of gate and up in turns, got ", describe(weight));
  const Ending<float> of_cpu{.activation = parse_activation(activation), .gate = gated ? Gate::pairs : Gate::none};
  run(rows.device(), dtype_of(dtype), [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    const Ending<T> ending{.activation = of_cpu.activation, .gate = of_cpu.gate};
    Linear<T> w{{.format = &formats::int8, .n = n, .k = k, .scale = data<float>(scales)}, data<T>(bias)};
    const Tensor in_memory = in_tiles(rows);
    const Operand a{data<void>(in_memory), &formats::byte_rows};
    if constexpr (std::is_same_v<Device, Cuda>) {
      Matrix checked = w.weight;
      check_product_exists(DeviceKind::cuda, call.context, kDType<T>, checked, data<float>(scales));
    }
    const Tensor packed = pack_weight(weight);
    w.weight = weight_matrix(formats::int8, packed, n, k);
    w.weight.scale = data<float>(scales);
    const Tensor columns = at::ones({k}, scales.options());  // what byte rows were divided by: `linear` asks for it
    w.input = data<float>(columns);
    Context<Device>& context = call.for_products();
    if constexpr (std::is_same_v<Device, Cuda>) {
      context.overlap = false;  // the weight has been packed just now
      if (!variant.empty()) {
        const OwnChoice own = find_own("mma_tile", variant);
        FTBERT_CHECK(own, "there is no product mma_tile ", variant);
        const Product product =
            product_of(w, m, a, kDType<T>, {.bias = true, .activation = ending.activation, .gate = ending.gate});
        if (m > 0)
          run_own(context, own, product,
                  {.a = a.data,
                   .b = w.weight.data,
                   .bias = w.bias,
                   .c = data<T>(out),
                   .b_scale = data<float>(scales),
                   .stream = kDType<T>});
        return;
      }
    }
    linear(context, w, {a}, m, ending, Operand::of(data<T>(out)));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m,
            "int8_product(Tensor rows, Tensor weight, Tensor scales, Tensor? bias, str activation, bool gated=False, "
            "ScalarType dtype=float, str variant='') -> Tensor",
            &int8_product_op);
}

}  // namespace ftbert::binding
