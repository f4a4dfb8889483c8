// CUDA graphs and what orders streams, for the binding. No CUDA header: graph_cuda.cpp, or device_none.cpp in a build
// without CUDA. Everything belongs to the device that is current when it is made.
#pragma once
#include <functional>
#include <memory>

namespace ftbert {

// Launches that were recorded once and are repeated as one.
class LaunchGraph {
 public:
  virtual ~LaunchGraph() = default;
  virtual void launch(void* stream) const = 0;
};

// Records what `work` launches on the stream that it is given; nothing runs. The kernels must have run once before: a
// recording cannot load them. Throws Error when something in `work` cannot be recorded.
std::unique_ptr<LaunchGraph> record_graph(const std::function<void(void* stream)>& work);

// Whether somebody is recording this stream: what is launched there does not run now.
bool is_recording(void* stream);

// A point in one stream's work that another stream or the host can wait for.
class StreamMark {
 public:
  virtual ~StreamMark() = default;
  virtual void set(void* stream) = 0;
  virtual void wait(void* stream) const = 0;  // the stream's work, not the host; nothing where `set` was never called
  virtual void wait_on_host() const = 0;
};
std::unique_ptr<StreamMark> make_stream_mark();

}  // namespace ftbert
