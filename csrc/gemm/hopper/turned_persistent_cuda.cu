// wgmma_persistent with heads turned in registers (turned_product.h).
#include <type_traits>

#include "gemm/gpu/endings/turn.cuh"
#include "gemm/gpu/turned_product.h"
#include "gemm/hopper/wgmma_persistent.cuh"

namespace ftbert {
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

template <class T>
void run_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.a == DType::e4m3 ? launch_turned<e4m3_t, T>(context, variant, p, data)
                     : launch_turned<native_t<T>, T>(context, variant, p, data);
}

}  // namespace

void run_turned_persistent(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.c == DType::fp16 ? run_type<half_t>(context, variant, p, data) : run_type<bfloat16_t>(context, variant, p, data);
}

}  // namespace ftbert
