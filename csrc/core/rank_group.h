// Ranks of one process: a thread each, that add up through memory which they share. No CUDA header: rank_group.cpp,
// and rank_group_cuda.cpp or device_none.cpp.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "core/check.h"
#include "core/communicator.h"

namespace ftbert {

// Another rank's failure ended this one's work.
struct RankFailed : Error {
  RankFailed() : Error("another rank has failed") {}
};

// A point that a number of threads pass together, again and again.
class MeetingPoint {
 public:
  explicit MeetingPoint(int64_t threads) : threads_(threads) {}
  // Returns when all have come: whether each said true. RankFailed where `stop` was called, also while it waits.
  bool agree(bool mine);
  void stop();
  void reset();  // nobody waits

 private:
  const int64_t threads_;
  std::mutex mutex_;
  std::condition_variable passed_;
  int64_t here_ = 0, times_ = 0;
  bool all_ = true, agreed_ = true;  // of those who are here, and of the last time
  bool stopped_ = false;
};

template <class Device>
class RankGroup {
 public:
  virtual ~RankGroup() = default;
  Communicator<Device>& at(int64_t rank) { return *ranks_.at(rank); }
  // A rank has failed: the host threads of the others stop waiting for it.
  void stop() { meeting_.stop(); }
  // After `stop`, when no thread is in a call any more and those before have ended on the devices: ends the kernels
  // that wait, and makes the group usable again.
  virtual void reset() = 0;
  virtual const char* way() const = 0;  // of adding up, in words

 protected:
  struct Member : Communicator<Device> {
    Member(MeetingPoint& meeting, Shard shard) : meeting(meeting), mine(shard) {}
    Shard shard() const override { return mine; }
    bool records() const override { return false; }
    bool agree(bool here) override { return meeting.agree(here); }

    MeetingPoint& meeting;
    const Shard mine;
  };

  explicit RankGroup(size_t size) : meeting_(static_cast<int64_t>(size)) {}
  template <class Rank, class Group>
  void make_ranks(Group& group, size_t size) {
    for (size_t rank = 0; rank < size; ++rank)
      ranks_.push_back(std::make_unique<Rank>(group, Shard{static_cast<int64_t>(rank), static_cast<int64_t>(size)}));
  }

  MeetingPoint meeting_;
  std::vector<std::unique_ptr<Member>> ranks_;
};

// devices: of each rank; on the CPU their number counts. GPUs that do not read each other's memory add up through NCCL,
// all do with FTBERT_PEER_MEMORY=off. Error for GPUs that differ.
template <class Device>
std::unique_ptr<RankGroup<Device>> make_rank_group(const std::vector<int>& devices);
template <>
std::unique_ptr<RankGroup<Cpu>> make_rank_group<Cpu>(const std::vector<int>& devices);
template <>
std::unique_ptr<RankGroup<Cuda>> make_rank_group<Cuda>(const std::vector<int>& devices);

// GPUs whose sums go through NCCL. Error where it is not there.
std::unique_ptr<RankGroup<Cuda>> make_nccl_ranks(const std::vector<int>& devices);

}  // namespace ftbert
