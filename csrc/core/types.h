// Devices, element types and activations: the words every other file uses.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

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
#define FTBERT_ENUMERATOR(name) name,
// Of numbers in memory. How matrices of them are stored, with scales: core/format.h.
#define FTBERT_DTYPES(X) X(fp32) X(fp16) X(bf16) X(e4m3) X(int8) X(uint8)
enum class DType { FTBERT_DTYPES(FTBERT_ENUMERATOR) };
constexpr bool is_16_bit(DType dtype) { return dtype == DType::fp16 || dtype == DType::bf16; }
constexpr int64_t bytes_of(DType dtype) { return dtype == DType::fp32 ? 4 : is_16_bit(dtype) ? 2 : 1; }  // an element
template <class T>
inline constexpr DType kDType = DType::fp32;  // of float
template <>
inline constexpr DType kDType<half_t> = DType::fp16;
template <>
inline constexpr DType kDType<bfloat16_t> = DType::bf16;

// All activations; what a new one needs besides: CONTRIBUTING.md.
#define FTBERT_ACTIVATIONS(X) X(none) X(gelu_erf) X(gelu_tanh) X(quick_gelu) X(relu) X(silu) X(tanh)
enum class Activation { FTBERT_ACTIVATIONS(FTBERT_ENUMERATOR) };
enum class PositionKind {
  none,          // no position table (relative bias, rotary positions)
  absolute,      // the token's column in the padded input
  from_padding,  // padding_id + number of non-padding ids up to and including the token (RoBERTa, MPNet)
};
#define FTBERT_POOLING_MODES(X) X(cls) X(mean) X(max) X(mean_sqrt_len) X(last)
enum class PoolingMode { FTBERT_POOLING_MODES(FTBERT_ENUMERATOR) };

// Parse the names used in configs and ops; throw ftbert::Error listing what is supported.
Activation parse_activation(std::string_view name);
PoolingMode parse_pooling(std::string_view name);
std::string_view to_string(Activation activation);
std::string_view to_string(DType dtype);

// Every spelling that parse_activation knows, and to_string of what it means.
std::vector<std::pair<std::string_view, std::string_view>> activation_spellings();

// On whichever side it is called. Inlined in any case: the CPU's kernels are compiled for several instruction sets, and
// a function that they shared by name would be linked once, with the instructions of either.
#ifdef __CUDACC__
#define FTBERT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FTBERT_HOST_DEVICE inline __attribute__((always_inline))
#endif

// run(std::integral_constant<Activation, activation>()), on the side that asks: an activation is a template argument of
// whatever applies it.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class Run>
FTBERT_HOST_DEVICE void with_activation(Activation activation, const Run& run) {
  switch (activation) {
#define FTBERT_CASE(name) \
  case Activation::name: return run(std::integral_constant<Activation, Activation::name>());
    FTBERT_ACTIVATIONS(FTBERT_CASE)
#undef FTBERT_CASE
  }
}

}  // namespace ftbert
