// Which formats of weights are computed: on GPUs by the table of formats, on the CPU by the registry of its kernels.
#include <string>

#include "core/check.h"
#include "gemm/cpu/kernel.h"
#include "gemm/gemm.h"
#include "kernels/isa.h"

namespace ftbert {
namespace {

// Beside a matrix with scales a GPU's stream has 16 bits, beside another the matrix's type.
bool is_beside(DeviceKind device, DType stream, const Format& weight) {
  if (device == DeviceKind::cpu) return stream == DType::fp32;
  return weight.block == kNoScales ? stream == weight.numbers : is_16_bit(stream);
}

bool is_computed(DeviceKind device, const Format& weight) {
  return device == DeviceKind::cpu ? kernel_for(weight) != nullptr : weight.first_gpu != INT_MAX;
}

// "fp32, bf16, int8 or q8_0"
std::string formats_beside(DeviceKind device, DType stream) {
  std::string known;
  const Format* last = nullptr;
  for (const Format* format : all_formats()) {
    if (!is_computed(device, *format) || !is_beside(device, stream, *format)) continue;
    if (last) known += (known.empty() ? "" : ", ") + std::string(last->name);
    last = format;
  }
  return known + (known.empty() ? "" : " or ") + std::string(last ? last->name : "none");
}

// Of what a GPU computes instead of fp8, int8 or bf16.
std::string instead(const Gpu& gpu) {
  const auto has = [&gpu](const Format& format) { return gpu.capability >= format.first_gpu; };
  return std::string(has(formats::int8) ? "int8, " : "") + "fp16 or " + (has(formats::bf16) ? "bf16" : "fp32");
}

std::string no_product(DeviceKind device, DType stream, const Format& weight) {
  return std::string("no product on ") + (device == DeviceKind::cpu ? "cpu" : "cuda") + " multiplies " +
         std::string(to_string(stream)) + " by a matrix stored as " + std::string(weight.name);
}

}  // namespace

void check_format_exists(DeviceKind device, const Gpu& gpu, DType stream, const Format& format) {
  const bool cpu = device == DeviceKind::cpu;
  const auto none = [&] { return no_product(device, stream, format); };
  const char* const lacking = cpu ? lacking_for(format) : nullptr;
  FTBERT_CHECK(!lacking, none(), " without ", lacking ? lacking : "", "; this CPU has ", cpu_isa(),
               ": load the model in fp32");
  FTBERT_CHECK(is_computed(device, format), none(), "; expected one in ", formats_beside(device, stream));
  FTBERT_CHECK(cpu || gpu.capability >= format.first_gpu, none(), " on a GPU of compute capability ",
               capability_text(gpu), "; expected ", capability_text(format.first_gpu), " or above: load the model in ",
               instead(gpu));
  FTBERT_CHECK(is_beside(device, stream, format), none(), "; expected ",
               cpu                         ? "fp32"
               : format.block == kNoScales ? format.name
                                           : "fp16 or bf16",
               " beside it");
}

void check_product_exists(DeviceKind device, const Gpu& gpu, DType stream, const Matrix& weight, const float* input) {
  const Format& format = *weight.format;
  check_format_exists(device, gpu, stream, format);
  const auto none = [&] { return no_product(device, stream, format); };
  if (format.block == kNoScales) {
    FTBERT_CHECK(!weight.scale && !input, "no product on ", device == DeviceKind::cpu ? "cpu" : "cuda",
                 " reads the scales of a matrix in ", format.name, " or of its other operand");
    return;
  }
  FTBERT_CHECK((weight.scale == nullptr) == format.inside && (input == nullptr) == (format.other == nullptr), none(),
               " with other scales than it reads; expected those of the matrix ",
               format.inside ? "among its numbers" : "beside it", ", and of its other operand ",
               format.other ? "those of " : "none", format.other ? format.other->name : "");
  const std::string size = format.other_size(weight.n, weight.k, device == DeviceKind::cuda);
  FTBERT_CHECK(size.empty(), none(), " of [", weight.n, ", ", weight.k, "]; expected ", size);
}

}  // namespace ftbert
