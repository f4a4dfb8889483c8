// How one matrix product is run by cuBLASLt: the key that describes it, the plan chosen for it, the plans of a device.
#pragma once
#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/types.h"
#include "gemm/tuner/tuner.h"

namespace ftbert {

// Row-major C [m, n] = A [m, k] @ B^T (B [n, k]) or A @ B (B [k, n]), `batch` times. Everything an algorithm's fitness
// depends on, so two products with equal keys may share a plan.
struct GemmKey {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  int64_t workspace = 0;  // bytes that an algorithm may use
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  Activation after = Activation::none;  // what add_bias_act does to a product of cuBLASLt, and a fused one itself
  DType dtype = DType::fp32;            // of A and B
  bool float_out = false;               // C is float whatever the dtype
  bool layernorm = false;  // asks for a product that contains the LayerNorm behind it, and for nothing else
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
  int fused = -1;  // not cuBLASLt, but this variant of gemm_fused.h
  int norm = -1;   // nor that, but this variant of gemm_layernorm.h
};

struct GemmPlans {
  explicit GemmPlans(int device);
  GemmPlans(const GemmPlans&) = delete;
  GemmPlans& operator=(const GemmPlans&) = delete;

  // The plan of this key, made on first use: the tuned table's algorithm; where it has none guess_gemm's, else
  // cuBLASLt's first proposal.
  GemmPlan get(const GemmKey& key, const void* bias);

  // Replaces the tuned table; plans made so far are forgotten.
  void set_table(const std::vector<TunedGemm>& rows);

  // A plan without its algorithm. By value below: cuBLASLt takes descriptors as non-const pointers.
  static GemmPlan describe(const GemmKey& key, const void* bias);
  // What cuBLASLt proposes for a described plan, best guess first.
  std::vector<cublasLtMatmulHeuristicResult_t> propose(const GemmKey& key, GemmPlan plan, int most) const;
  // Whether cuBLASLt can run this algorithm for the plan within the key's workspace; result: its own figures.
  bool accepts(const GemmKey& key, GemmPlan plan, const cublasLtMatmulAlgo_t& algorithm,
               cublasLtMatmulHeuristicResult_t* result = nullptr) const;

  cublasLtHandle_t handle = nullptr;

 private:
  using Rows = std::map<int64_t, TunedGemm>;  // by the last m
  // dtype, epilogue, after, layernorm, n, k
  using Table = std::map<std::tuple<DType, cublasLtEpilogue_t, Activation, bool, int64_t, int64_t>, Rows>;

  static const TunedGemm* row_of(const GemmKey& key, const Table& table);
  bool follows(const GemmKey& key, const TunedGemm& row, GemmPlan& plan) const;
  GemmPlan make(const GemmKey& key, const void* bias, const Table& table) const;

  int capability_ = 0, sm_count_ = 0, shared_bytes_ = 0;
  std::shared_mutex mutex_;
  std::unordered_map<GemmKey, GemmPlan, GemmKeyHash> plans_;
  std::shared_ptr<const Table> table_ = std::make_shared<Table>();
};

// The part of a linear layer's epilogue that cuBLASLt computes exactly as we would.
struct FusedEpilogue {
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  bool whole = false;  // nothing is left for add_bias_act
};
FusedEpilogue fuse_epilogue(bool bias, Activation activation, DType dtype);

// Throws Error naming the call and cuBLASLt's own words for the status.
void cublas_check(cublasStatus_t status, const char* call);

}  // namespace ftbert

#define FTBERT_CUBLAS_CHECK(call) ::ftbert::cublas_check((call), #call)
