// The CPU's matrix products, by the library that PyTorch already carries.
#pragma once
#include <ATen/core/Tensor.h>

#include <list>
#include <string>
#include <utility>
#include <vector>

#include "binding/visible.h"
#include "gemm/gemm.h"

namespace ftbert::binding {

// oneDNN through ATen's dispatcher, with weights repacked once at load: 220 GFLOP/s from m=32 up on two Zen 4 cores,
// where at::linear (MKL) gives 120-200, and 430 with weights packed in bf16, where a product's operands are rounded and
// its sums are not. On AVX2, and without oneDNN in this PyTorch: panels of our own (gemm/cpu/panel_product_cpu.cpp).
class FTBERT_VISIBLE TorchProducts : public CpuProducts {
 public:
  // One of a few sizes, of which in bf16 a thread may take its share: a kernel that oneDNN compiles for an m takes 0.8
  // MB and 0.3-0.7 ms (measured).
  int64_t rows(int64_t left) const override;
  Operand linear(const Linear<float>& linear, const Operand& a, int64_t m, Epilogue epilogue, const Operand& out,
                 bool in_one_piece) override;
  void gemm(const Product& product, const float* a, const float* b, float* c) override;
  int64_t threads() const override;
  void each_alone(int64_t count, const std::function<void(int64_t i, CpuProducts& own)>& work) override;

 private:
  // Memory of oneDNN's that stands in for `out` until the next product into the same `out`. As the data of an opaque
  // operand: rows [i * chunk_rows, (i + 1) * chunk_rows) lie in tensors[i], as threads left them.
  struct Kept {
    std::vector<at::Tensor> tensors;
    int64_t chunk_rows = 0;
  };
  Kept& kept_at(const void* out);
  Operand linear_bf16(const Linear<float>& linear, const Operand& a, int64_t m, Epilogue epilogue, const Operand& out,
                      bool in_one_piece);

  std::list<std::pair<const void*, Kept>> kept_;  // operands point into it
};

// weight [n, k], fp32, bf16 or int8 -> what TorchProducts multiplies by: oneDNN's blocked layout, panels [n / width, k,
// width] of floats, or the bytes of int8's panels.
FTBERT_VISIBLE at::Tensor pack_weight(const at::Tensor& weight);
bool is_packed(const at::Tensor& weight);
bool has_shape(const at::Tensor& weight, at::IntArrayRef shape);            // packed or not
at::Tensor unpack_weight(const at::Tensor& packed, at::IntArrayRef shape);  // [n, k]
std::string torch_products_name();

}  // namespace ftbert::binding
