#include <map>
#include <mutex>

#include "core/check.h"
#include "core/cuda_owners.h"
#include "core/device.h"

namespace ftbert {
namespace {

// Is never launched: whether it can be loaded tells whether the build has code for the GPU. The driver's answer, unlike
// a comparison of version numbers, also covers PTX compiled at start.
__global__ void probe_kernel() {}

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

std::string missing_driver() {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) return "no NVIDIA driver is installed on this machine";
  if (driver < runtime)
    return "the NVIDIA driver supports CUDA " + version(driver) + ", but this build needs CUDA " + version(runtime) +
           ": update the driver";
  return "";
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  FTBERT_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

Context<Cuda> inspect(int device) {
  const std::string why_not = why_no_cuda();
  FTBERT_CHECK(why_not.empty(), "CUDA is not available: ", why_not);
  int count = 0;
  FTBERT_CUDA_CHECK(cudaGetDeviceCount(&count));
  FTBERT_CHECK(device >= 0 && device < count, "expected a CUDA device from 0 to ", count - 1, ", got ", device);
  Context<Cuda> context;
  context.device = device;
  context.sm_count = attribute(cudaDevAttrMultiProcessorCount, device);
  context.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  context.capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  const DeviceGuard guard(device);
  cudaFuncAttributes attributes;
  FTBERT_CUDA_CHECK(cudaFuncGetAttributes(&attributes, probe_kernel));
  return context;
}

}  // namespace

std::string why_no_cuda() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return "";
  cudaGetLastError();
  if (const std::string missing = missing_driver(); !missing.empty()) return missing;
  return std::string("no NVIDIA GPU is visible (") +
         cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error) + "); CUDA_VISIBLE_DEVICES may hide it";
}

Context<Cuda> cuda_context(int device, void* stream) {
  // Never freed: at process exit the driver may be gone first.
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, Context<Cuda>>& known = *new std::map<int, Context<Cuda>>;
  const std::lock_guard lock(mutex);
  auto it = known.find(device);
  if (it == known.end()) it = known.emplace(device, inspect(device)).first;
  Context<Cuda> context = it->second;
  context.stream = stream;
  return context;
}

void copy_on_device(const Context<Cuda>& context, const void* from, void* to, size_t bytes) {
  FTBERT_CUDA_CHECK(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(context.stream)));
}

void clear_on_device(const Context<Cuda>& context, void* at, size_t bytes) {
  FTBERT_CUDA_CHECK(cudaMemsetAsync(at, 0, bytes, static_cast<cudaStream_t>(context.stream)));
}

}  // namespace ftbert
