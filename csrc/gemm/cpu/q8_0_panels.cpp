// Products by a weight in q8_0, which lies in panels.
#include <cstring>

#include "device/parallel_cpu.h"
#include "gemm/cpu/kernel.h"
#include "gemm/cpu/panels.h"
#include "kernels/isa.h"

namespace ftbert {
namespace {

constexpr uint8_t kTurned = 0x80;

// Where a block of a row begins, and in it number d.
int64_t block_at(int64_t row, int64_t block, int64_t k) {
  return (row / kQ8PanelRows * (k / kQ8Block) + block) * kQ8BlockBytes;
}
int64_t number_at(int64_t row, int64_t d) {
  return kQ8NumbersBehind + (d / 4 * kQ8PanelRows + row % kQ8PanelRows) * 4 + d % 4;
}

int64_t bytes(int64_t n, int64_t k) { return q8_0_panel_count(n) * (k / kQ8Block) * kQ8BlockBytes; }

void pack(const void* numbers, const half_t* scales, int64_t n, int64_t k, void* panels) {
  const auto* const values = static_cast<const int8_t*>(numbers);
  const int64_t blocks = k / kQ8Block, rows = q8_0_panel_count(n) * kQ8PanelRows;
#pragma omp parallel for schedule(static) if (n * k > kSerialElements)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      auto* const to = static_cast<uint8_t*>(panels) + block_at(row, block, k);
      const half_t scale = row < n ? scales[row * blocks + block] : half_t{0};
      std::memcpy(to + row % kQ8PanelRows * sizeof(scale), &scale, sizeof(scale));
      for (int64_t d = 0; d < kQ8Block; ++d) {
        const int8_t value = row < n ? values[row * k + block * kQ8Block + d] : int8_t{0};
        to[number_at(row, d)] = static_cast<uint8_t>(value) ^ kTurned;
      }
    }
  }
}

void unpack(const void* panels, int64_t n, int64_t k, void* numbers, half_t* scales) {
  auto* const values = static_cast<int8_t*>(numbers);
  const int64_t blocks = k / kQ8Block;
#pragma omp parallel for schedule(static) if (n * k > kSerialElements)
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const auto* const from = static_cast<const uint8_t*>(panels) + block_at(row, block, k);
      std::memcpy(&scales[row * blocks + block], from + row % kQ8PanelRows * sizeof(half_t), sizeof(half_t));
      for (int64_t d = 0; d < kQ8Block; ++d)
        values[row * k + block * kQ8Block + d] = static_cast<int8_t>(from[number_at(row, d)] ^ kTurned);
    }
  }
}

constexpr WeightLayout kLayout{bytes, pack, unpack};

bool supports(const Product& p) {
  return p.a == DType::fp32 && p.b == &formats::q8_0 && p.c == DType::fp32 && p.k % kQ8Block == 0;
}

Operand run(Context<Cpu>&, const Product& product, const CpuData& data) {
  data.a.as<float>();  // or an error
  isa_kernels().q8_0_product(product, data);
  return Operand::of(static_cast<float*>(data.c));
}

}  // namespace

const CpuKernel q8_0_panels{"panels of q8_0", kPlainParts, supports, run, &kLayout};

}  // namespace ftbert
