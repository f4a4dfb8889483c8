// wgmma_persistent with A and B in E4M3, whose 128 elements are a row of a stage where 64 of 16 bits are. Sums begin at
// zero; scales and bias come behind the last step. C is of 16 bits, or E4M3 with a scale.
#include "gemm/hopper/persistent_endings.cuh"

namespace ftbert {
namespace {

template <class E, class C, Activation kActivation, Gate kGate = Gate::none>
void launch(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  launch_persistent<e4m3_t, Plain<E, kActivation, kGate, C, ScaledWork>>(
      context, "kernel wgmma_persistent", variant, p, data,
      scaled_work_of(p, data, context.sm_count, PersistentShapes::kBlocks[variant]));
}

template <class E, class C>
void run_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  if (p.epilogue.gate == Gate::pairs)
    return with_activation(p.epilogue.activation, [&](auto kind) {
      launch<E, C, decltype(kind)::value, Gate::pairs>(context, variant, p, data);
    });
  if (p.epilogue.activation == Activation::none) return launch<E, C, Activation::none>(context, variant, p, data);
  return launch<E, C, Activation::gelu_erf>(context, variant, p, data);
}

template <class E>
void run_bias_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.c == DType::e4m3 ? run_type<E, e4m3_t>(context, variant, p, data) : run_type<E, E>(context, variant, p, data);
}

}  // namespace

void run_persistent_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  data.bias_type(p) == DType::fp16 ? run_bias_type<__half>(context, variant, p, data)
                                   : run_bias_type<__nv_bfloat16>(context, variant, p, data);
}

}  // namespace ftbert
