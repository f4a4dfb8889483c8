#include "binding/rank_runner.h"

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace ftbert::binding {
namespace {

// Of another rank's failure, which says more.
bool is_consequence(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const RankFailed&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

RankRunner::RankRunner(std::vector<at::Device> devices)
    : devices_(std::move(devices)), process_(getpid()), streams_(devices_.size()), failed_(devices_.size()) {
  std::vector<int> places;
  for (const at::Device& device : devices_) places.push_back(device.index());
  if (devices_.front().is_cpu())
    cpu_ = make_rank_group<Cpu>(places);
  else
    cuda_ = make_rank_group<Cuda>(places);
  for (const at::Device& device : devices_) {
    const c10::DeviceGuard guard(device);
    orders_.push_back(std::make_unique<StreamOrder>(device));
  }
  for (size_t rank = 1; rank < devices_.size(); ++rank)
    threads_.emplace_back([this, rank] { work_as(static_cast<int64_t>(rank)); });
}

RankRunner::~RankRunner() {
  if (getpid() != process_) {  // nobody can wait for them
    static_cast<void>(new std::vector<std::thread>(std::move(threads_)));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  begun_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

AnyCommunicator RankRunner::communicator(int64_t rank) const {
  // Each shares the group.
  if (cpu_) return {{cpu_, &cpu_->at(rank)}, nullptr};
  return {nullptr, {cuda_, &cuda_->at(rank)}};
}

at::Tensor RankRunner::at_rank(const at::Tensor& tensor, int64_t rank) const {
  return tensor.is_cuda() ? tensor.to(devices_[rank], /*non_blocking=*/true) : tensor;
}

void RankRunner::run(const std::function<void(int64_t)>& work) {
  FTBERT_CHECK(getpid() == process_,
               "this process was forked from the one that loaded the model, in which the threads "
               "of its ranks stayed: load it here, or start processes by \"spawn\"");
  const std::lock_guard calls(calls_);
  for (size_t rank = 0; rank < devices_.size(); ++rank)
    if (devices_[rank].is_cuda())
      streams_[rank] = c10::impl::VirtualGuardImpl(devices_[rank].type()).getStream(devices_[rank]);
  work_ = &work;
  std::fill(failed_.begin(), failed_.end(), nullptr);
  {
    const std::lock_guard lock(mutex_);
    ++call_;
    at_work_ = static_cast<int64_t>(threads_.size());
  }
  begun_.notify_all();
  run_rank(0);
  {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return at_work_ == 0; });
  }
  if (std::any_of(failed_.begin(), failed_.end(), [](const std::exception_ptr& one) { return one != nullptr; }))
    rethrow();
}

void RankRunner::work_as(int64_t rank) {
  if (devices_[rank].is_cpu())  // ranks share the cores
    at::set_num_threads(std::max(1, at::get_num_threads() / static_cast<int>(devices_.size())));
  for (int64_t done = 0;;) {
    {
      std::unique_lock lock(mutex_);
      begun_.wait(lock, [&] { return leaving_ || call_ != done; });
      if (leaving_) return;
      done = call_;
    }
    run_rank(rank);
    {
      const std::lock_guard lock(mutex_);
      --at_work_;
    }
    ended_.notify_one();
  }
}

void RankRunner::run_rank(int64_t rank) {
  try {
    const c10::DeviceGuard guard(devices_[rank]);
    if (rank > 0 && streams_[rank]) c10::impl::VirtualGuardImpl(devices_[rank].type()).exchangeStream(*streams_[rank]);
    const StreamOrder::Turn turn(*orders_[rank]);
    (*work_)(rank);
  } catch (...) {
    failed_[rank] = std::current_exception();
    stop();
  }
}

void RankRunner::stop() {
  if (cpu_)
    cpu_->stop();
  else
    cuda_->stop();
}

void RankRunner::rethrow() {
  if (cpu_)
    cpu_->reset();
  else
    cuda_->reset();
  size_t rank = 0;
  while (rank < failed_.size() && (!failed_[rank] || is_consequence(failed_[rank]))) ++rank;
  if (rank == failed_.size()) throw Error("a rank failed without saying why");
  if (rank > 0) {
    try {
      std::rethrow_exception(failed_[rank]);
    } catch (const Error& error) {
      throw Error("rank " + std::to_string(rank) + ", on " + devices_[rank].str() + ": " + error.what());
    } catch (...) {
    }
  }
  std::rethrow_exception(failed_[rank]);
}

}  // namespace ftbert::binding
