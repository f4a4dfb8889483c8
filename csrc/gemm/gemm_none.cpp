// What the headers of gemm/ promise of a GPU, in a build without CUDA.
#include "core/check.h"
#include "core/device.h"
#include "gemm/gemm.h"
#include "gemm/gpu/own.h"
#include "gemm/table.h"
#include "gemm/tuner/tuner.h"

namespace ftbert {

std::span<const OwnKernel* const> own_kernels() { return {}; }
std::string kernels_on(const Gpu&) { return ""; }
OwnChoice guess_product(const Gpu&, const Product&) { return {}; }
OwnChoice find_own(std::string_view, std::string_view) { return {}; }
void run_own(const Context<Cuda>&, const OwnChoice&, const Product&, const ProductData&) { throw Error(kNoCuda); }

ProductPlans* product_plans(int) { throw Error(kNoCuda); }
size_t gemm_workspace_bytes(int) { throw Error(kNoCuda); }
std::string gemm_library_version() { return ""; }
bool is_known(std::string_view, std::string_view) { return true; }
std::unique_ptr<Tuner> make_tuner(int, const Product&, void*, const float*) { throw Error(kNoCuda); }
void set_table(int, const std::vector<TunedRow>&) { throw Error(kNoCuda); }

}  // namespace ftbert
