// torch.ops.ftbert.time_products: what a product costs on this CPU by the type of its weight, for a choice among types.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <vector>

#include "binding/packed_weight.h"
#include "binding/tensors.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"

namespace ftbert::binding {
namespace {

// The seconds that rows of float32 take with a weight in each of `dtypes`, by the way that models go, on one thread:
// several would wait for each other, and on a busy machine that is all that would be seen. The least of several
// rounds, each of which times every type.
std::vector<double> time_products(const std::vector<std::string>& dtypes) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kRows = 128, kSize = 768;  // 1.4 ms in float32 on a core of Zen 4
  constexpr int kFewestRounds = 3, kMostRounds = 9;
  constexpr auto kEnough = std::chrono::milliseconds(15);  // for each type
  struct Weight {
    at::Tensor packed;
    Linear<float> linear;
    double least = std::numeric_limits<double>::infinity();
  };
  const at::Tensor rows = at::full({kRows, kSize}, 1.0f), read = at::empty_like(rows), out = at::empty_like(rows);
  const at::Tensor scales = at::full({kSize}, 1.0f);
  std::vector<Weight> weights(dtypes.size());
  CallContext<Cpu> call(at::kCPU);
  call.products.each_alone(1, [&](int64_t, CpuProducts& own) {
    Context<Cpu> context{&own};
    const auto multiply = [&](const Weight& weight) {
      Operand from = Operand::of(data<float>(rows));
      if (weight.linear.input) {
        from = wished_by(weight.linear, data<float>(read));
        quantise<Cpu, float>(context, data<float>(rows), kRows, kSize, from);
      }
      linear(context, weight.linear, {from}, kRows, {.bias = false, .in_one_piece = true},
             Operand::of(data<float>(out)));
    };
    for (size_t i = 0; i < dtypes.size(); ++i) {
      Weight& weight = weights[i];
      const Format& format = parse_format(dtypes[i]);
      weight.packed = pack_weight(at::full({kSize, kSize}, 1, scalar_type_of(format.numbers)));
      weight.linear.weight = weight_matrix(format, weight.packed, kSize, kSize);
      if (format.block == kWholeRow) weight.linear.weight.scale = weight.linear.input = data<float>(scales);
      check_product_exists(context, weight.linear);
      multiply(weight);  // its kernel is compiled now
    }
    const auto enough = Clock::now() + kEnough * std::ssize(dtypes);
    for (int round = 0; round < kFewestRounds || (round < kMostRounds && Clock::now() < enough); ++round) {
      for (Weight& weight : weights) {
        const auto start = Clock::now();
        multiply(weight);
        weight.least = std::min(weight.least, std::chrono::duration<double>(Clock::now() - start).count());
      }
    }
  });
  std::vector<double> seconds;
  for (const Weight& weight : weights) seconds.push_back(weight.least);
  return seconds;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) { m.def("time_products(str[] dtypes) -> float[]", &time_products); }

}  // namespace ftbert::binding
