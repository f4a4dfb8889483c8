#include "binding/process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "binding/call_words.h"
#include "binding/ranks.h"
#include "binding/tensors.h"

namespace ftbert::binding {
namespace {

template <class Device>
class ProcessGroupRank : public Communicator<Device> {
 public:
  ProcessGroupRank(std::shared_ptr<const ProcessGroup> group, Shard shard, at::Device device)
      : group_(std::move(group)), shard_(shard), device_(device) {}
  Shard shard() const override { return shard_; }
  bool records() const override { return false; }
  // Of all models: they share the group, or NCCL's order of calls.
  std::unique_lock<std::mutex> alone() override {
    static std::mutex calls;
    return std::unique_lock(calls);
  }

  // The context's stream is torch's current one.
  void all_reduce(Context<Device>&, DType dtype, void* x, int64_t count) override {
    group_->all_reduce(at::from_blob(x, {count}, at::TensorOptions().device(device_).dtype(scalar_type_of(dtype))));
  }

 private:
  const std::shared_ptr<const ProcessGroup> group_;
  const Shard shard_;
  const at::Device device_;
};

// What a rank says of a call: a digest of its lines, and as many of them as there is room for.
constexpr int64_t kSaid = 1024;

std::vector<std::string_view> split_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

// "input_ids: Long [2, 9] on cpu, where rank 0 has input_ids: Long [2, 8] on cpu"
std::string difference(std::string_view one, std::string_view first) {
  const auto lines = split_lines(one), expected = split_lines(first);
  std::string words;
  for (size_t i = 0; i < std::max(lines.size(), expected.size()); ++i) {
    const auto at = [i](const auto& all) { return i < all.size() ? std::string(all[i]) : std::string("nothing"); };
    if (at(lines) != at(expected))
      words += (words.empty() ? "" : "; ") + at(lines) + ", where rank 0 has " + at(expected);
  }
  return words.empty() ? "in what is too long to be shown" : words;
}

}  // namespace

ProcessGroup::ProcessGroup(const Processes& processes, int64_t rank, int64_t size)
    : group_(c10d::resolve_process_group(processes.group)),
      rank_(rank),
      size_(size),
      contents_(processes.contents),
      model_(processes.model) {
  if (!processes.comparisons.empty()) comparisons_ = c10d::resolve_process_group(processes.comparisons);
  FTBERT_CHECK(group_->getSize() == size && group_->getRank() == rank, "the process group has ", group_->getSize(),
               " processes, of which this is ", group_->getRank(), "; the weights are rank ", rank, "'s of ", size);
}

void ProcessGroup::announce(const std::string& call) const {
  const std::string text = "model: " + model_ + "\n" + call;
  const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte);
  const at::Tensor mine = at::zeros({kSaid}, bytes);
  const uint64_t digest = digest_of(text.data(), text.size());
  auto* const to = mine.mutable_data_ptr<uint8_t>();
  std::memcpy(to, &digest, sizeof(digest));
  std::memcpy(to + sizeof(digest), text.data(), std::min<size_t>(text.size(), kSaid - sizeof(digest) - 1));
  said_.clear();
  for (int64_t rank = 0; rank < size_; ++rank) said_.push_back(at::empty({kSaid}, bytes));
  std::vector<std::vector<at::Tensor>> all{said_};
  std::vector<at::Tensor> in{mine};
  attempt([&] { comparison_ = comparisons_->allgather(all, in); });
}

void ProcessGroup::compare() const {
  if (!comparison_) return;
  const auto comparison = std::exchange(comparison_, nullptr);
  attempt([&] { comparison->wait(); });
  const auto said = [&](int64_t rank) { return said_[rank].const_data_ptr<uint8_t>(); };
  for (int64_t rank = 1; rank < size_; ++rank) {
    if (std::memcmp(said(rank), said(0), sizeof(uint64_t)) == 0) continue;
    const auto text = [&](int64_t of) { return reinterpret_cast<const char*>(said(of) + sizeof(uint64_t)); };
    fail("rank ", rank, " of ", size_, " makes another call than rank 0: ", difference(text(rank), text(0)),
         ". Every process makes the same calls in the same order");
  }
}

void ProcessGroup::all_reduce(at::Tensor sums) const {
  compare();
  std::vector<at::Tensor> all{std::move(sums)};
  finish([&] { return group_->allreduce(all); });
}

void ProcessGroup::broadcast(at::Tensor tensor, int64_t from) const {
  compare();
  if (tensor.numel() == 0) return;
  std::vector<at::Tensor> all{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  finish([&] { return group_->broadcast(all, options); });
}

void ProcessGroup::receive(at::Tensor tensor, int64_t from) const {
  compare();
  if (tensor.numel() == 0) return;
  std::vector<at::Tensor> all{std::move(tensor)};
  finish([&] { return group_->recv(all, static_cast<int>(from), 0); });
}

auto ProcessGroup::send(at::Tensor tensor, int64_t to) const -> Sent {
  compare();
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

AnyCommunicator join_process_group(const Processes& processes, const Shard& shard, at::Device device) {
  const auto group = std::make_shared<const ProcessGroup>(processes, shard.rank, shard.size);
  if (device.is_cpu())
    return {.cpu = std::make_shared<ProcessGroupRank<Cpu>>(group, shard, device), .processes = group};
  return {.cuda = std::make_shared<ProcessGroupRank<Cuda>>(group, shard, device), .processes = group};
}

}  // namespace ftbert::binding
