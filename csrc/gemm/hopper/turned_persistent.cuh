// wgmma_persistent with heads turned in registers (gemm/gpu/endings/turn.cuh).
#pragma once
#include <type_traits>

#include "gemm/gpu/endings/turn.cuh"
#include "gemm/gpu/turned_product.h"
#include "gemm/hopper/wgmma_persistent.cuh"

namespace ftbert {

// run_turned_persistent of A and B in E4M3.
void run_turned_e4m3(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);

namespace {

// A: of A's and B's elements.
template <class A, class T>
void launch_turned(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data) {
  using E = native_t<T>;
  const HeadRules<T> rules = rules_over<T>(data.rules);
  const TurnArguments<E> arguments{data.bias, data.c, head_turn(data.heads, rules)};
  with_norm_rule(rules.q_norm, [&]<class Rule>() {
    if constexpr (!std::is_same_v<Rule, LayerRule>) {
      const auto run = [&]<int kHead>() {
        launch_persistent<A, TurnInRegisters<E, kHead, Rule>>(context, "kernel turned_persistent", variant, product,
                                                              data, arguments);
      };
      data.heads.size == 64 ? run.template operator()<64>() : run.template operator()<128>();
    }
  });
}

}  // namespace
}  // namespace ftbert
