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
#include "core/relaxed_capture.h"
#include "gemm/cublaslt.h"
#include "gemm/own/own.h"
#include "gemm/own/wgmma_layernorm.h"
#include "gemm/plans.h"
#include "gemm/tuner/algorithms.h"
#include "gemm/tuner/tuner.h"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

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
  ~CublasLtTuner() override {
    const RelaxedCapture relaxed;
    cudaStreamDestroy(stream_);
  }

  std::vector<GemmAlgorithm> heuristics(int most) override {
    std::vector<GemmAlgorithm> all;
    for (const auto& result : plans_.propose(key_, plan_, most)) all.push_back(describe_algorithm(result.algo, result));
    return all;
  }

  std::vector<GemmAlgorithm> enumerate() override { return accepted_algorithms(plans_, key_, plan_); }

  std::vector<GemmAlgorithm> fused() override {
    std::vector<GemmAlgorithm> all;
    for (int variant = 0; variant < fused_gemm_variants(); ++variant)
      if (fused_gemm_supports(context_.capability, context_.shared_bytes, variant, problem()))
        all.push_back(describe_algorithm(variant, false));
    for (int variant = 0; key_.layernorm && variant < norm_gemm_variants(); ++variant)
      if (norm_gemm_supports(context_.capability, variant, norm_problem()))
        all.push_back(describe_algorithm(variant, true));
    return all;
  }

  GemmAlgorithm chosen() override {
    if (key_.layernorm)
      if (const int variant = plans_.get(key_, some_bias_).norm; variant >= 0) return describe_algorithm(variant, true);
    GemmKey key = key_;
    key.layernorm = false;
    const GemmPlan plan = plans_.get(key, some_bias_);
    FTBERT_CHECK(plan.supported, "cuBLASLt has no algorithm for this product");
    if (plan.fused >= 0) return describe_algorithm(plan.fused, false);
    cublasLtMatmulHeuristicResult_t result{};
    plans_.accepts(key, plan, plan.algorithm, &result);
    return describe_algorithm(plan.algorithm, result);
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
      const RelaxedCapture relaxed;
      if (exec) cudaGraphExecDestroy(exec);
    }
  };
  struct Event {
    cudaEvent_t event = nullptr;
    Event() { FTBERT_CUDA_CHECK(cudaEventCreate(&event)); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() {
      const RelaxedCapture relaxed;
      cudaEventDestroy(event);
    }
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
    const cublasLtMatmulAlgo_t cublas = cublas_algorithm(algorithm);
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
