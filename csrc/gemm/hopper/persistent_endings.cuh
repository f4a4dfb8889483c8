// Products of wgmma_persistent alone: bias, activation and gate, and to memory in the type of C.
#pragma once
#include "gemm/hopper/wgmma_persistent.cuh"

namespace ftbert {

// A variant of wgmma_persistent with A and B in E4M3.
void run_persistent_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data);

namespace {

// A: of A's and B's elements; E: of the bias; C: of the result.
template <class A, class E, class C>
void run_persistent(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const auto launch = [&]<Gate kGate, Activation kActivation>() {
    using Activations = OneActivation<kActivation>;
    launch_persistent<A, Store<E, C, kGate, NoBias, Activations, SwizzledRows>>(
        context, "kernel wgmma_persistent", variant, p, data, {{}, Activations(), data.c, data.c_scale});
  };
  if (p.epilogue.gate == Gate::pairs)
    return with_activation(p.epilogue.activation,
                           [&](auto kind) { launch.template operator()<Gate::pairs, decltype(kind)::value>(); });
  if (p.epilogue.activation == Activation::none) return launch.template operator()<Gate::none, Activation::none>();
  launch.template operator()<Gate::none, Activation::gelu_erf>();
}

}  // namespace
}  // namespace ftbert
