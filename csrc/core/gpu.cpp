#include "core/gpu.h"

#include <algorithm>
#include <climits>

#include "core/check.h"

namespace ftbert {
namespace {

// What FTBERT_MAX_GPU may name, and shared memory of GPUs up to that: CUDA C++ Programming Guide, compute capabilities.
// On later ones than Hopper it differs from GPU to GPU.
struct Level {
  int capability, shared_bytes, shared_bytes_of_sm;
};
constexpr Level kLevels[] = {{75, 64 << 10, 64 << 10},
                             {80, 163 << 10, 164 << 10},
                             {86, 99 << 10, 100 << 10},
                             {89, 99 << 10, 100 << 10},
                             {90, INT_MAX, INT_MAX}};

int level_of(std::string_view wish) {
  std::string names;
  for (const Level& level : kLevels) {
    const std::string name = std::to_string(level.capability);
    if (name == wish) return level.capability;
    names += (names.empty() ? "" : ", ") + name;
  }
  throw Error("FTBERT_MAX_GPU: expected one of " + names + ", got " + std::string(wish));
}

}  // namespace

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

std::string capability_text(const Gpu& gpu) {
  const std::string own = capability_text(gpu.device_capability);
  return gpu.capability == gpu.device_capability ? own : own + " (held to " + capability_text(gpu.capability) + ")";
}

GpuLevel gpu_level(int device, int code, std::string_view wish) {
  const int most = wish.empty() ? INT_MAX : level_of(wish);
  FTBERT_CHECK(code <= most, "FTBERT_MAX_GPU=", wish, ": on this GPU of compute capability ", capability_text(device),
               " the code for ", capability_text(code),
               " of this build runs, in which kernels for lesser GPUs are left out; build with FTBERT_CUDA_ARCHS=",
               wish, "-virtual");
  const int counts = std::min({device, code, most});
  if (counts == device) return {counts, ""};
  return {counts, "the code of this build that runs here is for " + capability_text(code) +
                      (wish.empty() ? "" : ", as FTBERT_MAX_GPU=" + std::string(wish) + " asks")};
}

Gpu held_to(Gpu gpu, int capability) {
  gpu.capability = capability;
  if (capability == gpu.device_capability) return gpu;
  if (capability < 90) gpu.warpgroups = 0;
  for (const Level& level : kLevels) {
    if (capability > level.capability) continue;
    gpu.shared_bytes = std::min(gpu.shared_bytes, level.shared_bytes);
    gpu.shared_bytes_of_sm = std::min(gpu.shared_bytes_of_sm, level.shared_bytes_of_sm);
    break;
  }
  return gpu;
}

}  // namespace ftbert
