// How one matrix product is run by cuBLASLt: the key that describes it, the plan chosen for it, the plans of a device.
#pragma once
#include <cublasLt.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

#include "core/types.h"

namespace ftbert {

// Row-major C [m, n] = A [m, k] @ B^T (B [n, k]) or A @ B (B [k, n]), `batch` times. Everything an algorithm's fitness
// depends on, so two products with equal keys may share a plan.
struct GemmKey {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  int64_t workspace = 0;  // bytes that an algorithm may use
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  DType dtype = DType::fp32;  // of A and B
  bool float_out = false;     // C is float whatever the dtype
  bool b_transposed = true;
  bool tf32 = false;
  uint16_t align_a = 0, align_b = 0, align_c = 0;  // bytes; align_c is the bias's too

  bool operator==(const GemmKey&) const = default;
};

struct GemmKeyHash {
  size_t operator()(const GemmKey& key) const;
};

// Plain structs, copied by value: a call sets its own bias pointer in its own copy, so threads may share a plan.
struct GemmPlan {
  bool supported = false;  // false: cuBLASLt has no algorithm for the key
  cublasLtMatmulDescOpaque_t operation{};
  cublasLtMatrixLayoutOpaque_t a{}, b{}, c{};
  cublasLtMatmulAlgo_t algorithm{};
};

struct GemmPlans {
  explicit GemmPlans(int device);
  GemmPlans(const GemmPlans&) = delete;
  GemmPlans& operator=(const GemmPlans&) = delete;

  // The plan of this key, made on first use.
  GemmPlan get(const GemmKey& key, const void* bias);

  cublasLtHandle_t handle = nullptr;
  std::atomic<bool> allow_tf32{false};
  // A tuned algorithm for a key, asked before cuBLASLt's heuristic. Set before the first product.
  std::function<std::optional<cublasLtMatmulAlgo_t>(const GemmKey&)> tuned;

 private:
  GemmPlan make(const GemmKey& key, const void* bias) const;

  std::shared_mutex mutex_;
  std::unordered_map<GemmKey, GemmPlan, GemmKeyHash> plans_;
};

// Throws Error naming the call and cuBLASLt's own words for the status.
void cublas_check(cublasStatus_t status, const char* call);

}  // namespace ftbert

#define FTBERT_CUBLAS_CHECK(call) ::ftbert::cublas_check((call), #call)
