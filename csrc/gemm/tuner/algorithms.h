// cuBLASLt's algorithms: what one says of itself, and all that it accepts for a product.
#pragma once
#include <cublasLt.h>

#include <vector>

#include "gemm/plans.h"
#include "gemm/tuner/tuner.h"

namespace ftbert {

Algorithm describe_algorithm(const cublasLtMatmulAlgo_t& algorithm, const cublasLtMatmulHeuristicResult_t& result);
Algorithm describe_algorithm(const OwnChoice& own);

// Every algorithm with every setting that cuBLASLt accepts for a described plan.
std::vector<Algorithm> accepted_algorithms(const ProductPlans& plans, const PlanKey& key, const Plan& plan);

}  // namespace ftbert
