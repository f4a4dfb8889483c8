// A process group of torch.distributed, through which processes hand each other tensors: gloo's of the CPU, NCCL's of
// GPUs. Where the others have ended or failed, errors say which rank learned of it. Every process makes the same calls:
// what each says of its own is compared before they depend on each other.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ftbert::binding {

// Which processes share a model. comparisons: the name of a group of the same ones that takes tensors of the CPU,
// through which calls are compared; "": they are not. contents: of tensors on a GPU too, for which each call then
// waits. model: which one it is, for people.
struct Processes {
  std::string group, comparisons;
  bool contents = false;
  std::string model;
};

class ProcessGroup {
 public:
  // By its name there. Error where it is not `size` processes, or this one is another than `rank`.
  ProcessGroup(const Processes& processes, int64_t rank, int64_t size);

  bool compares() const { return bool(comparisons_); }
  bool contents() const { return contents_; }
  // Sends the others the lines (binding/call_words.h) of the call that this rank is about to make, and returns.
  // `compare` waits for theirs: Error in the same words on every rank where one makes another call. So does whatever
  // depends on the others, below. Calls follow each other.
  void announce(const std::string& call) const;
  void compare() const;

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

  c10::intrusive_ptr<c10d::ProcessGroup> group_, comparisons_;
  int64_t rank_, size_;
  bool contents_;
  std::string model_;
  // On its way: the words of each rank, and what waits for them.
  mutable std::vector<at::Tensor> said_;
  mutable c10::intrusive_ptr<c10d::Work> comparison_;
};

// What work() gives, a call that every process makes, compared by call(), its lines.
template <class Lines, class Work>
auto alike(const ProcessGroup* group, const Lines& call, const Work& work) {
  if (!group || !group->compares()) return work();
  group->announce(call());
  try {
    auto made = work();
    group->compare();
    return made;
  } catch (...) {
    group->compare();  // what is wrong with another call than the others' is of no interest
    throw;
  }
}

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
