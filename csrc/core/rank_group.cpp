#include "core/rank_group.h"

#include "core/context.h"

namespace ftbert {

bool MeetingPoint::agree(bool mine) {
  std::unique_lock lock(mutex_);
  if (stopped_) throw RankFailed();
  const int64_t before = times_;
  all_ = all_ && mine;
  if (++here_ == threads_) {
    agreed_ = all_;
    here_ = 0, all_ = true, ++times_;
    passed_.notify_all();
    return agreed_;
  }
  passed_.wait(lock, [&] { return times_ != before || stopped_; });
  if (times_ == before) throw RankFailed();
  return agreed_;  // nobody passes the next time without this thread
}

void MeetingPoint::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  passed_.notify_all();
}

void MeetingPoint::reset() {
  const std::lock_guard lock(mutex_);
  here_ = 0, all_ = true, stopped_ = false;
}

namespace {

class CpuRanks : public RankGroup<Cpu> {
 public:
  explicit CpuRanks(size_t size) : RankGroup(size), addends_(size) { make_ranks<Rank>(*this, size); }
  void reset() override { meeting_.reset(); }
  const char* way() const override { return "in memory"; }

 private:
  struct Rank : Member {
    Rank(CpuRanks& group, Shard shard) : Member(group.meeting_, shard), group(group) {}

    // Each rank adds up a piece, by rank, and stores it on all.
    void all_reduce(Context<Cpu>&, DType dtype, void* x, int64_t count) override {
      FTBERT_CHECK(dtype == DType::fp32, "ranks on the CPU add up float32, got ", to_string(dtype));
      group.addends_[mine.rank] = static_cast<float*>(x);
      agree(true);
      const int64_t first = count * mine.rank / mine.size, end = count * (mine.rank + 1) / mine.size;
      for (int64_t i = first; i < end; ++i) {
        float sum = group.addends_[0][i];
        for (int64_t rank = 1; rank < mine.size; ++rank) sum += group.addends_[rank][i];
        for (float* const of_rank : group.addends_) of_rank[i] = sum;
      }
      agree(true);
    }

    CpuRanks& group;
  };

  std::vector<float*> addends_;  // of each rank's present sum
};

}  // namespace

template <>
std::unique_ptr<RankGroup<Cpu>> make_rank_group<Cpu>(const std::vector<int>& devices) {
  return std::make_unique<CpuRanks>(devices.size());
}

}  // namespace ftbert
