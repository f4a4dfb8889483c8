#include <cuda_runtime_api.h>

#include "core/cuda_check.h"
#include "core/graph.h"
#include "core/relaxed_capture.h"

namespace ftbert {
namespace {

class CudaGraph : public LaunchGraph {
 public:
  explicit CudaGraph(cudaGraph_t recorded) { FTBERT_CUDA_CHECK(cudaGraphInstantiate(&exec_, recorded, 0)); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  ~CudaGraph() override {
    const RelaxedCapture relaxed;
    cudaGraphExecDestroy(exec_);  // a launch under way ends first
  }
  void launch(void* stream) const override {
    FTBERT_CUDA_CHECK(cudaGraphLaunch(exec_, static_cast<cudaStream_t>(stream)));
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

class CudaMark : public StreamMark {
 public:
  CudaMark() { FTBERT_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  CudaMark(const CudaMark&) = delete;
  CudaMark& operator=(const CudaMark&) = delete;
  ~CudaMark() override {
    const RelaxedCapture relaxed;
    cudaEventDestroy(event_);
  }
  void set(void* stream) override { FTBERT_CUDA_CHECK(cudaEventRecord(event_, static_cast<cudaStream_t>(stream))); }
  void wait(void* stream) const override {
    FTBERT_CUDA_CHECK(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_, 0));
  }
  void wait_on_host() const override { FTBERT_CUDA_CHECK(cudaEventSynchronize(event_)); }

 private:
  cudaEvent_t event_ = nullptr;
};

struct Stream {
  cudaStream_t stream = nullptr;
  Stream() { FTBERT_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream); }
};

}  // namespace

std::unique_ptr<LaunchGraph> record_graph(const std::function<void(void* stream)>& work) {
  const Stream recording;  // the caller's may be the legacy default stream, which cannot be recorded
  FTBERT_CUDA_CHECK(cudaStreamBeginCapture(recording.stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t recorded = nullptr;
  try {
    work(recording.stream);
  } catch (...) {
    cudaStreamEndCapture(recording.stream, &recorded);
    if (recorded) cudaGraphDestroy(recorded);
    cudaGetLastError();
    throw;
  }
  FTBERT_CUDA_CHECK(cudaStreamEndCapture(recording.stream, &recorded));
  const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> owner(recorded, &cudaGraphDestroy);
  return std::make_unique<CudaGraph>(recorded);
}

bool is_recording(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  FTBERT_CUDA_CHECK(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

std::unique_ptr<StreamMark> make_stream_mark() { return std::make_unique<CudaMark>(); }

}  // namespace ftbert
