// Choosing: a plan for each key from the tuned table, a guess or cuBLASLt's heuristic, kept until there is another
// table.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/check.h"
#include "core/cuda_check.h"
#include "core/cuda_owners.h"
#include "core/device.h"
#include "gemm/gemm.h"
#include "gemm/plans.h"

namespace ftbert {
namespace {

// Packed tokens give every m, and a plan is about 600 bytes. A full map starts over: refilling costs one heuristic a
// shape, tens of microseconds.
constexpr size_t kMostPlans = 8192;

template <class V>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute, V value) {
  FTBERT_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
}
template <class V>
void set(cublasLtMatmulDescOpaque_t& operation, cublasLtMatmulDescAttributes_t attribute, V value) {
  FTBERT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)));
}

// A contiguous batch of row-major [rows, cols] matrices: to cuBLASLt, column-major [cols, rows].
void set_layout(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, int64_t rows, int64_t cols, int64_t batch) {
  FTBERT_CUBLAS_CHECK(cublasLtMatrixLayoutInit(&layout, type, cols, rows, cols));
  if (batch == 1) return;
  const int32_t count = static_cast<int32_t>(batch);
  const int64_t stride = rows * cols;
  FTBERT_CUBLAS_CHECK(
      cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)));
  FTBERT_CUBLAS_CHECK(
      cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)));
}

struct Hash {
  uint64_t value = 0;
  void mix(uint64_t word) {
    value = (value ^ word) * 0x9e3779b97f4a7c15ull;
    value ^= value >> 32;
  }
};

// What products share a row: a bias counts where cuBLASLt adds it, and how many scales there are does not.
Product without_m(Product product) {
  product.m = 0;
  if (product.b == &formats::e4m3_tensor) product.b = &formats::e4m3;
  product.epilogue.bias = cublas_epilogue(product).bias;
  product.epilogue.norm = NormKind::layer;
  return product;
}

// cuBLASLt runs none of these for `linear`: of an operand in E4M3 it takes one scale for both or vectors for both, and
// leaves the result in 16 bits.
bool has_scales(const Product& p) { return p.b->block != kNoScales; }

}  // namespace

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::fp32: return CUDA_R_32F;
    case DType::fp16: return CUDA_R_16F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::e4m3: return CUDA_R_8F_E4M3;
    case DType::int8: return CUDA_R_8I;
    case DType::uint8: return CUDA_R_8U;
  }
  fail("cuBLASLt has no such type");
}

// cuBLASLt's GELU is the tanh form with an approximate tanh: good for 16-bit outputs of gelu_tanh models, never for erf
// or fp32. A norm behind the product adds its bias.
CublasEpilogue cublas_epilogue(const Product& product) {
  const bool bias = product.epilogue.bias;
  const Activation activation = product.epilogue.activation;
  if (product.epilogue.residual) return {};
  if (product.epilogue.gate != Gate::none) return {.after = product.epilogue};
  if (activation == Activation::none) return {bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT, bias, {}};
  if (activation == Activation::relu) return {bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU, bias, {}};
  if (activation == Activation::gelu_tanh && product.c != DType::fp32)
    return {bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU, bias, {}};
  // The bias waits for add_bias_act, which adds it in float.
  return {.after = product.epilogue};
}

void cublas_check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  FTBERT_CHECK(status != CUBLAS_STATUS_ALLOC_FAILED, call,
               ": out of GPU memory: use a smaller batch or fewer tokens a call; the model stays usable");
  fail(call, " failed: ", cublasLtGetStatusString(status), " (", cublasLtGetStatusName(status), ")");
}

size_t ProductHash::operator()(const Product& p) const {
  Hash hash;
  for (const int64_t value : {p.m, p.n, p.k, p.batch}) hash.mix(static_cast<uint64_t>(value));
  const Epilogue& e = p.epilogue;
  hash.mix(static_cast<uint64_t>(e.activation) << 40 | static_cast<uint64_t>(p.a) << 32 |
           static_cast<uint64_t>(p.b->numbers) << 24 | static_cast<uint64_t>(p.c) << 16 |
           static_cast<uint64_t>(p.before) << 13 | static_cast<uint64_t>(e.after) << 10 |
           static_cast<uint64_t>(e.norm) << 8 | static_cast<uint64_t>(e.gate) << 4 | e.residual << 2 | e.bias << 1 |
           static_cast<int>(p.b_transposed));
  hash.mix(static_cast<uint64_t>(e.heads.columns) << 32 | static_cast<uint64_t>(e.heads.size) << 1 | e.heads.whole);
  return static_cast<size_t>(hash.value);
}

size_t PlanKeyHash::operator()(const PlanKey& key) const {
  Hash hash{ProductHash()(key.product)};
  hash.mix(static_cast<uint64_t>(key.workspace) << 3 | key.cached << 2 | key.in_step << 1 | key.tf32);
  hash.mix(uint64_t{key.align_a} << 32 | uint64_t{key.align_b} << 16 | key.align_c);
  return static_cast<size_t>(hash.value);
}

ProductPlans::ProductPlans(int device) {
  const DeviceGuard guard(device);  // a handle belongs to the device that is current here
  FTBERT_CUBLAS_CHECK(cublasLtCreate(&handle));
  gpu_ = cuda_context(device, nullptr);
}

Plan ProductPlans::get(const PlanKey& key, const void* bias) {
  std::shared_ptr<const Table> table;
  {
    const std::shared_lock lock(mutex_);
    if (const auto it = plans_.find(key); it != plans_.end()) return it->second;
    table = table_;
  }
  // Outside the lock: two threads may make the same plan once, and none waits for another's heuristic.
  Plan plan;
  if (key.in_step || !(is_plain(key.product) || key.product.epilogue.normed())) {
    plan.own = whole(key, bias), plan.supported = static_cast<bool>(plan.own);
  } else {
    const CublasEpilogue epilogue = cublas_epilogue(key.product);
    plan = make(key, epilogue, bias, *table);
    if (!plan.supported && epilogue.inside != CUBLASLT_EPILOGUE_DEFAULT)  // nothing with this epilogue
      plan = make(key, {.after = key.product.epilogue}, bias, *table);
  }
  const std::unique_lock lock(mutex_);
  if (table != table_) return plan;  // right for this call, but not to be kept
  if (plans_.size() >= kMostPlans) plans_.clear();
  plans_.emplace(key, plan);
  return plan;
}

OwnChoice ProductPlans::own(const PlanKey& key, const void* bias) {
  {
    const std::shared_lock lock(mutex_);
    if (const auto it = plans_.find(key); it != plans_.end()) return it->second.own;
  }
  return get(key, bias).own;
}

void ProductPlans::set_table(const std::vector<TunedRow>& rows) {
  auto table = std::make_shared<Table>();
  for (const TunedRow& row : rows) (*table)[without_m(row.product)][row.to] = row;
  const std::unique_lock lock(mutex_);
  table_ = std::move(table);
  plans_.clear();
}

Plan ProductPlans::describe(const PlanKey& key, const CublasEpilogue& epilogue, const void* bias) {
  const Product& p = key.product;
  Plan plan{.epilogue = epilogue};
  FTBERT_CUBLAS_CHECK(cublasLtMatmulDescInit(&plan.operation,
                                             key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F));
  // Column-major C^T [n, m] = op(B) A^T: cuBLASLt's first operand is our B. B [n, k] is its [k, n], to be transposed.
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue.inside);
  if (epilogue.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  if (p.a == DType::e4m3) set(plan.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});

  set_layout(plan.a, cuda_type(p.a), p.m, p.k, p.batch);
  set_layout(plan.b, cuda_type(p.b->numbers), p.b_transposed ? p.n : p.k, p.b_transposed ? p.k : p.n, p.batch);
  set_layout(plan.c, cuda_type(p.c), p.m, p.n, p.batch);
  return plan;
}

bool ProductPlans::accepts(const PlanKey& key, Plan plan, const cublasLtMatmulAlgo_t& algorithm) const {
  cublasLtMatmulHeuristicResult_t found{};
  const cublasStatus_t status =
      cublasLtMatmulAlgoCheck(handle, &plan.operation, &plan.b, &plan.a, &plan.c, &plan.c, &algorithm, &found);
  return status == CUBLAS_STATUS_SUCCESS && found.workspaceSize <= static_cast<size_t>(key.workspace);
}

std::vector<cublasLtMatmulHeuristicResult_t> ProductPlans::propose(const PlanKey& key, Plan plan, int most) const {
  cublasLtMatmulPreferenceOpaque_t preference;
  FTBERT_CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(key.workspace));
  // A split sum is added in float: never in 16-bit output elements.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.align_b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.align_a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.align_c));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.align_c));

  std::vector<cublasLtMatmulHeuristicResult_t> results(most);
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &plan.operation, &plan.b, &plan.a, &plan.c,
                                                               &plan.c, &preference, most, results.data(), &found);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) FTBERT_CUBLAS_CHECK(status);
  results.resize(found);
  std::erase_if(results, [&key](const cublasLtMatmulHeuristicResult_t& result) {
    return result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > static_cast<size_t>(key.workspace);
  });
  return results;
}

void ProductPlans::run(const PlanKey& key, Plan plan, const ProductData& data, void* workspace, void* stream) const {
  if (plan.epilogue.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, data.bias);
  const float one = 1.0f, zero = 0.0f;
  FTBERT_CUBLAS_CHECK(cublasLtMatmul(handle, &plan.operation, &one, data.b, &plan.b, data.a, &plan.a, &zero, data.c,
                                     &plan.c, data.c, &plan.c, &plan.algorithm, workspace,
                                     static_cast<size_t>(key.workspace), static_cast<cudaStream_t>(stream)));
}

// The table's row for this product, or nullptr.
const TunedRow* ProductPlans::row_of(const Product& product, const Table& table) {
  const auto find = [&](const Product& wanted) -> const TunedRow* {
    const auto rows = table.find(without_m(wanted));
    if (rows == table.end()) return nullptr;
    const auto row = rows->second.lower_bound(product.m);
    return row == rows->second.end() || row->second.from > product.m ? nullptr : &row->second;
  };
  const TunedRow* row = find(product);
  if (row || cublas_epilogue(product).after == Epilogue{} || product.epilogue.gate != Gate::none) return row;
  // The fastest product without an activation is mostly the fastest with an activation behind it. A gate halves the
  // stored result.
  Product plain = product;
  plain.epilogue = {};
  return find(plain);
}

// Whether the row's choice can run; the plan then says so.
bool ProductPlans::follows(const PlanKey& key, const TunedRow& row, Plan& plan) const {
  if (row.own) {
    // Also where the row is the plain product's: the kernel has to apply this one's epilogue.
    if (!row.own.kernel->can(gpu_, row.own.variant, key.product)) return false;
    plan.own = row.own;
    return true;
  }
  if (key.product.epilogue.residual || has_scales(key.product)) return false;
  std::copy(row.algorithm.begin(), row.algorithm.end(), plan.algorithm.data);
  return accepts(key, plan, plan.algorithm);
}

// The kernel of ours that does all of a product which is more than the product alone: mostly that of the product alone,
// whose time hardly depends on its ending.
OwnChoice ProductPlans::whole(const PlanKey& key, const void* bias) {
  const Product& p = key.product;
  if (std::min({key.align_a, key.align_b, key.align_c}) < 16) return {};
  if (p.before == Before::norm_rows || (p.epilogue.residual && p.epilogue.after == After::nothing))
    return guess_product(gpu_, p);
  if (key.in_step) {  // as if a norm stood before it: the kernels on both sides hide its start
    Product normed = p;
    normed.before = Before::norm_rows;
    return guess_product(gpu_, normed);
  }
  PlanKey alone = key;
  alone.product = p.alone(), alone.cached = false;
  const Plan part = get(alone, bias);
  OwnChoice own = part.own;
  // For the product alone cuBLASLt is faster, as guessed or measured.
  if (!own && p.epilogue.heads && !key.cached) own = guess_product(gpu_, p);
  // Whether a layer's four pay is asked of them together (deferring_pays). They have variants that the product alone
  // has not: on Hopper those of wgmma_tile in place of wgmma_persistent.
  const bool deferring = p.before == Before::norm_by_moments || p.epilogue.leaves_moments();
  const bool guessed = !gpu_.warpgroups || own.kernel == &wgmma_persistent;
  if (deferring && guessed && !part.by_row) own = guess_product(gpu_, p);
  return with_ending(gpu_, own, p);
}

Plan ProductPlans::make(const PlanKey& key, const CublasEpilogue& epilogue, const void* bias,
                        const Table& table) const {
  const Product& p = key.product;
  const bool with_norm = p.epilogue.normed();
  if (p.b->block > 0) {  // which cuBLASLt cannot be told of
    Plan ours;
    ours.own = guess_product(gpu_, p);
    ours.supported = static_cast<bool>(ours.own);
    return ours;
  }
  Plan plan = describe(key, epilogue, bias);
  // Tables are made with aligned memory; a product that is not goes to the heuristic, which knows.
  const bool plain =
      p.batch == 1 && p.b_transposed && !key.tf32 && std::min({key.align_a, key.align_b, key.align_c}) >= 16;
  const TunedRow* row = plain ? row_of(p, table) : nullptr;
  const bool proposal = row && row->is_first_proposal() && !has_scales(p);  // cuBLASLt proposes none with scales
  plan.by_row = row && (proposal || !row->is_first_proposal());
  if (row && !proposal && follows(key, *row, plan)) {
    plan.supported = true;
    return plan;
  }
  const bool decided = row && (proposal || with_norm);
  if (plain && !decided) {
    plan.own = guess_product(gpu_, p);
    plan.supported = static_cast<bool>(plan.own);
    if (plan.supported) return plan;
  }
  if (with_norm || has_scales(p)) return plan;
  if (const auto proposed = propose(key, plan, 8); !proposed.empty()) {
    plan.algorithm = proposed.front().algo;
    plan.supported = true;
  }
  return plan;
}

ProductPlans* product_plans(int device) {
  // Never freed: at process exit the driver may be gone first.
  static std::mutex& mutex = *new std::mutex;
  static auto& plans = *new std::map<int, std::unique_ptr<ProductPlans>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<ProductPlans>& found = plans[device];
  if (!found) found = std::make_unique<ProductPlans>(device);
  return found.get();
}

void set_table(int device, const std::vector<TunedRow>& rows) { product_plans(device)->set_table(rows); }

bool is_known(std::string_view kernel, std::string_view variant) {
  return static_cast<bool>(find_own(kernel, variant));
}

size_t gemm_workspace_bytes(int device) {
  // NVIDIA's advice for cuBLAS on Hopper and before it.
  return cuda_context(device, nullptr).capability >= 90 ? size_t{32} << 20 : kLeastWorkspaceBytes;
}

std::string gemm_library_version() {
  const size_t version = cublasLtGetVersion();
  return "cuBLASLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace ftbert
