#include <cuda_runtime_api.h>

#include "core/cuda_check.h"
#include "core/cuda_owners.h"
#include "core/graph.h"

namespace ftbert {
namespace {

class CudaGraph : public LaunchGraph {
 public:
  explicit CudaGraph(const Graph& recorded) {
    cudaGraphExec_t made = nullptr;
    FTBERT_CUDA_CHECK(cudaGraphInstantiate(&made, recorded.get(), 0));
    exec_.reset(made);
  }
  void launch(void* stream) const override {
    FTBERT_CUDA_CHECK(cudaGraphLaunch(exec_.get(), static_cast<cudaStream_t>(stream)));
  }

 private:
  GraphExec exec_;
};

class CudaMark : public StreamMark {
 public:
  void set(void* stream) override {
    FTBERT_CUDA_CHECK(cudaEventRecord(event_.get(), static_cast<cudaStream_t>(stream)));
  }
  void wait(void* stream) const override {
    FTBERT_CUDA_CHECK(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_.get(), 0));
  }
  void wait_on_host() const override { FTBERT_CUDA_CHECK(cudaEventSynchronize(event_.get())); }

 private:
  const Event event_ = make_event(cudaEventDisableTiming);
};

}  // namespace

std::unique_ptr<LaunchGraph> record_graph(const std::function<void(void* stream)>& work) {
  const Stream recording = make_stream();  // the caller's may be the legacy default stream, which cannot be recorded
  FTBERT_CUDA_CHECK(cudaStreamBeginCapture(recording.get(), cudaStreamCaptureModeThreadLocal));
  cudaGraph_t recorded = nullptr;
  try {
    work(recording.get());
  } catch (...) {
    cudaStreamEndCapture(recording.get(), &recorded);
    const Graph owner(recorded);
    cudaGetLastError();
    throw;
  }
  FTBERT_CUDA_CHECK(cudaStreamEndCapture(recording.get(), &recorded));
  return std::make_unique<CudaGraph>(Graph(recorded));
}

bool is_recording(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  FTBERT_CUDA_CHECK(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

std::unique_ptr<StreamMark> make_stream_mark() { return std::make_unique<CudaMark>(); }

}  // namespace ftbert
