#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>

#include "core/check.h"
#include "core/cuda_owners.h"
#include "core/device.h"

namespace ftbert {
namespace {

// Is never launched: whether it can be loaded tells whether the build has code for the GPU, and its attributes which
// code the driver has picked. The driver's answer, unlike a comparison of version numbers, also covers PTX compiled at
// start.
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

struct Inspected {
  Gpu gpu;
  std::string why;  // it is held to a lesser GPU, or ""
};

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  FTBERT_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

// Of rates, which not every driver tells: 0 then.
int rate(cudaDeviceAttr which, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, device) != cudaSuccess) cudaGetLastError();
  return value;
}

// Both edges of the memory's clock, in kHz, move as many bits as the bus is wide.
double bandwidth(int device) {
  return 2e3 / 8 * rate(cudaDevAttrMemoryClockRate, device) * rate(cudaDevAttrGlobalMemoryBusWidth, device);
}

Inspected inspect(int device) {
  const std::string why_not = why_no_cuda();
  FTBERT_CHECK(why_not.empty(), "CUDA is not available: ", why_not);
  int count = 0;
  FTBERT_CUDA_CHECK(cudaGetDeviceCount(&count));
  FTBERT_CHECK(device >= 0 && device < count, "expected a CUDA device from 0 to ", count - 1, ", got ", device);
  const DeviceGuard guard(device);
  cudaFuncAttributes code;
  FTBERT_CUDA_CHECK(cudaFuncGetAttributes(&code, probe_kernel));

  const int own =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  const char* const wish = std::getenv("FTBERT_MAX_GPU");
  const GpuLevel level = gpu_level(own, code.ptxVersion, wish ? wish : "");
  // Where the list has 90a, a Hopper runs it: the driver takes compiled code before PTX.
  const bool for_hopper = std::string_view(FTBERT_CUDA_ARCHS_STRING).find("90a") != std::string_view::npos;
  const Gpu gpu{.sm_count = attribute(cudaDevAttrMultiProcessorCount, device),
                .device_capability = own,
                .warpgroups = own == 90 && for_hopper,
                .shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                .shared_bytes_of_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
                .clock_khz = rate(cudaDevAttrClockRate, device),
                .l2_bytes = attribute(cudaDevAttrL2CacheSize, device),
                .bandwidth = bandwidth(device)};
  return {held_to(gpu, level.capability), level.why};
}

// Of a device, found out once.
const Inspected& inspected(int device) {
  // Never freed: at process exit the driver may be gone first.
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, Inspected>& known = *new std::map<int, Inspected>;
  const std::lock_guard lock(mutex);
  auto it = known.find(device);
  if (it == known.end()) it = known.emplace(device, inspect(device)).first;
  return it->second;
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
  Context<Cuda> context;
  static_cast<Gpu&>(context) = inspected(device).gpu;
  context.device = device;
  context.stream = stream;
  return context;
}

std::string why_held(int device) { return inspected(device).why; }

void copy_on_device(const Context<Cuda>& context, const void* from, void* to, size_t bytes) {
  FTBERT_CUDA_CHECK(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(context.stream)));
}

void clear_on_device(const Context<Cuda>& context, void* at, size_t bytes) {
  FTBERT_CUDA_CHECK(cudaMemsetAsync(at, 0, bytes, static_cast<cudaStream_t>(context.stream)));
}

}  // namespace ftbert
