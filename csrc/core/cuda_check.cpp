#include "core/cuda_check.h"

#include <string>
#include <string_view>

#include "core/check.h"

namespace ftbert {
namespace {

// "csrc/..." whatever folder the build ran in.
std::string_view source_file(std::string_view path) {
  const size_t at = path.rfind("csrc/");
  return at == std::string_view::npos ? path : path.substr(at);
}

const char* advice(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of GPU memory: use a smaller batch or fewer tokens a call; the model stays usable";
    case cudaErrorInsufficientDriver:
      return "the NVIDIA driver is missing or older than the CUDA runtime of this build: update the driver";
    case cudaErrorUnsupportedPtxVersion:
      return "the NVIDIA driver is too old to compile this build's PTX for this GPU: update the driver, or rebuild "
             "with FTBERT_CUDA_ARCHS set to this GPU's architecture";
    // These are sticky: every later call in the process fails with them.
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
      return "this process can no longer use the GPU: restart it (the fault may lie in work started before this call)";
    default: return "";
  }
}

}  // namespace

void throw_cuda_error(cudaError_t error, const char* what, const char* file, int line) {
  cudaGetLastError();
  std::string message = std::string(what) + " failed at " + std::string(source_file(file)) + ":" +
                        std::to_string(line) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess)
      message += "; this build of ftbert has no code for this GPU: its compute capability is " + std::to_string(major) +
                 "." + std::to_string(minor) +
                 ", the build has " FTBERT_CUDA_ARCHS_STRING "; rebuild with FTBERT_CUDA_ARCHS=" +
                 std::to_string(10 * major + minor);
  } else if (const char* words = advice(error); *words) {
    message += std::string("; ") + words;
  }
  throw Error(message);
}

}  // namespace ftbert
