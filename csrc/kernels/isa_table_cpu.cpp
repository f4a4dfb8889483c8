// The table of one instruction set's kernels.
#include <type_traits>

#include "device/amx.h"
#include "device/int8_products.h"
#include "kernels/attention/attention_formats_cpu.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {

#define FTBERT_DECLARE(name) decltype(ftbert::name<Cpu, float>) name;
FTBERT_ISA_KERNELS(FTBERT_DECLARE)
std::remove_pointer_t<decltype(IsaKernels::attention)> attention;
std::remove_pointer_t<decltype(IsaKernels::softmax)> softmax;
std::remove_pointer_t<decltype(IsaKernels::max_sim)> max_sim;
std::remove_pointer_t<decltype(IsaKernels::max_sim_scratch_bytes)> max_sim_scratch_bytes;
void panel_product(const Product& product, const CpuData& data);
void q8_0_product(const Product& product, const CpuData& data);
void int8_product(const Product& product, const CpuData& data);
void int8_product_by_tiles(const Product& product, const CpuData& data);

namespace {

constexpr IsaKernels plain_kernels() {
  return {
#define FTBERT_ENTRY(name) .name = name,
      FTBERT_ISA_KERNELS(FTBERT_ENTRY).attention = attention,
      .softmax = softmax,
      .max_sim = max_sim,
      .max_sim_scratch_bytes = max_sim_scratch_bytes,
      .panel_product = panel_product,
      .q8_0_product = q8_0_product,
#ifdef FTBERT_INT8
      .int8_product = int8_product,
#endif
      .panel_width = kPanelWidth,
      .bf16 = kBf16Pairs,
#if defined(FTBERT_VNNI)
      .int8 = simd::kLanes == 16 ? "avx512_vnni" : "avx_vnni",
#elif defined(FTBERT_INT8)
      .int8 = "avx2",
#endif
  };
}

// Those of a set with AMX, as compiled for it.
constexpr IsaKernels kernels_by_tiles() {
  IsaKernels made = plain_kernels();
#ifdef FTBERT_AMX
  made.tiles = true;
  made.int8 = "amx_int8";
  made.int8_product = int8_product_by_tiles;
#endif
  return made;
}

}  // namespace

extern const IsaKernels kernels, tile_kernels;
constexpr IsaKernels kernels = plain_kernels(), tile_kernels = kernels_by_tiles();

}  // namespace ftbert::FTBERT_ISA
