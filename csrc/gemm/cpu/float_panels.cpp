// Products in float by a weight in panels: panel_width of its rows side by side, [n up to whole panels / panel_width,
// k, panel_width]. Rows beyond n are 0.
#include "device/parallel_cpu.h"
#include "gemm/cpu/kernel.h"
#include "kernels/isa.h"

namespace ftbert {
namespace {

int64_t bytes(int64_t n, int64_t k) {
  const int64_t width = isa_kernels().panel_width;
  return (n + width - 1) / width * width * k * static_cast<int64_t>(sizeof(float));
}

void pack(const void* numbers, const half_t*, int64_t n, int64_t k, void* packed) {
  const int64_t width = isa_kernels().panel_width;
  const auto* const weight = static_cast<const float*>(numbers);
  auto* const panels = static_cast<float*>(packed);
#pragma omp parallel for schedule(static) if (n * k > kSerialElements)
  for (int64_t column = 0; column < n; column += width)
    for (int64_t d = 0; d < k; ++d)
      for (int64_t i = 0; i < width; ++i)
        panels[column * k + d * width + i] = column + i < n ? weight[(column + i) * k + d] : 0.0f;
}

void unpack(const void* packed, int64_t n, int64_t k, void* numbers, half_t*) {
  const int64_t width = isa_kernels().panel_width;
  const auto* const panels = static_cast<const float*>(packed);
  auto* const weight = static_cast<float*>(numbers);
#pragma omp parallel for schedule(static) if (n * k > kSerialElements)
  for (int64_t row = 0; row < n; ++row)
    for (int64_t d = 0; d < k; ++d) weight[row * k + d] = panels[(row / width * k + d) * width + row % width];
}

constexpr WeightLayout kLayout{bytes, pack, unpack};

bool supports(const Product& p) { return p.a == DType::fp32 && p.b == &formats::fp32 && p.c == DType::fp32; }

Operand run(Context<Cpu>&, const Product& product, const CpuData& data) {
  data.a.as<float>();  // or an error
  isa_kernels().panel_product(product, data);
  return Operand::of(static_cast<float*>(data.c));
}

}  // namespace

const CpuKernel float_panels{"panels of ftbert's own", kPlainParts, supports, run, &kLayout};

}  // namespace ftbert
