// The CPU's matrix products, by the library that PyTorch already carries.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "gemm/gemm.h"

namespace ftbert::binding {

// oneDNN through ATen's dispatcher, with weights repacked once at load: 220 GFLOP/s from m=32 up on two Zen 4 cores,
// where at::linear (MKL) gives 120-200, and 430 with weights packed in bf16, where a product's operands are rounded and
// its sums are not. Without oneDNN in this PyTorch: at::linear on the plain weights.
class TorchGemm : public CpuGemm {
 public:
  // One of a few sizes, of which in bf16 a thread may take its share: a kernel that oneDNN compiles for an m takes 0.8
  // MB and 0.3-0.7 ms (measured).
  int64_t rows(int64_t left) const override;
  const float* linear(const Linear<float>& weights, const float* a, int64_t m, Epilogue epilogue, float* out) override;
  bool leaves_bf16(const Linear<float>& weights) const override;
  void gemm(const GemmShape& shape, const float* a, const float* b, float* c) override;
  int64_t threads() const override;
  void each_alone(int64_t count, const std::function<void(int64_t i, CpuGemm& own)>& work) override;

 private:
  // Rows of a product in bf16, a tensor of each thread that multiplies.
  struct Parts {
    int64_t m = 0, rows = 0;  // of all, and of each; the last may have fewer
    std::vector<at::Tensor> tensors;
  };
  const float* linear_bf16(const Linear<float>& weights, const float* a, int64_t m, Epilogue epilogue, float* out);
  at::Tensor& result_at(const float* place);
  Parts parts_of(const float* a, int64_t m);

  // oneDNN returns memory of its own; it stands in for `out` until the next product into the same `out`.
  std::vector<std::pair<const float*, at::Tensor>> results_;
  std::vector<std::pair<const float*, Parts>> left_;  // where the next product takes bf16
};

// weight [n, k], fp32 or bf16 -> what TorchGemm multiplies by: oneDNN's blocked layout, or panels [n / width, k,
// width].
at::Tensor pack_weight(const at::Tensor& weight);
bool is_packed(const at::Tensor& weight);
bool has_shape(const at::Tensor& weight, at::IntArrayRef shape);  // packed or not
at::Tensor unpack_weight(const at::Tensor& packed, int64_t n);    // [n, k]
std::string torch_gemm_name();

}  // namespace ftbert::binding
