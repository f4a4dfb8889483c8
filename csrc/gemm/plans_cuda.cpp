// Choosing: a plan for each key from the tuned table or cuBLASLt's heuristic, kept until there is another table.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/check.h"
#include "core/cuda_check.h"
#include "core/device_guard.h"
#include "gemm/cublaslt.h"
#include "gemm/guess.h"
#include "gemm/own/own.h"
#include "gemm/own/wgmma_layernorm.h"
#include "gemm/plans.h"

namespace ftbert {
namespace {

// Packed tokens give every m, and a plan is about 600 bytes. A full map starts over: refilling costs one heuristic a
// shape, tens of microseconds.
constexpr size_t kMostPlans = 8192;

cudaDataType_t data_type(DType dtype) {
  return dtype == DType::fp16 ? CUDA_R_16F : dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

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

// All of it, whether cuBLASLt would fuse it or not.
Activation activation_of(const GemmKey& key) {
  switch (key.epilogue) {
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_RELU_BIAS: return Activation::relu;
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_BIAS: return Activation::gelu_tanh;
    default: return key.after;
  }
}

}  // namespace

void cublas_check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  FTBERT_CHECK(status != CUBLAS_STATUS_ALLOC_FAILED, call,
               ": out of GPU memory: use a smaller batch or fewer tokens a call; the model stays usable");
  fail(call, " failed: ", cublasLtGetStatusString(status), " (", cublasLtGetStatusName(status), ")");
}

size_t GemmKeyHash::operator()(const GemmKey& key) const {
  uint64_t hash = 0;
  const auto mix = [&hash](uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  };
  for (const int64_t value : {key.m, key.n, key.k, key.batch, key.workspace}) mix(static_cast<uint64_t>(value));
  mix(static_cast<uint64_t>(key.epilogue) << 32 | static_cast<uint64_t>(key.after) << 16 |
      static_cast<uint64_t>(key.dtype) << 8 | key.layernorm << 3 | key.float_out << 2 | key.b_transposed << 1 |
      static_cast<int>(key.tf32));
  mix(uint64_t{key.align_a} << 32 | uint64_t{key.align_b} << 16 | key.align_c);
  return static_cast<size_t>(hash);
}

GemmPlans::GemmPlans(int device) {
  const DeviceGuard guard(device);  // a handle belongs to the device that is current here
  FTBERT_CUBLAS_CHECK(cublasLtCreate(&handle));
  int major = 0, minor = 0;
  FTBERT_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  FTBERT_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  capability_ = 10 * major + minor;
  FTBERT_CUDA_CHECK(cudaDeviceGetAttribute(&sm_count_, cudaDevAttrMultiProcessorCount, device));
  FTBERT_CUDA_CHECK(cudaDeviceGetAttribute(&shared_bytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

GemmPlan GemmPlans::get(const GemmKey& key, const void* bias) {
  std::shared_ptr<const Table> table;
  {
    const std::shared_lock lock(mutex_);
    if (const auto it = plans_.find(key); it != plans_.end()) return it->second;
    table = table_;
  }
  // Outside the lock: two threads may make the same plan once, and none waits for another's heuristic.
  const GemmPlan plan = make(key, bias, *table);
  const std::unique_lock lock(mutex_);
  if (table != table_) return plan;  // right for this call, but not to be kept
  if (plans_.size() >= kMostPlans) plans_.clear();
  plans_.emplace(key, plan);
  return plan;
}

void GemmPlans::set_table(const std::vector<TunedGemm>& rows) {
  auto table = std::make_shared<Table>();
  for (const TunedGemm& row : rows) {
    const GemmProblem& p = row.problem;
    const FusedEpilogue fused = fuse_epilogue(p.bias && !p.layernorm, p.activation, p.dtype);
    const Activation after = fused.whole ? Activation::none : p.activation;
    (*table)[{p.dtype, fused.epilogue, after, p.layernorm, p.n, p.k}][row.to] = row;
  }
  const std::unique_lock lock(mutex_);
  table_ = std::move(table);
  plans_.clear();
}

GemmPlan GemmPlans::describe(const GemmKey& key, const void* bias) {
  GemmPlan plan;
  FTBERT_CUBLAS_CHECK(cublasLtMatmulDescInit(&plan.operation,
                                             key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F));
  // Column-major C^T [n, m] = op(B) A^T: cuBLASLt's first operand is our B. B [n, k] is its [k, n], to be transposed.
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, key.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, key.epilogue);
  if (bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);

  const cudaDataType_t type = data_type(key.dtype);
  set_layout(plan.a, type, key.m, key.k, key.batch);
  set_layout(plan.b, type, key.b_transposed ? key.n : key.k, key.b_transposed ? key.k : key.n, key.batch);
  set_layout(plan.c, key.float_out ? CUDA_R_32F : type, key.m, key.n, key.batch);
  return plan;
}

bool GemmPlans::accepts(const GemmKey& key, GemmPlan plan, const cublasLtMatmulAlgo_t& algorithm,
                        cublasLtMatmulHeuristicResult_t* result) const {
  cublasLtMatmulHeuristicResult_t found{};
  const cublasStatus_t status =
      cublasLtMatmulAlgoCheck(handle, &plan.operation, &plan.b, &plan.a, &plan.c, &plan.c, &algorithm, &found);
  if (result) *result = found;
  return status == CUBLAS_STATUS_SUCCESS && found.workspaceSize <= static_cast<size_t>(key.workspace);
}

std::vector<cublasLtMatmulHeuristicResult_t> GemmPlans::propose(const GemmKey& key, GemmPlan plan, int most) const {
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

// The table's row for this key, or nullptr.
const TunedGemm* GemmPlans::row_of(const GemmKey& key, const Table& table) {
  const auto find = [&](Activation after) -> const TunedGemm* {
    const auto rows = table.find({key.dtype, key.epilogue, after, key.layernorm, key.n, key.k});
    if (rows == table.end()) return nullptr;
    const auto row = rows->second.lower_bound(key.m);
    return row == rows->second.end() || row->second.from > key.m ? nullptr : &row->second;
  };
  const TunedGemm* row = find(key.after);
  // What is fastest without an activation is mostly the fastest with one behind it.
  return row || key.after == Activation::none || key.layernorm ? row : find(Activation::none);
}

// Whether the row's choice can run; the plan then says so.
bool GemmPlans::follows(const GemmKey& key, const TunedGemm& row, GemmPlan& plan) const {
  const auto& [problem, from, to, data] = row;
  if (key.layernorm) {
    const int variant = norm_variant(data);
    const NormGemm gemm{.m = key.m, .n = key.n, .k = key.k, .dtype = key.dtype};
    if (norm_gemm_supports(capability_, variant, gemm)) plan.norm = variant;
    return plan.norm >= 0;
  }
  if (const int variant = fused_variant(data); variant >= 0) {
    // Also where the row is the plain product's, this one has to apply what comes after.
    const Activation activation = key.after != Activation::none ? key.after : problem.activation;
    const FusedGemm gemm{.m = key.m, .n = key.n, .k = key.k, .dtype = key.dtype, .activation = activation};
    if (!fused_gemm_supports(capability_, shared_bytes_, variant, gemm)) return false;
    plan.fused = variant;
    return true;
  }
  std::copy(data.begin(), data.end(), plan.algorithm.data);
  return accepts(key, plan, plan.algorithm);
}

GemmPlan GemmPlans::make(const GemmKey& key, const void* bias, const Table& table) const {
  GemmPlan plan = describe(key, bias);
  // Tables are made with aligned memory; a product that is not goes to the heuristic, which knows.
  const bool plain = key.batch == 1 && key.b_transposed && !key.float_out && !key.tf32 &&
                     std::min({key.align_a, key.align_b, key.align_c}) >= 16;
  const TunedGemm* row = plain ? row_of(key, table) : nullptr;
  const bool proposal = row && row->algorithm == kFirstProposal;
  if (row && !proposal && follows(key, *row, plan)) {
    plan.supported = true;
    return plan;
  }
  const bool decided = row && (proposal || key.layernorm);
  if (plain && !decided) {
    const GemmProblem problem{.m = key.m,
                              .n = key.n,
                              .k = key.k,
                              .dtype = key.dtype,
                              .activation = activation_of(key),
                              .layernorm = key.layernorm};
    const GemmGuess guess = guess_gemm(capability_, sm_count_, problem);
    plan.fused = guess.fused;
    plan.norm = guess.norm;
    plan.supported = plan.fused >= 0 || plan.norm >= 0;
    if (plan.supported) return plan;
  }
  if (key.layernorm) return plan;
  if (const auto proposed = propose(key, plan, 8); !proposed.empty()) {
    plan.algorithm = proposed.front().algo;
    plan.supported = true;
  }
  return plan;
}

namespace {
// No cublasLtMatmulAlgo_t begins like this.
constexpr uint64_t kFusedMark = 0xf05edull << 44, kNormMark = 0xf05eeull << 44;

std::array<uint64_t, 8> marked(uint64_t mark, int variant) { return {mark | static_cast<uint64_t>(variant)}; }
int variant_of(uint64_t mark, const std::array<uint64_t, 8>& data) {
  return (data[0] & ~uint64_t{0xffff}) == mark ? static_cast<int>(data[0] & 0xffff) : -1;
}
}  // namespace

std::array<uint64_t, 8> fused_algorithm(int variant) { return marked(kFusedMark, variant); }
int fused_variant(const std::array<uint64_t, 8>& data) { return variant_of(kFusedMark, data); }
std::array<uint64_t, 8> norm_algorithm(int variant) { return marked(kNormMark, variant); }
int norm_variant(const std::array<uint64_t, 8>& data) { return variant_of(kNormMark, data); }
bool is_known(const std::array<uint64_t, 8>& data) {
  const int fused = fused_variant(data);
  return norm_variant(data) < norm_gemm_variants() && (fused < 0 || is_fused_gemm(fused));
}

GemmPlans* gemm_plans(int device) {
  // Never freed: at process exit the driver may be gone first.
  static std::mutex& mutex = *new std::mutex;
  static auto& plans = *new std::map<int, std::unique_ptr<GemmPlans>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<GemmPlans>& found = plans[device];
  if (!found) found = std::make_unique<GemmPlans>(device);
  return found.get();
}

void set_gemm_table(int device, const std::vector<TunedGemm>& rows) { gemm_plans(device)->set_table(rows); }

size_t gemm_workspace_bytes(int device) {
  if (device < 0) FTBERT_CUDA_CHECK(cudaGetDevice(&device));
  int major = 0;
  FTBERT_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return size_t{major >= 9 ? 32u : 4u} << 20;  // NVIDIA's advice for cuBLAS on Hopper and before it
}

std::string gemm_library_version() {
  const size_t version = cublasLtGetVersion();
  return "cuBLASLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace ftbert
