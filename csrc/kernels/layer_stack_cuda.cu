// The layers of a post-LayerNorm encoder in one kernel: a block for each multiprocessor, all there from the first phase
// to the last. A layer has five: qkv, attention, out, up, down; between two of them all blocks wait for each other. A
// LayerNorm takes no phase: its moments come from those who compute what it reads, and what is linear in it is added to
// the product of those who read its result (StackVectors).
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/cuda_check.h"
#include "core/device_guard.h"
#include "kernels/layer_stack.h"
#include "kernels/stack_attention.cuh"
#include "kernels/stack_product.cuh"
#include "kernels/stack_waiting.cuh"
#include "kernels/tensor_map.h"

namespace ftbert {
namespace {

template <class E, int kHeadSize>
__device__ void work_through(Block<E>& block) {
  const StackArguments<E>& p = block.p;
  for (int i = 0; i < p.layer_count * kStackProducts; ++i) {
    const int product = i % kStackProducts;
    if (product == kOut) run_attention<kHeadSize>(block);
    run_product(block, i / kStackProducts, product);
  }

  const Thread me;
  const StackVectors<E>& last = block.plan().vectors[p.layer_count];
  block.start_phase();
  for (int row = me.warp * gridDim.x + blockIdx.x; row < p.tokens; row += kStackWarps * gridDim.x) {
    const float2 scale = row_scale(p, row);
    for (int column = me.lane * 8; column < p.hidden; column += 32 * 8) {
      float x[8], gamma[8], beta[8];
      load_written<8>(p.sum + row * p.hidden + column).to_floats(x);
      Packed<E, 8>::load(last.gamma[kQkv] + column).to_floats(gamma);
      Packed<E, 8>::load(last.beta[kQkv] + column).to_floats(beta);
#pragma unroll
      for (int w = 0; w < 8; ++w) x[w] = (x[w] * scale.x + scale.y) * gamma[w] + beta[w];
      Packed<E, 8>::from_floats(x).store(p.rows + row * p.hidden + column);
    }
  }
}

template <class E, int kHeadSize>
__global__ void __launch_bounds__(kStackThreads, 1) layer_stack_kernel(const __grid_constant__ StackArguments<E> p) {
#ifdef FTBERT_WGMMA
  extern __shared__ char unaligned_memory[];
  Block<E> block(p, unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024);
  if (threadIdx.x == 0) block.make_barriers();
  block.copy_plan();
  __syncwarp();
  cluster_wait();
  if (threadIdx.x < kWorkers) {
    work_through<E, kHeadSize>(block);
  } else {
    if (threadIdx.x == kWeightWarp * 32) bring_weights(block);
    if (threadIdx.x / 32 == kWaitingWarp) wait_for_others(block);
  }
  __syncwarp();
  cluster_wait();  // nobody ends while others may still write to its memory
#endif
}

// add = bias + beta times the weight, slope = gamma times it (StackVectors): a warp for each of the weight's rows.
template <class E>
__global__ void fold_kernel(const E* weight, const E* bias, const E* gamma, const E* beta, int n, int k, float* add,
                            float* slope) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= n) return;
  float with_gamma = 0, with_beta = 0;
  if (gamma != nullptr) {
    for (int i = lane; i < k; i += 32) {
      const float w = to_float(weight[static_cast<int64_t>(row) * k + i]);
      with_gamma += w * to_float(gamma[i]);
      with_beta += w * to_float(beta[i]);
    }
  }
  with_gamma = add_lanes<32>(with_gamma);
  with_beta = add_lanes<32>(with_beta);
  if (lane != 0) return;
  add[row] = to_float(bias[row]) + with_beta;
  if (gamma != nullptr) slope[row] = with_gamma;
}

template <class E>
using StackKernel = void (*)(StackArguments<E>);

template <class E>
StackKernel<E> kernel_for(int64_t head_size) {
  return head_size == 32 ? layer_stack_kernel<E, 32> : layer_stack_kernel<E, 64>;
}

struct Launch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  Launch(int blocks, void* stream) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = kStackCluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kStackThreads);
    config.dynamicSmemBytes = kStackBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = 2;
  }
};

// How many blocks can be there at once; 0 where the GPU cannot say.
template <class E>
int fitting_blocks(const Context<Cuda>& context, StackKernel<E> kernel) {
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStackBytes) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  Launch launch(context.sm_count / kStackCluster * kStackCluster, nullptr);
  launch.config.numAttrs = 1;  // the question is about clusters alone
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return std::min(clusters * kStackCluster, context.sm_count / kStackCluster * kStackCluster);
}

static_assert(kMostStackTokens <= 16 * kMostKeyParts, "a warp takes 16 keys");

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int stages_beside(int work) { return std::min(kMostStages, (kArenaBytes - work) / kStageBytes); }

// The way to cut a product that is likely to end first, or nullopt where it has more units than there are blocks: what
// a unit takes after the barrier. In cycles, from what an H200 took: the rows from the L2 cache, 24 bytes a cycle where
// each block reads its own; a stage, 150 whatever the rows, since the warpgroup instruction reads the weights at 64
// bytes a cycle; stages that do not fit with the first ones, and come while the product runs, 32 bytes a cycle.
// Estimates: what follows; all blocks together 3000 bytes a cycle from the L2 cache, a quarter of that not hidden.
std::optional<Tiling> choose_tiling(int64_t tokens, int64_t n, int64_t k, StackProduct product, int blocks) {
  std::optional<Tiling> best;
  double least = 0;
  for (const int rows : {8, 16, 24, 32, 48, 64})
    for (const int split : {1, 2, 4}) {
      const int steps = static_cast<int>(k / kStep / split), columns = static_cast<int>(n / kTileColumns);
      if (k / kStep % split != 0 || steps > kMostSteps || (product != kDown && split > 1)) continue;
      const int64_t units = columns * ceil_div(tokens, rows) * split;
      if (units > blocks) continue;
      const Tiling tiling{rows, split, std::gcd(columns, kStackCluster / split), columns, static_cast<int>(units),
                          steps};
      const int stages = stages_beside(std::max(tiling.row_bytes(), kLeastWorkBytes));
      const double bring = std::max(tiling.row_bytes() / 24.0 / tiling.shared, tiling.row_bytes() / 60.0);
      const double multiply = 150.0 * steps + 256.0 * std::max(0, steps - stages);
      const double finish = 10 * rows + (split > 1 ? 1200 + 14 * rows : 0);
      const double bytes = static_cast<double>(units) * (steps * kStageBytes + tiling.row_bytes() / tiling.shared);
      const double cycles = bring + multiply + finish + 0.25 * bytes / 3000;
      if (!best || cycles < least) {
        least = cycles;
        best = tiling;
      }
    }
  return best;
}

struct ProductShape {
  int64_t n, k;
};
// As StackProduct counts them.
std::array<ProductShape, kStackProducts> product_shapes(int64_t hidden, int64_t inter) {
  return {{{3 * hidden, hidden}, {hidden, hidden}, {inter, hidden}, {hidden, inter}}};
}

// So many that no block has more than one unit of a product.
int64_t tokens_that_fit(int64_t hidden, int64_t inter, int blocks) {
  const auto shapes = product_shapes(hidden, inter);
  for (int64_t tokens = kMostStackTokens; tokens > 0; --tokens) {
    int fit = 0;
    for (int i = 0; i < kStackProducts; ++i)
      fit += choose_tiling(tokens, shapes[i].n, shapes[i].k, static_cast<StackProduct>(i), blocks).has_value();
    if (fit == kStackProducts) return tokens;
  }
  return 0;
}

}  // namespace

template <class T>
struct LayerStack<T>::Prepared {
  using E = native_t<T>;
  StackArguments<E> arguments{};  // what does not depend on the call
  StackKernel<E> kernel = nullptr;
  int blocks = 0;
  int64_t most_tokens = 0;
  std::array<ProductShape, kStackProducts> shapes{};
  DType dtype{};
};

template <class T>
std::string LayerStack<T>::refusal(const Context<Cuda>& context, const EncoderConfig& c,
                                   const std::vector<LayerWeights<T>>& layers) {
  if (!has_warpgroups(context.capability)) return "needs a GPU of capability 9.0 and a build for 90a";
  if (c.norm_place != NormPlace::post) return "LayerNorm comes first in this model";
  if (c.relative_span > 0) return "the model has a relative position bias";
  if (c.head_size != 32 && c.head_size != 64) return "heads must have 32 or 64 elements";
  if (c.layers == 0 || c.layers > kMostStackLayers)
    return "a model must have 1 to " + std::to_string(kMostStackLayers) + " layers";
  if (c.hidden % 64 != 0 || c.inter % 64 != 0 || c.hidden > kMostTileK || c.hidden != c.heads * c.head_size)
    return "hidden and inter must be multiples of 64, hidden at most " + std::to_string(kMostTileK);
  if (c.inter < c.hidden) return "inter must not be less than hidden";
  for (const LayerWeights<T>& layer : layers) {
    const T* const pointers[] = {layer.qkv.weight,
                                 layer.qkv.bias,
                                 layer.out.weight,
                                 layer.out.bias,
                                 layer.up.weight,
                                 layer.up.bias,
                                 layer.down.weight,
                                 layer.down.bias,
                                 layer.attention_norm.gamma,
                                 layer.attention_norm.beta,
                                 layer.ffn_norm.gamma,
                                 layer.ffn_norm.beta};
    for (const T* pointer : pointers)
      if (!pointer || !vectorizable(kWidth<T>, kWidth<T>, pointer)) return "a weight does not begin at 16 bytes";
  }
  const DeviceGuard guard(context.device);
  const int64_t steps = c.inter / kStep, split = steps % 4 == 0 ? 4 : steps % 2 == 0 ? 2 : 1;
  if (steps / split > kMostSteps)
    return "inter cannot be divided by 2 or 4 into multiples of 64 up to " + std::to_string(kMostTileK);
  const int blocks = fitting_blocks<native_t<T>>(context, kernel_for<native_t<T>>(c.head_size));
  if (tokens_that_fit(c.hidden, c.inter, blocks) == 0)
    return "a product has more tiles than the GPU has room for blocks (" + std::to_string(blocks) + ")";
  return "";
}

template <class T>
int64_t LayerStack<T>::memory_floats(const EncoderConfig& c) {
  return c.layers * 2 * (5 * c.hidden + c.inter);
}

template <class T>
LayerStack<T>::LayerStack(const Context<Cuda>& context, const EncoderConfig& c,
                          const std::vector<LayerWeights<T>>& layers, float* memory) {
  using E = native_t<T>;
  const DeviceGuard guard(context.device);
  auto prepared = std::make_unique<Prepared>();
  prepared->kernel = kernel_for<E>(c.head_size);
  prepared->blocks = fitting_blocks<E>(context, prepared->kernel);
  prepared->most_tokens = tokens_that_fit(c.hidden, c.inter, prepared->blocks);
  prepared->shapes = product_shapes(c.hidden, c.inter);
  StackArguments<E>& p = prepared->arguments;
  prepared->dtype = std::is_same_v<T, half_t> ? DType::fp16 : DType::bf16;
  for (size_t i = 0; i < layers.size(); ++i) {
    p.plan.vectors[i].gamma[kUp] = native(layers[i].attention_norm.gamma);
    p.plan.vectors[i].beta[kUp] = native(layers[i].attention_norm.beta);
    p.plan.vectors[i + 1].gamma[kQkv] = native(layers[i].ffn_norm.gamma);
    p.plan.vectors[i + 1].beta[kQkv] = native(layers[i].ffn_norm.beta);
  }
  const auto stream = static_cast<cudaStream_t>(context.stream);
  float* next = memory;
  for (size_t i = 0; i < layers.size(); ++i) {
    StackVectors<E>& to = p.plan.vectors[i];
    const LayerWeights<T>& from = layers[i];
    const Linear<T>* const products[] = {&from.qkv, &from.out, &from.up, &from.down};  // as StackProduct counts them
    for (int product = 0; product < kStackProducts; ++product) {
      const Linear<T>& linear = *products[product];
      p.weights[i][product] = tensor_map(linear.weight, prepared->dtype, linear.n, linear.k, kTileColumns);
      float* const add = std::exchange(next, next + linear.n);
      float* const slope = std::exchange(next, next + linear.n);
      fold_kernel<<<static_cast<unsigned>(ceil_div(linear.n, 8)), 256, 0, stream>>>(
          native(linear.weight), native(linear.bias), to.gamma[product], to.beta[product], static_cast<int>(linear.n),
          static_cast<int>(linear.k), add, slope);
      FTBERT_LAUNCH_CHECK("fold");
      to.add[product] = add;
      if (to.gamma[product]) to.slope[product] = slope;
    }
  }
  p.hidden = static_cast<int>(c.hidden);
  p.eps = static_cast<float>(c.layer_norm_eps);
  for (int product = 0; product < kStackProducts; ++product) {
    p.plan.phases[product].n = static_cast<int>(prepared->shapes[product].n);
    p.plan.phases[product].residual = product == kOut || product == kDown;
    p.plan.phases[product].activation = product == kUp ? c.activation : Activation::none;
  }
  p.heads = static_cast<int>(c.heads);
  p.scale_log2 = static_cast<float>(M_LOG2E / std::sqrt(static_cast<double>(c.head_size)));
  prepared_ = std::move(prepared);
}

template <class T>
LayerStack<T>::~LayerStack() = default;

template <class T>
int64_t LayerStack<T>::most_tokens() const {
  return prepared_->most_tokens;
}

template <class T>
void LayerStack<T>::run(const Context<Cuda>& context, const StackInput<T>& input) const {
  if (input.layers == 0 || input.tokens == 0) return;
  FTBERT_CHECK(input.tokens <= most_tokens() && input.batch <= kMostStackTokens, "layer_stack: expected up to ",
               most_tokens(), " tokens and ", kMostStackTokens, " sequences, got ", input.tokens, " and ", input.batch);
  StackArguments<native_t<T>> p = prepared_->arguments;
  const int blocks = prepared_->blocks;
  const std::pair<const T*, T*> through[] = {
      {input.scaled, input.qkv}, {input.context, input.sum}, {input.scaled, input.inner}, {input.inner, input.sum}};
  const auto rows_of = [&](const T* from, int product) {
    const Tiling& tiling = p.plan.phases[product].tiling;
    return chunk_map(from, prepared_->dtype, input.tokens, prepared_->shapes[product].k, tiling.rows, tiling.chunks());
  };
  p.work_bytes = kLeastWorkBytes;
  for (int product = 0; product < kStackProducts; ++product) {
    StackPhase<native_t<T>>& phase = p.plan.phases[product];
    const ProductShape& shape = prepared_->shapes[product];
    phase.tiling = choose_tiling(input.tokens, shape.n, shape.k, static_cast<StackProduct>(product), blocks).value();
    phase.out = native(through[product].second);
    p.inputs[product] = rows_of(through[product].first, product);
    p.work_bytes = std::max(p.work_bytes, phase.tiling.row_bytes());
  }
  p.first = rows_of(input.hidden, kQkv);
  p.stages = stages_beside(p.work_bytes);
  p.layer_count = static_cast<int>(input.layers);
  p.tokens = static_cast<int>(input.tokens);
  p.sequences = static_cast<int>(input.batch);
  p.query_tiles = static_cast<int>(ceil_div(std::clamp<int64_t>(input.max_seqlen, 1, input.tokens), 16));
  p.key_parts = static_cast<int>(std::bit_ceil(static_cast<unsigned>(p.query_tiles)));
  p.cu_seqlens = input.cu_seqlens;
  p.rows = native(input.hidden);
  p.sum = native(input.sum);
  p.scaled = native(input.scaled);
  p.qkv = native(input.qkv);
  p.context = native(input.context);
  p.moments = reinterpret_cast<Moments*>(input.moments);
  p.arrivals = input.arrivals;
  FTBERT_CUDA_CHECK(cudaMemsetAsync(p.arrivals, 0, sizeof(*p.arrivals), static_cast<cudaStream_t>(context.stream)));
  FTBERT_CUDA_CHECK(cudaFuncSetAttribute(prepared_->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStackBytes));
  const Launch launch(blocks, context.stream);
  cuda_check(cudaLaunchKernelEx(&launch.config, prepared_->kernel, p),
             "kernel layer_stack (FTBERT_ONE_KERNEL=off does without)", __FILE__, __LINE__);
}

template class LayerStack<half_t>;
template class LayerStack<bfloat16_t>;

}  // namespace ftbert
