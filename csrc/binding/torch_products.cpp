#include "binding/torch_products.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/bmm.h>
#include <omp.h>

#include "gemm/cpu/kernel.h"

namespace ftbert::binding {
namespace {

// While it lives this thread starts no others, whatever the environment says of nested parallel regions.
struct OneThread {
  const int before = omp_get_max_threads();
  OneThread() { omp_set_num_threads(1); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread() { omp_set_num_threads(before); }
};

}  // namespace

std::string torch_products_name() { return std::string(kernel_for(formats::fp32)->name); }

int64_t TorchProducts::rows(int64_t left) const {
  static const bool by_onednn = kernel_for(formats::fp32) == &onednn_kernel;
  if (!by_onednn) return left;
  // From 48 rows on a row costs the same to 10 % whatever the size, and from 96 on to 5 % (2 cores, n and k 384 to
  // 3072). So a remainder may be rounded up a little, or left for a product of its own.
  static constexpr int64_t kSizes[] = {768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1};
  int64_t up = 0;
  for (const int64_t size : kSizes) {
    if (size >= left && size <= left + kGemmRowSlack<Cpu>) up = size;
    if (size <= left) return up ? up : size;
  }
  return left;
}

auto TorchProducts::kept_at(const void* out) -> Kept& {
  for (auto& [known, kept] : kept_)
    if (known == out) return kept;
  return kept_.emplace_back(out, Kept()).second;
}

int64_t TorchProducts::threads() const { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void TorchProducts::each_alone(int64_t count, const std::function<void(int64_t i, CpuProducts& own)>& work) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a new thread would not know that the caller wants none
    const OneThread alone;
    for (int64_t i = begin; i < end; ++i) {
      TorchProducts own;
      work(i, own);
    }
  });
}

void TorchProducts::gemm(const Product& s, const float* a, const float* b, float* c) {
  at::Tensor result = float_view(c, {s.batch, s.m, s.n});
  const at::Tensor right =
      s.b_transposed ? float_view(b, {s.batch, s.n, s.k}).transpose(1, 2) : float_view(b, {s.batch, s.k, s.n});
  at::bmm_out(result, float_view(a, {s.batch, s.m, s.k}), right);
}

}  // namespace ftbert::binding
