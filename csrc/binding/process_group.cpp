#include "binding/process_group.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "binding/ranks.h"
#include "binding/tensors.h"

namespace ftbert::binding {
namespace {

template <class Device>
class ProcessGroupRank : public Communicator<Device> {
 public:
  ProcessGroupRank(const std::string& name, Shard shard, at::Device device)
      : group_(name, shard.rank, shard.size), shard_(shard), device_(device) {}
  Shard shard() const override { return shard_; }
  bool records() const override { return false; }
  // Of all models: they share the group, or NCCL's order of calls.
  std::unique_lock<std::mutex> alone() override {
    static std::mutex calls;
    return std::unique_lock(calls);
  }

  // The context's stream is torch's current one.
  void all_reduce(Context<Device>&, DType dtype, void* x, int64_t count) override {
    group_.all_reduce(at::from_blob(x, {count}, at::TensorOptions().device(device_).dtype(scalar_type_of(dtype))));
  }

 private:
  const ProcessGroup group_;
  const Shard shard_;
  const at::Device device_;
};

}  // namespace

ProcessGroup::ProcessGroup(const std::string& name, int64_t rank, int64_t size)
    : group_(c10d::resolve_process_group(name)), rank_(rank), size_(size) {
  FTBERT_CHECK(group_->getSize() == size && group_->getRank() == rank, "the process group has ", group_->getSize(),
               " processes, of which this is ", group_->getRank(), "; the weights are rank ", rank, "'s of ", size);
}

void ProcessGroup::all_reduce(at::Tensor sums) const {
  std::vector<at::Tensor> all{std::move(sums)};
  finish([&] { return group_->allreduce(all); });
}

void ProcessGroup::broadcast(at::Tensor tensor, int64_t from) const {
  if (tensor.numel() == 0) return;
  std::vector<at::Tensor> all{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  finish([&] { return group_->broadcast(all, options); });
}

void ProcessGroup::receive(at::Tensor tensor, int64_t from) const {
  if (tensor.numel() == 0) return;
  std::vector<at::Tensor> all{std::move(tensor)};
  finish([&] { return group_->recv(all, static_cast<int>(from), 0); });
}

auto ProcessGroup::send(at::Tensor tensor, int64_t to) const -> Sent {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> all{tensor};
  if (tensor.numel() > 0) attempt([&] { work = group_->send(all, static_cast<int>(to), 0); });
  return {*this, std::move(tensor), std::move(work)};
}

void ProcessGroup::finish(const std::function<c10::intrusive_ptr<c10d::Work>()>& start) const {
  attempt([&] { start()->wait(); });
}

void ProcessGroup::attempt(const std::function<void()>& work) const {
  try {
    work();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    lost(error.what_without_backtrace());
  } catch (const std::exception& error) {  // gloo's own
    lost(error.what());
  }
}

void ProcessGroup::lost(const std::string& why) const {
  const std::string other = size_ == 2 ? "rank " + std::to_string(1 - rank_) : "another rank";
  fail("rank ", rank_, " of ", size_, ": ", other, " has ended or failed: ", why);
}

AnyCommunicator join_process_group(const std::string& name, const Shard& shard, at::Device device) {
  if (device.is_cpu()) return {std::make_shared<ProcessGroupRank<Cpu>>(name, shard, device), nullptr};
  return {nullptr, std::make_shared<ProcessGroupRank<Cuda>>(name, shard, device)};
}

}  // namespace ftbert::binding
