// Which storage types of weights are computed: the one place that knows.
#include <string>

#include "core/check.h"
#include "gemm/gemm.h"
#include "kernels/isa.h"

namespace ftbert {
namespace {

// What wgmma_tile and wgmma_persistent compute: cuBLASLt has no such scales, or no result in E4M3.
void check_e4m3(int capability, DType stream, const Matrix& weight, const std::optional<InputScale>& input) {
  constexpr auto kWhat = " by a matrix stored as e4m3", kNone = "no product on cuda multiplies ";
  FTBERT_CHECK(capability == 90, kNone, to_string(stream), kWhat, " on a GPU of compute capability ", capability / 10,
               ".", capability % 10, "; expected Hopper's 9.0: load the model in fp16 or bf16");
  FTBERT_CHECK(stream == DType::fp16 || stream == DType::bf16, kNone, to_string(stream), kWhat,
               "; expected fp16 or bf16 beside it");
  FTBERT_CHECK(
      weight.scale && weight.per != Granularity::none && input && input->scale && input->per == Granularity::tensor,
      kNone, to_string(stream), kWhat,
      " without scales; expected one of the matrix or one for each row, and one of its other operand");
  FTBERT_CHECK(weight.n % 16 == 0 && weight.k % 16 == 0, kNone, to_string(stream), kWhat, " of [", weight.n, ", ",
               weight.k, "]; expected multiples of 16");
}

// What int8_product computes: sums of byte rows and int8.
void check_int8(DType stream, const Matrix& weight, const std::optional<InputScale>& input) {
  constexpr auto kNone = "no product on cpu multiplies ", kWhat = " by a matrix stored as int8";
  constexpr int64_t kFewestDepth = 16;  // a byte row takes the place of as many floats
  FTBERT_CHECK(isa_kernels().int8, kNone, to_string(stream), kWhat, " where the CPU has no instructions for it (",
               cpu_isa(), "); expected AVX-512 VNNI, AVX-VNNI or AMX: load the model in fp32");
  FTBERT_CHECK(stream == DType::fp32, kNone, to_string(stream), kWhat, "; expected fp32 beside it");
  FTBERT_CHECK(weight.scale && weight.per == Granularity::row && input && input->per == Granularity::beside, kNone,
               to_string(stream), kWhat, " without scales; expected one for each row, and byte rows as other operand");
  FTBERT_CHECK(weight.k >= kFewestDepth && weight.k <= kMostInt8Depth, kNone, to_string(stream), kWhat, " of [",
               weight.n, ", ", weight.k, "]; expected ", kFewestDepth, " to ", kMostInt8Depth, " columns");
}

// Numbers in blocks with scales, beside a stream of which blocks are stored alike on the CPU (q8_0_product), or as they
// are on a GPU (few_rows and wgmma_q8_0 on Hopper; else made 16-bit before each product).
void check_q8_0(DeviceKind device, int capability, DType stream, const Matrix& weight,
                const std::optional<InputScale>& input) {
  constexpr int kAmpere = 80;
  constexpr auto kWhat = " by a matrix stored as q8_0";
  const bool cpu = device == DeviceKind::cpu;
  const std::string none = std::string("no product on ") + (cpu ? "cpu" : "cuda") + " multiplies ";
  FTBERT_CHECK(cpu || capability >= kAmpere, none, to_string(stream), kWhat, " on a GPU of compute capability ",
               capability / 10, ".", capability % 10, "; expected 8.0 or above: load the model in fp16");
  FTBERT_CHECK(cpu ? stream == DType::fp32 : stream == DType::fp16 || stream == DType::bf16, none, to_string(stream),
               kWhat, "; expected ", cpu ? "fp32" : "fp16 or bf16", " beside it");
  FTBERT_CHECK(weight.per == Granularity::block && !input, none, to_string(stream), kWhat,
               " without scales of blocks, or with one of its other operand");
  FTBERT_CHECK(weight.n % kQ8TileRows == 0 && weight.k % kQ8TileDepth == 0, none, to_string(stream), kWhat, " of [",
               weight.n, ", ", weight.k, "]; expected multiples of ", kQ8TileRows, " and ", kQ8TileDepth);
}

}  // namespace

void check_product_exists(DeviceKind device, int capability, DType stream, const Matrix& weight,
                          const std::optional<InputScale>& input) {
  const bool cpu = device == DeviceKind::cpu;
  if (weight.dtype == DType::q8_0) return check_q8_0(device, capability, stream, weight, input);
  if (!cpu && weight.dtype == DType::e4m3) return check_e4m3(capability, stream, weight, input);
  if (cpu && weight.dtype == DType::int8) return check_int8(stream, weight, input);
  const bool exists =
      cpu ? stream == DType::fp32 && (weight.dtype == DType::fp32 || weight.dtype == DType::bf16)
          : weight.dtype == stream && (stream == DType::fp32 || stream == DType::fp16 || stream == DType::bf16);
  FTBERT_CHECK(exists, "no product on ", cpu ? "cpu" : "cuda", " multiplies ", to_string(stream),
               " by a matrix stored as ", to_string(weight.dtype), "; expected ",
               cpu ? "matrices in fp32 or bf16, or int8 with scales, beside fp32"
                   : "matrices of the same type, fp32, fp16 or bf16, or e4m3 with scales");
  FTBERT_CHECK(weight.per == Granularity::none && !input, "no product on ", cpu ? "cpu" : "cuda",
               " reads the scales of a matrix in ", to_string(weight.dtype), " or of its other operand");
}

}  // namespace ftbert
