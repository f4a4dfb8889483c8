// Timing cuBLASLt's algorithms and our own products as the encoder will meet them: launched from a graph, weights not
// in the L2 cache, a short kernel of ours before and after each: where a product starts early, or lets the next kernel
// do so, that counts.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/cuda_check.h"
#include "core/device.h"
#include "core/device_guard.h"
#include "gemm/gemm_cuda.h"
#include "gemm/gemm_fused.h"
#include "gemm/gemm_layernorm.h"
#include "gemm/gemm_plans.h"
#include "gemm/gemm_tuner.h"
#include "kernels/kernels.h"

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

GemmAlgorithm describe(const cublasLtMatmulAlgo_t& a, const cublasLtMatmulHeuristicResult_t& result) {
  GemmAlgorithm described;
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

GemmAlgorithm describe(int variant, bool norm) {
  GemmAlgorithm described;
  described.data = norm ? norm_algorithm(variant) : fused_algorithm(variant);
  described.id = norm ? -2 : -1;
  described.tile = variant;
  const FusedTile tile = norm ? norm_gemm_tile(variant) : fused_gemm_tile(variant);
  described.tile_rows = tile.rows;
  described.tile_columns = tile.columns;
  described.split_k = tile.split;
  return described;
}

cublasLtMatmulAlgo_t opaque(const GemmAlgorithm& algorithm) {
  cublasLtMatmulAlgo_t a;
  std::copy(algorithm.data.begin(), algorithm.data.end(), a.data);
  return a;
}

constexpr float kEps = 1e-5f;

class CublasLtTuner : public GemmTuner {
 public:
  CublasLtTuner(int device, const GemmProblem& p, void* workspace)
      : device_(device),
        plans_(*gemm_plans(device)),
        workspace_(workspace),
        element_(p.dtype == DType::fp32 ? 4 : 2),
        activation_(p.activation) {
    FTBERT_CHECK(p.m > 0 && p.n > 0 && p.k > 0, "expected a product with m, n, k > 0, got m=", p.m, " n=", p.n,
                 " k=", p.k);
    FTBERT_CHECK(!p.layernorm || (p.bias && p.activation == Activation::none),
                 "a product with LayerNorm has a bias and no activation");
    const FusedEpilogue fused = fuse_epilogue(p.bias && !p.layernorm, p.activation, p.dtype);
    key_ = {.m = p.m, .n = p.n, .k = p.k, .epilogue = fused.epilogue, .dtype = p.dtype};
    if (!fused.whole) key_.after = p.activation;
    key_.workspace = static_cast<int64_t>(gemm_workspace_bytes(device));
    key_.align_a = key_.align_b = key_.align_c = 256;
    key_.layernorm = p.layernorm;
    some_bias_ =
        p.bias && fused.whole && !p.layernorm ? workspace : nullptr;  // any pointer: `launch` sets the real one
    plan_ = GemmPlans::describe(key_, some_bias_);
    const DeviceGuard guard(device_);
    FTBERT_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    context_ = cuda_context(device_, stream_);
  }
  CublasLtTuner(const CublasLtTuner&) = delete;
  CublasLtTuner& operator=(const CublasLtTuner&) = delete;
  ~CublasLtTuner() override { cudaStreamDestroy(stream_); }

  std::vector<GemmAlgorithm> heuristics(int most) override {
    std::vector<GemmAlgorithm> all;
    for (const auto& result : plans_.propose(key_, plan_, most)) all.push_back(describe(result.algo, result));
    return all;
  }

  std::vector<GemmAlgorithm> enumerate() override {
    const cudaDataType_t type = key_.dtype == DType::fp16   ? CUDA_R_16F
                                : key_.dtype == DType::bf16 ? CUDA_R_16BF
                                                            : CUDA_R_32F;
    std::vector<int> ids(512);
    int count = 0;
    FTBERT_CUBLAS_CHECK(cublasLtMatmulAlgoGetIds(plans_.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, type, type, type, type,
                                                 static_cast<int>(ids.size()), ids.data(), &count));
    ids.resize(count);
    std::vector<GemmAlgorithm> all;
    for (const int id : ids) {
      cublasLtMatmulAlgo_t algorithm;
      if (cublasLtMatmulAlgoInit(plans_.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, type, type, type, type, id,
                                 &algorithm) == CUBLAS_STATUS_SUCCESS)
        enumerate(algorithm, all);
    }
    return all;
  }

  std::vector<GemmAlgorithm> fused() override {
    std::vector<GemmAlgorithm> all;
    for (int variant = 0; variant < fused_gemm_variants(); ++variant)
      if (fused_gemm_supports(context_.capability, variant, problem())) all.push_back(describe(variant, false));
    for (int variant = 0; key_.layernorm && variant < norm_gemm_variants(); ++variant)
      if (norm_gemm_supports(context_.capability, variant, norm_problem())) all.push_back(describe(variant, true));
    return all;
  }

  GemmAlgorithm chosen() override {
    const GemmPlan plan = plans_.get(key_, some_bias_);
    FTBERT_CHECK(plan.supported, "cuBLASLt has no algorithm for this product");
    if (plan.fused >= 0 || plan.norm >= 0) return describe(std::max(plan.fused, plan.norm), plan.norm >= 0);
    cublasLtMatmulHeuristicResult_t result{};
    plans_.accepts(key_, plan, plan.algorithm, &result);
    return describe(plan.algorithm, result);
  }

  int64_t c_bytes() const override {
    const int64_t elements = key_.m * key_.n * element_;
    return key_.layernorm ? 2 * round_up(elements) + 8 * norm_gemm_moments(key_.m) : elements;
  }

  void run(const GemmAlgorithm& algorithm, const void* a, const void* b, const void* bias, void* c) override {
    const DeviceGuard guard(device_);
    FTBERT_CUDA_CHECK(cudaDeviceSynchronize());  // the caller's stream has made the operands
    turn_ = 0;
    launch(algorithm, a, b, bias, c);
    FTBERT_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

  std::unique_ptr<GemmRecording> record(const GemmAlgorithm& algorithm, const void* a, const void* b, int64_t weights,
                                        const void* bias, void* c) override {
    FTBERT_CHECK(weights > 0, "expected weights of at least 1, got ", weights);
    const DeviceGuard guard(device_);
    auto recording = std::make_unique<Recording>();
    recording->tuner = this;
    recording->products = static_cast<double>(weights);
    recording->alone = neighbour_alone(b, c, weights);
    capture(recording->graph, weights, [&](int64_t i) {
      launch(algorithm, a, static_cast<const char*>(b) + i * key_.n * key_.k * element_, bias, c);
      neighbour(b, c);
    });
    if (!recording->graph.exec) return nullptr;
    return recording;
  }

 private:
  struct Graph {
    cudaGraphExec_t exec = nullptr;
    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() {
      if (exec) cudaGraphExecDestroy(exec);
    }
  };
  struct Event {
    cudaEvent_t event = nullptr;
    Event() { FTBERT_CUDA_CHECK(cudaEventCreate(&event)); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() { cudaEventDestroy(event); }
  };

  struct Recording : GemmRecording {
    CublasLtTuner* tuner = nullptr;
    Graph graph;
    Event begin, end;
    double products = 1, alone = 0;
    bool ran = false;

    double microseconds() override {
      const DeviceGuard guard(tuner->device_);
      if (!std::exchange(ran, true)) FTBERT_CUDA_CHECK(cudaGraphLaunch(graph.exec, tuner->stream_));
      return tuner->microseconds(graph, begin, end) / products - alone;
    }
  };

  // `weights` times step(i). Leaves graph.exec null where cuBLASLt refuses the algorithm.
  template <class Step>
  void capture(Graph& graph, int64_t weights, const Step& step) {
    try {
      turn_ = 0;
      step(0);  // loads the kernels, which a capture may not
    } catch (const Error&) {
      return;
    }
    FTBERT_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    turn_ = 0;
    cudaGraph_t recorded = nullptr;
    try {
      for (int64_t i = 0; i < weights; ++i) step(i);
    } catch (const Error&) {
      cudaStreamEndCapture(stream_, &recorded);
      if (recorded) cudaGraphDestroy(recorded);
      cudaGetLastError();
      return;
    }
    FTBERT_CUDA_CHECK(cudaStreamEndCapture(stream_, &recorded));
    const cudaError_t made = cudaGraphInstantiate(&graph.exec, recorded, 0);
    cudaGraphDestroy(recorded);
    FTBERT_CUDA_CHECK(made);
  }

  double microseconds(const Graph& graph, const Event& begin, const Event& end) {
    FTBERT_CUDA_CHECK(cudaEventRecord(begin.event, stream_));
    FTBERT_CUDA_CHECK(cudaGraphLaunch(graph.exec, stream_));
    FTBERT_CUDA_CHECK(cudaEventRecord(end.event, stream_));
    FTBERT_CUDA_CHECK(cudaEventSynchronize(end.event));
    float milliseconds = 0;
    FTBERT_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin.event, end.event));
    return 1e3 * milliseconds;
  }

  // What follows a product in a layer, of a size that takes one wave at any m: a LayerNorm of the first rows of c.
  void neighbour(const void* b, void* c) {
    switch (key_.dtype) {
      case DType::fp32: return normalize<float>(b, c);
      case DType::fp16: return normalize<half_t>(b, c);
      case DType::bf16: return normalize<bfloat16_t>(b, c);
    }
  }

  // Microseconds; measured once for each length of a graph, so that times of different calls compare.
  double neighbour_alone(const void* b, void* c, int64_t count) {
    if (const auto known = alone_.find(count); known != alone_.end()) return known->second;
    Graph graph;
    capture(graph, count, [&](int64_t) { neighbour(b, c); });
    FTBERT_CHECK(graph.exec, "a LayerNorm of ", key_.n, " columns could not be recorded");
    Event begin, end;
    std::vector<double> times;
    for (int round = 0; round < 10; ++round) times.push_back(microseconds(graph, begin, end));
    std::sort(times.begin(), times.end());
    return alone_[count] = times[times.size() / 2] / static_cast<double>(count);
  }

  template <class T>
  void normalize(const void* b, void* c) {
    const T* some = static_cast<const T*>(b);  // any numbers
    add_bias_input_layernorm<Cuda, T>(context_, static_cast<T*>(c), nullptr, nullptr, some, some, kEps,
                                      std::min<int64_t>(key_.m, 256), key_.n, nullptr, static_cast<T*>(c));
  }

  FusedGemm problem() const { return {key_.m, key_.n, key_.k, key_.dtype, activation_}; }
  NormGemm norm_problem() const { return {.m = key_.m, .n = key_.n, .k = key_.k, .dtype = key_.dtype, .eps = kEps}; }

  // With a LayerNorm, behind [m, n] of c: the product, then the moments.
  static int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }
  char* behind_c(void* c) const { return static_cast<char*>(c) + round_up(key_.m * key_.n * element_); }
  const void* vector(const void* bias, int i) const { return static_cast<const char*>(bias) + i * key_.n * element_; }

  void launch(const GemmAlgorithm& algorithm, const void* a, const void* b, const void* bias, void* c) {
    if (const int variant = norm_variant(algorithm.data); variant >= 0) {
      NormGemm gemm = norm_problem();
      gemm.a = a, gemm.b = b, gemm.x = c;
      gemm.bias = bias, gemm.gamma = vector(bias, 1), gemm.beta = vector(bias, 2);
      gemm.moments = reinterpret_cast<uint64_t*>(behind_c(behind_c(c)));
      gemm.moment_count = norm_gemm_moments(key_.m);
      gemm.turn = turn_++;
      run_norm_gemm(context_, variant, gemm);
      return;
    }
    void* const product = key_.layernorm ? behind_c(c) : c;
    multiply(algorithm, a, b, key_.layernorm ? nullptr : bias, product);
    if (key_.after == Activation::none && !key_.layernorm) return;
    if (key_.after != Activation::none && fused_variant(algorithm.data) >= 0) return;
    switch (key_.dtype) {
      case DType::fp32: return finish<float>(bias, product, c);
      case DType::fp16: return finish<half_t>(bias, product, c);
      case DType::bf16: return finish<bfloat16_t>(bias, product, c);
    }
  }

  void multiply(const GemmAlgorithm& algorithm, const void* a, const void* b, const void* bias, void* c) {
    if (const int variant = fused_variant(algorithm.data); variant >= 0) {
      FusedGemm gemm = problem();
      gemm.a = a, gemm.b = b, gemm.bias = bias, gemm.c = c;
      run_fused_gemm(context_, variant, gemm);
      return;
    }
    GemmPlan plan = plan_;
    const cublasLtMatmulAlgo_t cublas = opaque(algorithm);
    if (bias && some_bias_)
      FTBERT_CUBLAS_CHECK(
          cublasLtMatmulDescSetAttribute(&plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias)));
    const float one = 1.0f, zero = 0.0f;
    FTBERT_CUBLAS_CHECK(cublasLtMatmul(plans_.handle, &plan.operation, &one, b, &plan.b, a, &plan.a, &zero, c, &plan.c,
                                       c, &plan.c, &cublas, workspace_, static_cast<size_t>(key_.workspace), stream_));
  }

  template <class T>
  void finish(const void* bias, void* product, void* c) {
    if (!key_.layernorm) {
      add_bias_act<Cuda, T>(context_, static_cast<T*>(c), static_cast<const T*>(bias), key_.after, key_.m, key_.n);
      return;
    }
    const auto part = [&](int i) { return static_cast<const T*>(vector(bias, i)); };
    T* const x = static_cast<T*>(c);
    add_bias_input_layernorm<Cuda, T>(context_, static_cast<const T*>(product), part(0), x, part(1), part(2), kEps,
                                      key_.m, key_.n, nullptr, x);
  }

  // Every setting of one algorithm that cuBLASLt accepts. A split sum is added in float, as `propose` asks for too.
  void enumerate(cublasLtMatmulAlgo_t algorithm, std::vector<GemmAlgorithm>& all) {
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
    const auto add = [&](const cublasLtMatmulAlgo_t& a) {
      cublasLtMatmulHeuristicResult_t result{};
      if (plans_.accepts(key_, plan_, a, &result)) all.push_back(describe(a, result));
    };
    for (const uint32_t tile : tiles)
      for (const uint32_t stage : stages)
        for (int32_t custom = 0; custom <= std::min(customs, 15); ++custom)
          for (const uint16_t cluster : kClusters) {
            cublasLtMatmulAlgo_t a = algorithm;
            configure(a, CUBLASLT_ALGO_CONFIG_TILE_ID, tile);
            configure(a, CUBLASLT_ALGO_CONFIG_STAGES_ID, stage);
            if (customs > 0 && !configure(a, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, static_cast<uint32_t>(custom)))
              continue;
            if (!configure(a, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, cluster) && cluster != CUBLASLT_CLUSTER_SHAPE_AUTO)
              continue;
            if (!plans_.accepts(key_, plan_, a)) continue;  // saves asking for the rest
            for (const int32_t split : kSplits) {
              if (split > 1 && !(splits && adds_in_float)) break;
              configure(a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, split);
              configure(a, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                        static_cast<uint32_t>(split > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
                                                        : CUBLASLT_REDUCTION_SCHEME_NONE));
              for (uint32_t swizzle = 0; swizzle <= (swizzles ? 1u : 0u); ++swizzle) {
                configure(a, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, swizzle);
                add(a);
              }
            }
          }
  }

  int device_;
  GemmPlans& plans_;
  void* workspace_;
  int64_t element_;
  Activation activation_;
  GemmKey key_;
  const void* some_bias_ = nullptr;
  GemmPlan plan_;
  cudaStream_t stream_ = nullptr;
  Context<Cuda> context_;
  std::unordered_map<int64_t, double> alone_;
  int turn_ = 0;  // of the next product with LayerNorm
};

}  // namespace

std::unique_ptr<GemmTuner> make_gemm_tuner(int device, const GemmProblem& problem, void* workspace) {
  return std::make_unique<CublasLtTuner>(device, problem, workspace);
}

}  // namespace ftbert
