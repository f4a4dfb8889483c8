// What device.h, graph.h, gemm/gemm_cuda.h and gemm/gemm_tuner.h promise, in a build without CUDA.
#include "core/check.h"
#include "core/device.h"
#include "core/graph.h"
#include "gemm/gemm_cuda.h"
#include "gemm/gemm_fused.h"
#include "gemm/gemm_layernorm.h"
#include "gemm/gemm_tuner.h"

namespace ftbert {
namespace {
constexpr const char* kNoCuda = "this build of ftbert has no CUDA: rebuild with FTBERT_CUDA=ON (needs nvcc)";
}  // namespace

bool cuda_available(std::string* why_not) {
  if (why_not) *why_not = kNoCuda;
  return false;
}

Context<Cuda> cuda_context(int, void*) { throw Error(kNoCuda); }
void copy_on_device(const Context<Cuda>&, const void*, void*, size_t) { throw Error(kNoCuda); }
std::string cuda_archs() { return ""; }
std::string architecture_mismatch(int) { return kNoCuda; }

std::unique_ptr<LaunchGraph> record_graph(const std::function<void(void*)>&) { throw Error(kNoCuda); }
bool is_recording(void*) { throw Error(kNoCuda); }
std::unique_ptr<StreamMark> make_stream_mark() { throw Error(kNoCuda); }

void run_fused_gemm(const Context<Cuda>&, int, const FusedGemm&) { throw Error(kNoCuda); }
void run_norm_gemm(const Context<Cuda>&, int, const NormGemm&) { throw Error(kNoCuda); }

GemmPlans* gemm_plans(int) { throw Error(kNoCuda); }
size_t gemm_workspace_bytes(int) { throw Error(kNoCuda); }
std::string gemm_library_version() { return ""; }
bool is_known(const std::array<uint64_t, 8>&) { return true; }
std::unique_ptr<GemmTuner> make_gemm_tuner(int, const GemmProblem&, void*) { throw Error(kNoCuda); }
void set_gemm_table(int, const std::vector<TunedGemm>&) { throw Error(kNoCuda); }

}  // namespace ftbert
