#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "binding/ranks.h"
#include "binding/tensors.h"

namespace ftbert::binding {
namespace {

template <class Device>
class ProcessGroupRank : public Communicator<Device> {
 public:
  ProcessGroupRank(c10::intrusive_ptr<c10d::ProcessGroup> group, Shard shard, at::Device device)
      : group_(std::move(group)), shard_(shard), device_(device) {}
  Shard shard() const override { return shard_; }
  bool records() const override { return false; }

  void all_reduce(Context<Device>&, DType dtype, void* x, int64_t count) override {
    std::vector<at::Tensor> sums{
        at::from_blob(x, {count}, at::TensorOptions().device(device_).dtype(scalar_type_of(dtype)))};
    // On a GPU the current stream waits, not the host; the context's stream is torch's.
    try {
      group_->allreduce(sums)->wait();
    } catch (const c10::Error& error) {
      lost(error.what_without_backtrace());
    } catch (const std::exception& error) {  // gloo's own
      lost(error.what());
    }
  }

 private:
  [[noreturn]] void lost(const std::string& why) const {
    const std::string other = shard_.size == 2 ? "rank " + std::to_string(1 - shard_.rank) : "another rank";
    fail("rank ", shard_.rank, " of ", shard_.size, ": ", other, " has ended or failed: ", why);
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const Shard shard_;
  const at::Device device_;
};

}  // namespace

AnyCommunicator join_process_group(const std::string& name, const Shard& shard, at::Device device) {
  const c10::intrusive_ptr<c10d::ProcessGroup> group = c10d::resolve_process_group(name);
  FTBERT_CHECK(group->getSize() == shard.size && group->getRank() == shard.rank, "the process group has ",
               group->getSize(), " processes, of which this is ", group->getRank(), "; the weights are rank ",
               shard.rank, "'s of ", shard.size);
  if (device.is_cpu()) return {std::make_shared<ProcessGroupRank<Cpu>>(group, shard, device), nullptr};
  return {nullptr, std::make_shared<ProcessGroupRank<Cuda>>(group, shard, device)};
}

}  // namespace ftbert::binding
