// Timing cuBLASLt's algorithms and our own kernels as the encoder will meet them: launched from a graph, weights not
// in the L2 cache, a short kernel of ours before and after each: where a product starts early, or lets the next kernel
// do so, that counts.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/cuda_check.h"
#include "core/cuda_owners.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "core/graph.h"
#include "gemm/gemm.h"
#include "gemm/gpu/contained_norm.h"
#include "gemm/gpu/own.h"
#include "gemm/plans.h"
#include "gemm/tuner/tuner.h"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr float kEps = 1e-5f;

Algorithm describe(const cublasLtMatmulAlgo_t& algorithm) {
  Algorithm described;
  std::copy(std::begin(algorithm.data), std::end(algorithm.data), described.data.begin());
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_ID, &described.id, sizeof(described.id),
                                       nullptr);
  return described;
}

Algorithm describe(const OwnChoice& own) { return {.own = own, .tile = own.kernel->variants[own.variant].tile}; }

class DeviceTuner : public Tuner {
 public:
  DeviceTuner(int device, const Product& p, void* workspace, const float* ones)
      : device_(device), plans_(*product_plans(device)), workspace_(workspace), ones_(ones) {
    FTBERT_CHECK(p.m > 0 && p.n > 0 && p.k > 0, "expected a product with m, n, k > 0, got m=", p.m, " n=", p.n,
                 " k=", p.k);
    FTBERT_CHECK(!p.epilogue.normed() || (p.epilogue.activation == Activation::none && p.epilogue.gate == Gate::none),
                 "a product with a norm behind it has no activation or gate");
    FTBERT_CHECK(p.epilogue.gate == Gate::none || p.n % 2 == 0, "a product with a gate has an even n, got ", p.n);
    key_.product = p;
    key_.workspace = static_cast<int64_t>(gemm_workspace_bytes(device));
    key_.align_a = key_.align_b = key_.align_c = 256;
    plan_ = ProductPlans::describe(key_, cublas_epilogue(p), some_bias());
    const DeviceGuard guard(device_);
    stream_ = make_stream();
    context_ = cuda_context(device_, stream_.get());
  }

  std::vector<Algorithm> heuristics(int most) override {
    std::vector<Algorithm> all;
    for (const auto& result : plans_.propose(key_, plan_, most)) all.push_back(describe(result.algo));
    return all;
  }

  std::vector<Algorithm> own() override {
    std::vector<Algorithm> all;
    const auto add = [&](const Product& product) {
      for (const OwnKernel* kernel : own_kernels())
        for (int variant = 0; variant < static_cast<int>(kernel->variants.size()); ++variant)
          if (kernel->can(context_, variant, product)) all.push_back(describe(OwnChoice{kernel, variant}));
    };
    add(product().alone());
    if (with_norm()) add(product());
    return all;
  }

  Algorithm chosen() override {
    if (with_norm())
      if (const OwnChoice own = plans_.get(key_, some_bias()).own) return describe(own);
    PlanKey key = key_;
    key.product = product().alone();
    const Plan plan = plans_.get(key, some_bias());
    FTBERT_CHECK(plan.supported, "there is no algorithm for this product");
    return plan.own ? describe(plan.own) : describe(plan.algorithm);
  }

  int64_t c_bytes() const override {
    if (with_norm())
      return std::max((2 + keeps_sum()) * round_up(c_size()) + 8 * exchanged_moment_count(product().m),
                      rows_in_tiles(product().m) * c_columns() * bytes_of(product().c));
    if (product().c != stream()) return 2 * c_size();  // of the neighbour's numbers
    return gated() ? round_up(c_size()) + size_of(product().n) : c_size();
  }

  void run(const Algorithm& algorithm, const void* a, const void* b, const void* bias, void* c) override {
    const DeviceGuard guard(device_);
    FTBERT_CUDA_CHECK(cudaDeviceSynchronize());  // the caller's stream has made the operands
    turn_ = 0;
    context_.stream = stream_.get();
    launch(algorithm, a, b, bias, c);
    FTBERT_CUDA_CHECK(cudaStreamSynchronize(stream_.get()));
  }

  std::unique_ptr<Recording> record(const Algorithm& algorithm, const void* a, const void* b, int64_t weights,
                                    const void* bias, void* c) override {
    FTBERT_CHECK(weights > 0, "expected weights of at least 1, got ", weights);
    const DeviceGuard guard(device_);
    auto recording = std::make_unique<GraphRecording>();
    recording->tuner = this;
    recording->products = static_cast<double>(weights);
    recording->alone = neighbour_alone(b, c, weights);
    recording->graph = capture(weights, [&](int64_t i) {
      launch(algorithm, a, static_cast<const char*>(b) + i * weight_bytes(), bias, c);
      neighbour(b, c);
    });
    if (!recording->graph) return nullptr;
    return recording;
  }

 private:
  struct GraphRecording : Recording {
    DeviceTuner* tuner = nullptr;
    std::unique_ptr<LaunchGraph> graph;
    const Event begin = make_event(cudaEventDefault), end = make_event(cudaEventDefault);
    double products = 1, alone = 0;
    bool ran = false;

    double microseconds() override {
      const DeviceGuard guard(tuner->device_);
      if (!std::exchange(ran, true)) graph->launch(tuner->stream_.get());
      return tuner->microseconds(*graph, begin, end) / products - alone;
    }
  };

  // `weights` times step(i); nullptr where cuBLASLt refuses the algorithm.
  template <class Step>
  std::unique_ptr<LaunchGraph> capture(int64_t weights, const Step& step) {
    const auto run = [&](int64_t times, void* stream) {
      turn_ = 0;
      context_.stream = stream;
      for (int64_t i = 0; i < times; ++i) step(i);
    };
    try {
      run(1, stream_.get());  // loads the kernels, which a recording may not
      return record_graph([&](void* recording) { run(weights, recording); });
    } catch (const Error&) {
      return nullptr;
    }
  }

  double microseconds(const LaunchGraph& graph, const Event& begin, const Event& end) {
    FTBERT_CUDA_CHECK(cudaEventRecord(begin.get(), stream_.get()));
    graph.launch(stream_.get());
    FTBERT_CUDA_CHECK(cudaEventRecord(end.get(), stream_.get()));
    FTBERT_CUDA_CHECK(cudaEventSynchronize(end.get()));
    float milliseconds = 0;
    FTBERT_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
    return 1e3 * milliseconds;
  }

  // What follows a product in a layer, of a size that takes one wave at any m: a LayerNorm of the first rows of c.
  void neighbour(const void* b, void* c) {
    dispatch(DeviceKind::cuda, stream(), [&](auto backend) {
      using T = typename decltype(backend)::T;
      const T* some = static_cast<const T*>(b);  // any numbers
      add_bias_input_layernorm<Cuda, T>(context_, static_cast<T*>(c), nullptr, nullptr,
                                        Norm<T>{NormKind::layer, some, some, kEps}, std::min<int64_t>(product().m, 256),
                                        c_columns(), {.normed = static_cast<T*>(c)});
    });
  }

  // Microseconds; measured once for each length of a graph, so that times of different calls compare.
  double neighbour_alone(const void* b, void* c, int64_t count) {
    if (const auto known = alone_.find(count); known != alone_.end()) return known->second;
    const auto graph = capture(count, [&](int64_t) { neighbour(b, c); });
    FTBERT_CHECK(graph, "a LayerNorm of ", c_columns(), " columns could not be recorded");
    const Event begin = make_event(cudaEventDefault), end = make_event(cudaEventDefault);
    std::vector<double> times;
    for (int round = 0; round < 10; ++round) times.push_back(microseconds(*graph, begin, end));
    std::sort(times.begin(), times.end());
    return alone_[count] = times[times.size() / 2] / static_cast<double>(count);
  }

  const Product& product() const { return key_.product; }
  DType stream() const { return product().c == DType::e4m3 ? DType::fp16 : product().c; }
  int64_t weight_bytes() const {
    const Product& p = product();
    return p.b == &formats::int8 ? int8_gpu_bytes(p.n, p.k) : p.b->bytes(p.n, p.k);
  }
  bool with_norm() const { return product().epilogue.normed(); }
  bool keeps_sum() const { return product().epilogue.after == After::norm_beside; }
  const void* some_bias() const { return workspace_; }  // cuBLASLt asks for a pointer; the real one comes with a call

  bool gated() const { return product().epilogue.gate != Gate::none; }
  int64_t c_columns() const { return product().epilogue.columns(product().n); }

  // Behind c with a norm its copy, where c keeps the sum, the product, then the moments; with a gate the sums that it
  // is made of.
  static int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }
  int64_t size_of(int64_t columns) const { return product().m * columns * bytes_of(product().c); }
  int64_t c_size() const { return size_of(c_columns()); }
  char* behind_c(void* c) const { return static_cast<char*>(c) + round_up(c_size()); }
  char* alone_of(void* c) const { return behind_c(keeps_sum() ? behind_c(c) : c); }
  const void* vector(const void* bias, int i) const {
    return static_cast<const char*>(bias) + i * product().n * bytes_of(product().c);
  }
  const void* added(const void* bias) const { return product().epilogue.bias ? bias : nullptr; }

  void launch(const Algorithm& algorithm, const void* a, const void* b, const void* bias, void* c) {
    ProductData data{.a = a, .b = b, .bias = added(bias), .c = c};
    data.a_scale = data.b_scale = data.c_scale = ones_;
    data.stream = stream();
    const OwnChoice& own = algorithm.own;
    if (own && with_norm() && own.kernel->can(context_, own.variant, product())) {
      data.norm = {NormKind::layer, vector(bias, 1), vector(bias, 2), kEps};
      if (keeps_sum()) data.copy = behind_c(c);
      data.moments = {reinterpret_cast<uint64_t*>(behind_c(alone_of(c))), exchanged_moment_count(product().m), turn_++};
      return run_own(context_, own, product(), data);
    }
    FTBERT_CHECK(own || product().c == stream() || plan_.epilogue.after == Epilogue{},
                 "nothing follows a product whose result is stored as ", to_string(product().c));
    if (with_norm()) data.bias = nullptr, data.c = alone_of(c);
    if (gated() && !own) data.c = behind_c(c);
    if (own) {
      run_own(context_, own, product().alone(), data);
    } else {
      Plan plan = plan_;
      std::copy(algorithm.data.begin(), algorithm.data.end(), plan.algorithm.data);
      plans_.run(key_, plan, data, workspace_, context_.stream);
    }
    if (!with_norm() && (own || plan_.epilogue.after == Epilogue{})) return;
    dispatch(DeviceKind::cuda, product().c,
             [&](auto backend) { finish<typename decltype(backend)::T>(bias, data.c, c); });
  }

  template <class T>
  void finish(const void* bias, void* made, void* c) {
    const int64_t m = product().m, n = product().n;
    T* const x = static_cast<T*>(c);
    if (gated()) {
      add_bias_gate<Cuda, T>(context_, Operand::of(static_cast<const T*>(made)), static_cast<const T*>(bias),
                             product().epilogue.activation, m, n / 2, Operand::of(x));
      return;
    }
    if (!with_norm()) {
      add_bias_act<Cuda, T>(context_, x, static_cast<const T*>(bias), product().epilogue.activation, m, n);
      return;
    }
    const auto typed = [&](int i) { return static_cast<const T*>(vector(bias, i)); };
    Output<T> to{.normed = x};
    if (keeps_sum()) to = {.sum = x, .copy = Operand::of(reinterpret_cast<const T*>(behind_c(c)))};
    add_bias_input_layernorm<Cuda, T>(context_, static_cast<const T*>(made), static_cast<const T*>(added(bias)), x,
                                      Norm<T>{NormKind::layer, typed(1), typed(2), kEps}, m, n, to);
  }

  int device_;
  ProductPlans& plans_;
  void* workspace_;
  const float* ones_;
  PlanKey key_;
  Plan plan_;
  Stream stream_;
  Context<Cuda> context_;
  std::unordered_map<int64_t, double> alone_;
  int turn_ = 0;  // of the next product with a norm
};

}  // namespace

std::unique_ptr<Tuner> make_tuner(int device, const Product& product, void* workspace, const float* ones) {
  return std::make_unique<DeviceTuner>(device, product, workspace, ones);
}

}  // namespace ftbert
