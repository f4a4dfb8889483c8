// Memory on which calls work one after the other, whatever streams they come on.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "binding/tensors.h"
#include "core/graph.h"

namespace ftbert::binding {

// Uses follow each other as the host begins them, one at a time; the owner of the memory sees to that. Nothing on the
// CPU.
class StreamOrder {
 public:
  explicit StreamOrder(at::Device device) : device_(device), last_(device.is_cuda() ? make_stream_mark() : nullptr) {}

  // The device's current stream waits for the kernels of the uses before. The device must be current.
  void begin() {
    if (!last_) return;
    const c10::impl::VirtualGuardImpl torch(device_.type());
    const c10::Stream now = torch.getStream(device_);
    stream_ = native_handle(now);
    last_->wait(stream_);  // also where it looks like the same stream: handles are used again
    if (used_ && *used_ != now)
      for (const at::Tensor& memory : kept_) torch.recordDataPtrOnStream(memory.storage().data_ptr(), now);
    used_ = now;
  }
  void end() noexcept {
    try {
      if (last_) last_->set(stream_);
    } catch (const Error&) {  // the GPU is lost; the next call says so
    }
  }

  class Use {
   public:
    explicit Use(StreamOrder& order) : order_(order) { order.begin(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() { order_.end(); }

   private:
    StreamOrder& order_;
  };

  // In a use: memory that later uses read too, on other streams than the stream that it was made on.
  void keep(at::Tensor memory) {
    if (last_) kept_.push_back(std::move(memory));
  }
  void forget(const at::Tensor& memory) {
    std::erase_if(kept_, [&](const at::Tensor& kept) { return kept.is_same(memory); });
  }

 private:
  at::Device device_;
  std::unique_ptr<StreamMark> last_;
  std::vector<at::Tensor> kept_;
  std::optional<c10::Stream> used_;  // by the use before
  void* stream_ = nullptr;
};

}  // namespace ftbert::binding
