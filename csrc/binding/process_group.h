// A process group of torch.distributed, through which processes hand each other tensors: gloo's of the CPU, NCCL's of
// GPUs. Where the others have ended or failed, errors say which rank learned of it.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ftbert::binding {

class ProcessGroup {
 public:
  // By its name there. Error where it is not `size` processes, or this one is another than `rank`.
  ProcessGroup(const std::string& name, int64_t rank, int64_t size);

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  // On a GPU the current stream waits, not the host. Tensors are contiguous; nothing is sent of an empty one.
  void all_reduce(at::Tensor sums) const;
  void broadcast(at::Tensor tensor, int64_t from) const;
  void receive(at::Tensor tensor, int64_t from) const;
  // Returns when the tensor is on its way; Sent waits until it need not be kept.
  class Sent;
  Sent send(at::Tensor tensor, int64_t to) const;

 private:
  void finish(const std::function<c10::intrusive_ptr<c10d::Work>()>& start) const;
  void attempt(const std::function<void()>& work) const;  // with errors in our words
  [[noreturn]] void lost(const std::string& why) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int64_t rank_, size_;
};

class ProcessGroup::Sent {
 public:
  void wait() const {
    if (work_) group_.finish([&] { return work_; });
  }

 private:
  friend class ProcessGroup;
  Sent(const ProcessGroup& group, at::Tensor tensor, c10::intrusive_ptr<c10d::Work> work)
      : group_(group), tensor_(std::move(tensor)), work_(std::move(work)) {}
  const ProcessGroup& group_;
  at::Tensor tensor_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace ftbert::binding
