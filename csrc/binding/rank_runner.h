// A host thread for each rank of a process, the caller's being the first's.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "binding/ranks.h"
#include "binding/stream_order.h"
#include "core/rank_group.h"

namespace ftbert::binding {

class RankRunner {
 public:
  // Makes the ranks' communicators. Error as of make_rank_group.
  explicit RankRunner(std::vector<at::Device> devices);
  ~RankRunner();
  RankRunner(const RankRunner&) = delete;
  RankRunner& operator=(const RankRunner&) = delete;

  const std::vector<at::Device>& devices() const { return devices_; }
  AnyCommunicator communicator(int64_t rank) const;
  const char* way() const { return cpu_ ? cpu_->way() : cuda_->way(); }  // of adding up

  // work(rank) on every rank at once, each on its device and on the stream that is the caller's current one there.
  // Calls follow each other. After an exception the ranks can be used again, and the exception is the caller's: the
  // first rank's, else that of another one, by its device's name.
  void run(const std::function<void(int64_t rank)>& work);

  // A tensor of the first rank's device on another's.
  at::Tensor at_rank(const at::Tensor& tensor, int64_t rank) const;

 private:
  void work_as(int64_t rank);
  void run_rank(int64_t rank);
  void stop();
  [[noreturn]] void rethrow();

  const std::vector<at::Device> devices_;
  const int process_;  // which has the threads: one that is forked from it has none
  std::shared_ptr<RankGroup<Cpu>> cpu_;
  std::shared_ptr<RankGroup<Cuda>> cuda_;
  std::vector<std::unique_ptr<StreamOrder>> orders_;  // of each rank's device

  std::mutex calls_;  // one at a time
  const std::function<void(int64_t)>* work_ = nullptr;
  std::vector<std::optional<c10::Stream>> streams_;
  std::vector<std::exception_ptr> failed_;

  std::mutex mutex_;  // of what follows
  std::condition_variable begun_, ended_;
  int64_t call_ = 0, at_work_ = 0;
  bool leaving_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace ftbert::binding
