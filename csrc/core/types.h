// Devices, element types and activations: the words every other file uses.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace ftbert {

// Device tags. A kernel is a function template on <device tag, element type>, declared once in
// kernels/kernels.h and defined in <name>_cpu.cpp and <name>_cuda.cu; the linker chooses.
struct Cpu {};
struct Cuda {};

// 16-bit elements as plain storage, so that no CUDA header is needed above the kernels.
struct half_t {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};

enum class DeviceKind { cpu, cuda };
enum class DType { fp32, fp16, bf16, e4m3, int8 };  // e4m3, int8: of stored matrices
constexpr int64_t bytes_of(DType dtype) {           // an element
  return dtype == DType::fp32 ? 4 : dtype == DType::fp16 || dtype == DType::bf16 ? 2 : 1;
}
template <class T>
inline constexpr DType kDType = DType::fp32;  // of float
template <>
inline constexpr DType kDType<half_t> = DType::fp16;
template <>
inline constexpr DType kDType<bfloat16_t> = DType::bf16;

enum class Activation { none, gelu_erf, gelu_tanh, relu, silu, tanh };
enum class PositionKind {
  none,          // no position table (relative bias only)
  absolute,      // the token's column in the padded input
  from_padding,  // padding_id + number of non-padding ids up to and including the token (RoBERTa, MPNet)
};
enum class PoolingMode { cls, mean, max, mean_sqrt_len, last };

// Parse the names used in configs and ops; throw ftbert::Error listing what is supported.
Activation parse_activation(std::string_view name);
PoolingMode parse_pooling(std::string_view name);
DType parse_dtype(std::string_view name);
std::string_view to_string(Activation activation);
std::string_view to_string(DType dtype);

}  // namespace ftbert
