// numbers, scales = Q8_1 of x.
#include "device/parallel_cpu.h"
#include "kernels/elementwise/q8_1_row.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {

void quantise_q8_1(const float* x, int64_t rows, int64_t cols, int8_t* numbers, float* scales) {
  const int64_t blocks = rows * cols / kQ8Block;
#pragma omp parallel for schedule(static) if (rows * cols > kSerialElements)
  for (int64_t block = 0; block < blocks; ++block)
    store_q8_1_block(x + block * kQ8Block, numbers + block * kQ8Block, scales + block);
}

}  // namespace ftbert::FTBERT_ISA
