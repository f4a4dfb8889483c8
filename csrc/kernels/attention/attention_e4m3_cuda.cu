// The kernels that store E4M3: those of warpgroups. A file of its own, since attention's are the longest to compile.
#include <array>

#include "kernels/attention/attention_hopper.cuh"

namespace ftbert {
namespace {

template <class Kernel>
struct ToE4m3 : Kernel {
  static constexpr bool has(int64_t head_size) { return is_common_head(head_size) && Kernel::has(head_size); }
};
template <class T, class... Kernels>
constexpr auto to_e4m3_list(KernelList<Kernels...>) {
  return std::array{registered<ToE4m3<Kernels>, T, E4m3Rows>()...};
}

}  // namespace

template <class T>
std::span<const AttentionKernel<T>> e4m3_kernels() {
  static constexpr auto kAll = to_e4m3_list<T>(HopperKernels());
  return kAll;
}

template std::span<const AttentionKernel<half_t>> e4m3_kernels<half_t>();
template std::span<const AttentionKernel<bfloat16_t>> e4m3_kernels<bfloat16_t>();

}  // namespace ftbert
