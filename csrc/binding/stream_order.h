// Memory on which calls work one after the other, whatever streams they come on.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "binding/tensors.h"
#include "core/graph.h"

namespace ftbert::binding {

// Turns follow each other as the host takes them, one at a time; its owner sees to that. Nothing on the CPU.
class StreamOrder {
 public:
  explicit StreamOrder(at::Device device) : device_(device), last_(device.is_cuda() ? make_stream_mark() : nullptr) {}

  // The device's current stream waits for what the turns before have launched. The device must be current.
  class Turn {
   public:
    explicit Turn(StreamOrder& order) : order_(order) { order.begin(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() {
      try {
        order_.end();
      } catch (const Error&) {  // the GPU is lost; the next call says so
      }
    }

   private:
    StreamOrder& order_;
  };

  // In a turn: memory that later turns use too, on other streams than the one that it was made on.
  void keep(at::Tensor memory) {
    if (last_) kept_.push_back(std::move(memory));
  }
  void forget(const at::Tensor& memory) {
    std::erase_if(kept_, [&](const at::Tensor& kept) { return kept.is_same(memory); });
  }

 private:
  void begin() {
    if (!last_) return;
    const c10::impl::VirtualGuardImpl torch(device_.type());
    const c10::Stream now = torch.getStream(device_);
    stream_ = now.native_handle();
    last_->wait(stream_);  // also where it looks like the same stream: handles are used again
    if (used_ && *used_ != now)
      for (const at::Tensor& memory : kept_) torch.recordDataPtrOnStream(memory.storage().data_ptr(), now);
    used_ = now;
  }
  void end() {
    if (last_) last_->set(stream_);
  }

  at::Device device_;
  std::unique_ptr<StreamMark> last_;
  std::vector<at::Tensor> kept_;
  std::optional<c10::Stream> used_;  // by the turn before
  void* stream_ = nullptr;
};

}  // namespace ftbert::binding
