// How one product is run on a GPU: by a kernel of ours or by an algorithm of cuBLASLt; the plans of a device.
#pragma once
#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "core/types.h"
#include "gemm/gpu/own.h"
#include "gemm/product.h"
#include "gemm/table.h"

namespace ftbert {

// Everything an algorithm's fitness depends on, so two products with equal keys may share a plan. A product that is
// more than Product::alone asks for a kernel of ours that does all of it, and for nothing else.
struct PlanKey {
  Product product;
  int64_t workspace = 0;  // bytes that an algorithm may use
  bool tf32 = false;
  uint16_t align_a = 0, align_b = 0, align_c = 0;  // bytes; align_c is the bias's too
  bool in_step = false;                            // of generation: products of few rows stand on both sides
  bool cached = false;  // with heads: the kernel of their own runs in any case, to store keys and values

  bool operator==(const PlanKey&) const = default;
};

struct ProductHash {
  size_t operator()(const Product& product) const;
};
struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const;
};

// The part of a product's epilogue that cuBLASLt computes exactly as we would, and what add_bias_act or add_bias_gate
// does afterwards.
struct CublasEpilogue {
  cublasLtEpilogue_t inside = CUBLASLT_EPILOGUE_DEFAULT;
  bool bias = false;  // is in `inside`
  Epilogue after = {};
};
CublasEpilogue cublas_epilogue(const Product& product);

// Plain structs, copied by value: a call sets its own bias pointer in its own copy, so threads may share a plan.
struct Plan {
  bool supported = false;  // false: cuBLASLt has no algorithm for the key
  bool by_row = false;     // a table has a row for it
  OwnChoice own = {};      // if there is none:
  CublasEpilogue epilogue = {};
  cublasLtMatmulDescOpaque_t operation{};
  cublasLtMatrixLayoutOpaque_t a{}, b{}, c{};
  cublasLtMatmulAlgo_t algorithm{};
};

struct ProductPlans {
  explicit ProductPlans(int device);
  ProductPlans(const ProductPlans&) = delete;
  ProductPlans& operator=(const ProductPlans&) = delete;

  // The plan of this key, made on first use: the tuned table's choice; where it has none guess_product's, else
  // cuBLASLt's first proposal. The bias is any of the key's alignment.
  Plan get(const PlanKey& key, const void* bias);
  // Its kernel of ours, without a copy of the plan.
  OwnChoice own(const PlanKey& key, const void* bias);

  // Replaces the tuned table; plans made so far are forgotten.
  void set_table(const std::vector<TunedRow>& rows);

  // A plan without its algorithm. By value below: cuBLASLt takes descriptors as non-const pointers.
  static Plan describe(const PlanKey& key, const CublasEpilogue& epilogue, const void* bias);
  // What cuBLASLt proposes for a described plan, best guess first.
  std::vector<cublasLtMatmulHeuristicResult_t> propose(const PlanKey& key, Plan plan, int most) const;
  // Whether cuBLASLt can run this algorithm for the plan within the key's workspace.
  bool accepts(const PlanKey& key, Plan plan, const cublasLtMatmulAlgo_t& algorithm) const;
  // Launches a supported plan of cuBLASLt's, without what is done afterwards: with a gate data.c is [m, n].
  void run(const PlanKey& key, Plan plan, const ProductData& data, void* workspace, void* stream) const;

  cublasLtHandle_t handle = nullptr;

 private:
  using Table = std::unordered_map<Product, std::map<int64_t, TunedRow>, ProductHash>;  // rows by their last m

  static const TunedRow* row_of(const Product& product, const Table& table);
  bool follows(const PlanKey& key, const TunedRow& row, Plan& plan) const;
  Plan make(const PlanKey& key, const CublasEpilogue& epilogue, const void* bias, const Table& table) const;
  OwnChoice whole(const PlanKey& key, const void* bias);

  Gpu gpu_;
  std::shared_mutex mutex_;
  std::unordered_map<PlanKey, Plan, PlanKeyHash> plans_;
  std::shared_ptr<const Table> table_ = std::make_shared<Table>();
};

// cuBLASLt's name of a type.
cudaDataType_t cuda_type(DType dtype);

// Throws Error naming the call and cuBLASLt's own words for the status.
void cublas_check(cublasStatus_t status, const char* call);

}  // namespace ftbert

#define FTBERT_CUBLAS_CHECK(call) ::ftbert::cublas_check((call), #call)
