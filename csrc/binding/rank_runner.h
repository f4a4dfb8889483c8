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

  AnyCommunicator communicator(int64_t rank) const;
  const char* way() const { return cpu_ ? cpu_->way() : cuda_->way(); }  // of adding up

  // before, if given, in this thread; then work(rank) on every rank at once, each on its device: the first on the
  // caller's current stream there, the others on streams of their own (of torch's pool of high priority, which torch
  // gives who asks for them), so that nothing of the caller's comes between kernels that wait for each other. Calls
  // follow each other, those of all runners: kernels of two that wait for other ranks could take all room of a GPU
  // each. After an exception the ranks can be used again, what calls before have launched is as it was, and the
  // exception is the caller's: the first rank's, else that of another one, by its device's name.
  void run(const std::function<void(int64_t rank)>& work, const std::function<void()>& before = {});
  // Between calls.
  void between_calls(const std::function<void()>& work);

  // In `before`: a tensor of the first rank's device on another's. (Between calls it would not do: a copy waits for the
  // first rank's kernels, which may wait for those that another thread has yet to launch behind the copy.)
  at::Tensor at_rank(const at::Tensor& tensor, int64_t rank) const;

 private:
  template <class F>
  auto of_group(const F& f) const {
    return cpu_ ? f(*cpu_) : f(*cuda_);
  }
  void work_as(int64_t rank);
  void run_rank(int64_t rank);
  [[noreturn]] void rethrow();

  // Threads and what they wait with: of a process that is forked nobody can end or free them.
  struct Threads {
    std::mutex mutex;
    std::condition_variable begun, ended;
    int64_t call = 0, at_work = 0;
    bool leaving = false;
    std::vector<std::thread> of_ranks;
  };

  const std::vector<at::Device> devices_;
  const int process_;  // which has the threads
  std::shared_ptr<RankGroup<Cpu>> cpu_;
  std::shared_ptr<RankGroup<Cuda>> cuda_;
  std::vector<StreamOrder*> orders_;                 // of each rank's device
  std::vector<std::unique_ptr<StreamMark>> before_;  // on each GPU, what calls before have launched
  const int cores_;                                  // of each other rank on the CPU

  const std::function<void(int64_t)>* work_ = nullptr;
  std::vector<std::optional<c10::Stream>> streams_;  // the first is the caller's
  std::vector<std::exception_ptr> failed_;
  std::unique_ptr<Threads> threads_;
};

}  // namespace ftbert::binding
