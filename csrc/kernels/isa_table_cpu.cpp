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
void pack_panels(const float* weight, int64_t n, int64_t k, float* panels);
void panel_product(const PanelProduct& product);
void q8_0_product(const Q8Product& product);
void quantise_q8_1(const float* x, int64_t rows, int64_t cols, int8_t* numbers, float* scales);
int64_t int8_panel_bytes(int64_t n, int64_t k);
void pack_int8(const int8_t* weight, int64_t n, int64_t k, void* panels);
void unpack_int8(const void* panels, int64_t n, int64_t k, int8_t* weight);
void int8_product(const Int8Product& product);
void int8_product_by_tiles(const Int8Product& product);

namespace {

constexpr IsaKernels plain_kernels() {
  return {
#define FTBERT_ENTRY(name) .name = name,
      FTBERT_ISA_KERNELS(FTBERT_ENTRY).attention = attention,
      .softmax = softmax,
      .panel_width = kPanelWidth,
      .pack_panels = pack_panels,
      .panel_product = panel_product,
      .q8_0_product = q8_0_product,
      .quantise_q8_1 = quantise_q8_1,
      .bf16 = kBf16Pairs,
#ifdef FTBERT_INT8
      .int8 = simd::kLanes == 16 ? "avx512_vnni" : "avx_vnni",
      .int8_panel_bytes = int8_panel_bytes,
      .pack_int8 = pack_int8,
      .unpack_int8 = unpack_int8,
      .int8_product = int8_product,
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
