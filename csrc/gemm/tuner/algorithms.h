// cuBLASLt's algorithms: what one says of itself, and all that it accepts for a product.
#pragma once
#include <cublasLt.h>

#include <vector>

#include "gemm/plans.h"
#include "gemm/tuner/tuner.h"

namespace ftbert {

GemmAlgorithm describe_algorithm(const cublasLtMatmulAlgo_t& algorithm, const cublasLtMatmulHeuristicResult_t& result);
// A variant of gemm_layernorm.h, or of gemm_fused.h.
GemmAlgorithm describe_algorithm(int variant, bool norm);
// The algorithm that a GemmAlgorithm of cuBLASLt's stands for.
cublasLtMatmulAlgo_t cublas_algorithm(const GemmAlgorithm& algorithm);

// Every algorithm with every setting that cuBLASLt accepts for a described plan.
std::vector<GemmAlgorithm> accepted_algorithms(const GemmPlans& plans, const GemmKey& key, const GemmPlan& plan);

}  // namespace ftbert
