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
// The last two are how a matrix may be stored; nothing computes in them (check_computed in gemm/gemm.h).
enum class DType { fp32, fp16, bf16, e4m3, int8 };
template <class T>
inline constexpr DType kDType = DType::fp32;  // of float
template <>
inline constexpr DType kDType<half_t> = DType::fp16;
template <>
inline constexpr DType kDType<bfloat16_t> = DType::bf16;

// Of one element.
constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::fp32: return 4;
    case DType::fp16:
    case DType::bf16: return 2;
    case DType::e4m3:
    case DType::int8: return 1;
  }
  return 0;
}

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
DType parse_dtype(std::string_view name);  // of those that ftbert computes in
std::string_view to_string(Activation activation);
std::string_view to_string(DType dtype);
std::string_view to_string(DeviceKind device);

}  // namespace ftbert
