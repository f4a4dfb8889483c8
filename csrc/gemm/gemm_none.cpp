// What the headers of gemm/ promise of a GPU, in a build without CUDA.
#include "core/check.h"
#include "core/device_none.h"
#include "gemm/cublaslt.h"
#include "gemm/own/own.h"
#include "gemm/own/wgmma_layernorm.h"
#include "gemm/tuner/tuner.h"

namespace ftbert {

void run_fused_gemm(const Context<Cuda>&, int, const FusedGemm&) { throw Error(kNoCuda); }
void run_norm_gemm(const Context<Cuda>&, int, const NormGemm&) { throw Error(kNoCuda); }

GemmPlans* gemm_plans(int) { throw Error(kNoCuda); }
size_t gemm_workspace_bytes(int) { throw Error(kNoCuda); }
std::string gemm_library_version() { return ""; }
bool is_known(const std::array<uint64_t, 8>&) { return true; }
std::unique_ptr<GemmTuner> make_gemm_tuner(int, const GemmProblem&, void*) { throw Error(kNoCuda); }
void set_gemm_table(int, const std::vector<TunedGemm>&) { throw Error(kNoCuda); }

}  // namespace ftbert
