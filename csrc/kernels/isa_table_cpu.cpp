// The table of one instruction set's kernels.
#include "kernels/attention_formats_cpu.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {

#define FTBERT_DECLARE(name) decltype(ftbert::name<Cpu, float>) name;
FTBERT_ISA_KERNELS(FTBERT_DECLARE)

extern const IsaKernels kernels;
const IsaKernels kernels{
#define FTBERT_ENTRY(name) .name = name,
    FTBERT_ISA_KERNELS(FTBERT_ENTRY).bf16 = kBf16Pairs};

}  // namespace ftbert::FTBERT_ISA
