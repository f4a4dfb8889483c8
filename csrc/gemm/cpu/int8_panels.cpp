// Products of byte rows by a weight in int8, which lies in panels.
#include <algorithm>
#include <cstring>

#include "device/parallel_cpu.h"
#include "gemm/cpu/kernel.h"
#include "gemm/cpu/panels.h"
#include "kernels/isa.h"

namespace ftbert {
namespace {

int64_t bytes(int64_t n, int64_t k) { return int8_panel_count(n) * int8_bytes_of_panel(k); }

void pack(const void* numbers, const half_t*, int64_t n, int64_t k, void* panels) {
  const auto* const weight = static_cast<const int8_t*>(numbers);
  const int64_t bytes = int8_bytes_of_panel(k);
#pragma omp parallel for schedule(static) if (n * k > kSerialElements)
  for (int64_t panel = 0; panel < int8_panel_count(n); ++panel) {
    auto* const to = static_cast<int8_t*>(panels) + panel * bytes;
    std::memset(to, 0, bytes);
    int32_t sums[kInt8Width] = {};
    const int64_t column = panel * kInt8Width, columns = std::min(kInt8Width, n - column);
    for (int64_t i = 0; i < columns; ++i) {
      const int8_t* const row = weight + (column + i) * k;
      for (int64_t d = 0; d < k; ++d) {
        to[int8_place(i, d)] = row[d];
        sums[i] += row[d];
      }
    }
    std::memcpy(to + kInt8Width * int8_depth(k), sums, sizeof(sums));
  }
}

void unpack(const void* panels, int64_t n, int64_t k, void* numbers, half_t*) {
  auto* const weight = static_cast<int8_t*>(numbers);
  const int64_t bytes = int8_bytes_of_panel(k);
#pragma omp parallel for schedule(static) if (n * k > kSerialElements)
  for (int64_t row = 0; row < n; ++row) {
    const auto* const from = static_cast<const int8_t*>(panels) + row / kInt8Width * bytes;
    for (int64_t d = 0; d < k; ++d) weight[row * k + d] = from[int8_place(row % kInt8Width, d)];
  }
}

constexpr WeightLayout kLayout{bytes, pack, unpack};

const char* lacks() {
  return isa_kernels().int8 ? nullptr : "VNNI, AVX-VNNI or AMX (AVX2 counts where there is no AVX-512)";
}

bool supports(const Product& p) {
  return p.a == DType::uint8 && p.b == &formats::int8 && p.k <= kMostInt8Depth &&
         (p.c == DType::fp32 || (p.c == DType::bf16 && p.epilogue.gate == Gate::none));
}

Operand run(Context<Cpu>&, const Product& product, const CpuData& data) {
  data.a.byte_rows();  // or an error
  isa_kernels().int8_product(product, data);
  return {data.c, &plain_format(product.c)};
}

}  // namespace

const CpuKernel int8_panels{"panels of int8", kPlainParts, supports, run, &kLayout, lacks};

}  // namespace ftbert
