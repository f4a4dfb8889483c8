// The way of an int8 weight into panels and back.
#include "device/int8_products.h"
#ifdef FTBERT_INT8
#include <algorithm>
#include <cstring>

#include "device/parallel_cpu.h"
#include "gemm/cpu/int8_panels.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {

int64_t int8_panel_bytes(int64_t n, int64_t k) { return int8_panels(n) * int8_bytes_of_panel(k); }

void pack_int8(const int8_t* weight, int64_t n, int64_t k, void* panels) {
  const int64_t bytes = int8_bytes_of_panel(k);
#pragma omp parallel for schedule(static) if (n * k > kSerialElements)
  for (int64_t panel = 0; panel < int8_panels(n); ++panel) {
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

void unpack_int8(const void* panels, int64_t n, int64_t k, int8_t* weight) {
  const int64_t bytes = int8_bytes_of_panel(k);
#pragma omp parallel for schedule(static) if (n * k > kSerialElements)
  for (int64_t row = 0; row < n; ++row) {
    const auto* const from = static_cast<const int8_t*>(panels) + row / kInt8Width * bytes;
    for (int64_t d = 0; d < k; ++d) weight[row * k + d] = from[int8_place(row % kInt8Width, d)];
  }
}

}  // namespace ftbert::FTBERT_ISA
#endif
