// Owners of what CUDA makes, and of the device that is current.
#pragma once
#include <cuda_runtime_api.h>

#include <memory>

#include "core/cuda_check.h"

namespace ftbert {

// Destroying a graph, a stream or an event is refused while the thread records a stream, or another thread does so in
// CUDA's global mode, and that recording is lost: a model that Python's collector takes just then would spoil it. In
// relaxed mode the thread may do what has nothing to do with that recording.
template <auto kDestroy>
struct Destroyer {
  template <class Made>
  void operator()(Made* made) const {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    kDestroy(made);
    cudaThreadExchangeStreamCaptureMode(&mode);
  }
};
using Graph = std::unique_ptr<CUgraph_st, Destroyer<cudaGraphDestroy>>;
using GraphExec = std::unique_ptr<CUgraphExec_st, Destroyer<cudaGraphExecDestroy>>;  // a launch under way ends first
using Event = std::unique_ptr<CUevent_st, Destroyer<cudaEventDestroy>>;
using Stream = std::unique_ptr<CUstream_st, Destroyer<cudaStreamDestroy>>;

inline Event make_event(unsigned flags) {
  cudaEvent_t made = nullptr;
  FTBERT_CUDA_CHECK(cudaEventCreateWithFlags(&made, flags));
  return Event(made);
}
inline Stream make_stream() {
  cudaStream_t made = nullptr;
  FTBERT_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  return Stream(made);
}

// Makes a device the thread's current one for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    FTBERT_CUDA_CHECK(cudaGetDevice(&previous_));
    if (previous_ == device) return;
    FTBERT_CUDA_CHECK(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace ftbert
