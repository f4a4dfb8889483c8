// One matrix product, described: the key of plans and of tables, what the tuner measures, what our kernels are asked.
#pragma once
#include <cstdint>

#include "core/operand.h"
#include "core/types.h"

namespace ftbert {

// What is done to the float sums before they are stored.
struct Epilogue {
  bool bias = false;
  Activation activation = Activation::none;  // after the bias
  bool residual_norm = false;                // c = LayerNorm(sums + bias + c) * gamma + beta
  bool operator==(const Epilogue&) const = default;
};

// Row-major c [m, n] = epilogue(a [m, k] @ b^T), b [n, k]; or a @ b, b [k, n]; `batch` of them, each behind the other.
struct Product {
  int64_t m = 0, n = 0, k = 0;
  DType a = DType::fp32, b = DType::fp32, c = DType::fp32;  // as stored
  Epilogue epilogue;
  int64_t batch = 1;
  bool b_transposed = true;  // b is [n, k]
  bool operator==(const Product&) const = default;
};

// A weight [n, k], stored as it is stored.
struct Matrix {
  const void* data = nullptr;    // [n, k] row-major; nullptr where only `packed` is kept
  DType dtype = DType::fp32;     // of data, or of what was packed
  const void* packed = nullptr;  // the layout of a CPU library (CpuProducts)
  int64_t n = 0, k = 0;
};

// A matrix and its bias; T is the residual stream's type.
template <class T>
struct Linear {
  Matrix weight;
  const T* bias = nullptr;  // [n] or nullptr
};

// A layer's product over m rows of the stream's own type. The bias counts where the layer has one.
template <class T>
Product product_of(const Linear<T>& linear, int64_t m, Epilogue epilogue) {
  epilogue.bias = epilogue.bias && linear.bias;
  return {m, linear.weight.n, linear.weight.k, kDType<T>, linear.weight.dtype, kDType<T>, epilogue};
}

}  // namespace ftbert
