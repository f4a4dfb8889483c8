// A call's products on the CPU, by libraries that PyTorch carries.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <list>
#include <string>
#include <utility>
#include <vector>

#include "binding/visible.h"
#include "gemm/gemm.h"

namespace ftbert::binding {

// One call's: at::bmm for products of two activations, ATen's threads, and the results that oneDNN keeps.
class FTBERT_VISIBLE TorchProducts : public CpuProducts {
 public:
  // Memory of oneDNN's that stands in for `out` until the next product into the same `out`. As the data of an opaque
  // operand: rows [i * chunk_rows, (i + 1) * chunk_rows) lie in tensors[i], as threads left them.
  struct Kept {
    std::vector<at::Tensor> tensors;
    int64_t chunk_rows = 0;
  };

  // One of a few sizes where oneDNN multiplies by weights in float: a kernel that oneDNN compiles for an m takes 0.8 MB
  // and 0.3-0.7 ms (measured). In bf16 each thread takes an equal number of these rows.
  int64_t rows(int64_t left) const override;
  void gemm(const Product& product, const float* a, const float* b, float* c) override;
  int64_t threads() const override;
  void each_alone(int64_t count, const std::function<void(int64_t i, CpuProducts& own)>& work) override;
  Kept& kept_at(const void* out);

 private:
  std::list<std::pair<const void*, Kept>> kept_;  // operands point into it
};

// oneDNN through ATen's dispatcher, with weights repacked once at load: 220 GFLOP/s from m=32 up on two Zen 4 cores,
// where at::linear (MKL) gives 120-200, and 430 with weights packed in bf16, where a product's operands are rounded and
// its sums are not. In float not on AVX2.
extern const CpuKernel onednn_kernel;
at::Tensor pack_for_onednn(const at::Tensor& weight);

std::string torch_products_name();  // of weights in float

inline at::Tensor float_view(const float* data, at::IntArrayRef sizes) {
  return at::from_blob(const_cast<float*>(data), sizes, at::TensorOptions().dtype(at::kFloat));
}

}  // namespace ftbert::binding
