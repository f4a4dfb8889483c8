// The table of one instruction set's kernels.
#include "device/amx.h"
#include "kernels/attention/attention_formats_cpu.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {

#define FTBERT_DECLARE(name) decltype(ftbert::name<Cpu, float>) name;
FTBERT_ISA_KERNELS(FTBERT_DECLARE)
void pack_panels(const float* weight, int64_t n, int64_t k, float* panels);
void panel_product(const PanelProduct& product);

extern const IsaKernels kernels;
constexpr bool kTiles =
#ifdef FTBERT_AMX
    true;
#else
    false;
#endif
const IsaKernels kernels{
#define FTBERT_ENTRY(name) .name = name,
    FTBERT_ISA_KERNELS(FTBERT_ENTRY).panel_width = kPanelWidth, .pack_panels = pack_panels,
    .panel_product = panel_product, .bf16 = kBf16Pairs, .tiles = kTiles};

}  // namespace ftbert::FTBERT_ISA
