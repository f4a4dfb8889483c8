// Destroying a graph, a stream or an event is refused while the thread records a stream, or another thread does so in
// CUDA's global mode, and that recording is lost: a model that Python's collector takes just then would spoil it.
#pragma once
#include <cuda_runtime_api.h>

namespace ftbert {

// For a scope, the thread may do what a recording under way forbids. What it does must have nothing to do with that
// recording.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&other_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&other_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode other_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace ftbert
