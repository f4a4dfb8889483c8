#include "binding/rank_runner.h"

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <map>
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

// Of all runners of the process.
std::mutex& call_mutex() {
  static std::mutex one;
  return one;
}

// Of a device, for all runners: its kernels that wait for other ranks follow each other. They are never freed.
StreamOrder* order_of(const at::Device& device) {
  static std::mutex mutex;
  static auto& orders = *new std::map<std::string, StreamOrder*>();
  const std::lock_guard lock(mutex);
  StreamOrder*& order = orders[device.str()];
  if (!order) {
    const c10::DeviceGuard guard(device);
    order = new StreamOrder(device);
  }
  return order;
}

}  // namespace

RankRunner::RankRunner(std::vector<at::Device> devices)
    : devices_(std::move(devices)),
      process_(getpid()),
      cores_(std::max(1, at::get_num_threads() / static_cast<int>(devices_.size()))),
      streams_(devices_.size()),
      failed_(devices_.size()),
      threads_(std::make_unique<Threads>()) {
  std::vector<int> places;
  for (const at::Device& device : devices_) places.push_back(device.index());
  if (devices_.front().is_cpu())
    cpu_ = make_rank_group<Cpu>(places);
  else
    cuda_ = make_rank_group<Cuda>(places);
  for (size_t rank = 0; rank < devices_.size(); ++rank) {
    const at::Device& device = devices_[rank];
    orders_.push_back(order_of(device));
    const c10::DeviceGuard guard(device);
    before_.push_back(device.is_cuda() ? make_stream_mark() : nullptr);
    if (rank == 0 || !device.is_cuda()) continue;
    const c10::impl::VirtualGuardImpl on(device.type());
    on.getStream(device).synchronize();  // weights may be on their way there
    streams_[rank] = on.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  for (size_t rank = 1; rank < devices_.size(); ++rank)
    threads_->of_ranks.emplace_back([this, rank] { work_as(static_cast<int64_t>(rank)); });
}

RankRunner::~RankRunner() {
  if (getpid() != process_) {
    static_cast<void>(threads_.release());
    return;
  }
  {
    const std::lock_guard lock(threads_->mutex);
    threads_->leaving = true;
  }
  threads_->begun.notify_all();
  for (std::thread& thread : threads_->of_ranks) thread.join();
  // Weights go behind this, and the allocator does not know that these streams read them.
  for (size_t rank = 1; rank < streams_.size(); ++rank) {
    try {
      if (streams_[rank]) streams_[rank]->synchronize();
    } catch (const std::exception&) {  // at a process' end, or behind a failed kernel
    }
  }
}

AnyCommunicator RankRunner::communicator(int64_t rank) const {
  // Each shares the group.
  if (cpu_) return {.cpu = {cpu_, &cpu_->at(rank)}};
  return {.cuda = {cuda_, &cuda_->at(rank)}};
}

at::Tensor RankRunner::at_rank(const at::Tensor& tensor, int64_t rank) const {
  if (!tensor.is_cuda()) return tensor;
  const c10::StreamGuard there(*streams_[rank]);
  return tensor.to(devices_[rank], /*non_blocking=*/true);
}

void RankRunner::run(const std::function<void(int64_t)>& work, const std::function<void()>& before) {
  FTBERT_CHECK(getpid() == process_,
               "this process was forked from the one that loaded the model, in which the threads "
               "of its ranks stayed: load it here, or start processes by \"spawn\"");
  const std::lock_guard lock(call_mutex());
  if (const at::Device first = devices_.front(); first.is_cuda()) {
    streams_[0] = c10::impl::VirtualGuardImpl(first.type()).getStream(first);
    FTBERT_CHECK(!is_recording(native_handle(*streams_[0])),
                 "a model that several GPUs share records its small calls itself, and is no part of another recording");
  }
  if (before) before();
  work_ = &work;
  std::fill(failed_.begin(), failed_.end(), nullptr);
  {
    const std::lock_guard waking(threads_->mutex);
    ++threads_->call;
    threads_->at_work = static_cast<int64_t>(threads_->of_ranks.size());
  }
  threads_->begun.notify_all();
  run_rank(0);
  {
    std::unique_lock waiting(threads_->mutex);
    threads_->ended.wait(waiting, [&] { return threads_->at_work == 0; });
  }
  if (std::any_of(failed_.begin(), failed_.end(), [](const std::exception_ptr& one) { return one != nullptr; }))
    rethrow();
}

void RankRunner::between_calls(const std::function<void()>& work) {
  const std::lock_guard lock(call_mutex());
  work();
}

void RankRunner::work_as(int64_t rank) {
  if (devices_[rank].is_cpu()) {
    at::get_num_threads();  // which sets this thread's number, once
    omp_set_num_threads(cores_);
  }
  for (int64_t done = 0;;) {
    {
      std::unique_lock lock(threads_->mutex);
      threads_->begun.wait(lock, [&] { return threads_->leaving || threads_->call != done; });
      if (threads_->leaving) return;
      done = threads_->call;
    }
    run_rank(rank);
    {
      const std::lock_guard lock(threads_->mutex);
      --threads_->at_work;
    }
    threads_->ended.notify_one();
  }
}

void RankRunner::run_rank(int64_t rank) {
  try {
    const c10::DeviceGuard guard(devices_[rank]);
    if (rank > 0 && streams_[rank]) c10::impl::VirtualGuardImpl(devices_[rank].type()).exchangeStream(*streams_[rank]);
    const StreamOrder::Use use(*orders_[rank]);
    if (before_[rank]) before_[rank]->set(native_handle(*streams_[rank]));
    (*work_)(rank);
  } catch (...) {
    failed_[rank] = std::current_exception();
    of_group([](auto& group) { group.stop(); });
  }
}

void RankRunner::rethrow() {
  for (const std::unique_ptr<StreamMark>& before : before_)
    if (before) before->wait_on_host();
  of_group([](auto& group) { group.reset(); });
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
