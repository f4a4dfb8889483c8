// What cuBLASLt's algorithms say of themselves, and which it accepts.
#include <algorithm>
#include <unordered_map>

#include "gemm/tuner/algorithms.h"

namespace ftbert {
namespace {

template <class V>
V config(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  V value{};
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), nullptr);
  return value;
}

// False: this algorithm does not know the attribute or the value.
template <class V>
bool configure(cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, V value) {
  return cublasLtMatmulAlgoConfigSetAttribute(&algorithm, attribute, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
}

template <class V>
V capability(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoCapAttributes_t attribute) {
  V value{};
  cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, &value, sizeof(value), nullptr);
  return value;
}

std::vector<uint32_t> capabilities(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoCapAttributes_t attribute) {
  size_t bytes = 0;
  if (cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, nullptr, 0, &bytes) != CUBLAS_STATUS_SUCCESS) return {0};
  std::vector<uint32_t> values(bytes / sizeof(uint32_t));
  if (values.empty()) return {0};  // the library's own choice
  cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, values.data(), bytes, &bytes);
  return values;
}

struct TileSize {
  int rows, columns;
};
// By cublasLtMatmulTile_t, whose own rows are our columns. CMakeLists.txt writes them down from cublasLt.h.
const std::unordered_map<int, TileSize>& tile_sizes() {
  static const std::unordered_map<int, TileSize> sizes = {
#include "cublaslt_tiles.inc"
  };
  return sizes;
}

// Every setting of one algorithm that cuBLASLt accepts. A split sum is added in float, as `propose` asks for too.
void enumerate(const ProductPlans& plans, const PlanKey& key, const Plan& plan, cublasLtMatmulAlgo_t algorithm,
               std::vector<Algorithm>& all) {
  const bool splits = capability<int32_t>(algorithm, CUBLASLT_ALGO_CAP_SPLITK_SUPPORT) != 0;
  const bool adds_in_float = (capability<uint32_t>(algorithm, CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK) &
                              CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0;
  const bool swizzles = capability<uint32_t>(algorithm, CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT) != 0;
  const int32_t customs = capability<int32_t>(algorithm, CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX);
  const auto tiles = capabilities(algorithm, CUBLASLT_ALGO_CAP_TILE_IDS);
  const auto stages = capabilities(algorithm, CUBLASLT_ALGO_CAP_STAGES_IDS);
  static constexpr uint16_t kClusters[] = {CUBLASLT_CLUSTER_SHAPE_AUTO,  CUBLASLT_CLUSTER_SHAPE_1x1x1,
                                           CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1,
                                           CUBLASLT_CLUSTER_SHAPE_2x2x1, CUBLASLT_CLUSTER_SHAPE_4x1x1,
                                           CUBLASLT_CLUSTER_SHAPE_1x4x1};
  static constexpr int32_t kSplits[] = {1, 2, 3, 4, 6, 8};
  for (const uint32_t tile : tiles)
    for (const uint32_t stage : stages)
      for (int32_t custom = 0; custom <= std::min(customs, 15); ++custom)
        for (const uint16_t cluster : kClusters) {
          cublasLtMatmulAlgo_t a = algorithm;
          configure(a, CUBLASLT_ALGO_CONFIG_TILE_ID, tile);
          configure(a, CUBLASLT_ALGO_CONFIG_STAGES_ID, stage);
          if (customs > 0 && !configure(a, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, static_cast<uint32_t>(custom))) continue;
          if (!configure(a, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, cluster) && cluster != CUBLASLT_CLUSTER_SHAPE_AUTO)
            continue;
          if (!plans.accepts(key, plan, a)) continue;  // saves asking for the rest
          for (const int32_t split : kSplits) {
            if (split > 1 && !(splits && adds_in_float)) break;
            configure(a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, split);
            configure(a, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                      static_cast<uint32_t>(split > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
                                                      : CUBLASLT_REDUCTION_SCHEME_NONE));
            for (uint32_t swizzle = 0; swizzle <= (swizzles ? 1u : 0u); ++swizzle) {
              configure(a, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, swizzle);
              cublasLtMatmulHeuristicResult_t result{};
              if (plans.accepts(key, plan, a, &result)) all.push_back(describe_algorithm(a, result));
            }
          }
        }
}

}  // namespace

Algorithm describe_algorithm(const cublasLtMatmulAlgo_t& a, const cublasLtMatmulHeuristicResult_t& result) {
  Algorithm described;
  std::copy(std::begin(a.data), std::end(a.data), described.data.begin());
  described.id = config<int32_t>(a, CUBLASLT_ALGO_CONFIG_ID);
  described.tile = static_cast<int>(config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_TILE_ID));
  if (const auto size = tile_sizes().find(described.tile); size != tile_sizes().end()) {
    described.tile_rows = size->second.rows;
    described.tile_columns = size->second.columns;
  }
  described.stages = static_cast<int>(config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_STAGES_ID));
  described.split_k = config<int32_t>(a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  described.reduction = static_cast<int>(config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME));
  described.swizzle = static_cast<int>(config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING));
  described.custom = static_cast<int>(config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION));
  described.inner_shape = config<uint16_t>(a, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID);
  described.cluster = config<uint16_t>(a, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);
  described.workspace = static_cast<int64_t>(result.workspaceSize);
  described.waves = result.wavesCount;
  return described;
}

Algorithm describe_algorithm(const OwnChoice& own) {
  const Tile& tile = own.kernel->variants[own.variant].tile;
  return {.own = own, .tile_rows = tile.rows, .tile_columns = tile.columns, .split_k = tile.split};
}

std::vector<Algorithm> accepted_algorithms(const ProductPlans& plans, const PlanKey& key, const Plan& plan) {
  const cudaDataType_t type = cuda_type(key.product.a);
  std::vector<int> ids(512);
  int count = 0;
  FTBERT_CUBLAS_CHECK(cublasLtMatmulAlgoGetIds(plans.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, type, type, type, type,
                                               static_cast<int>(ids.size()), ids.data(), &count));
  ids.resize(count);
  std::vector<Algorithm> all;
  for (const int id : ids) {
    cublasLtMatmulAlgo_t algorithm;
    if (cublasLtMatmulAlgoInit(plans.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, type, type, type, type, id, &algorithm) ==
        CUBLAS_STATUS_SUCCESS)
      enumerate(plans, key, plan, algorithm, all);
  }
  return all;
}

}  // namespace ftbert
