// GPUs that read and write each other's memory.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <string_view>

#include "core/check.h"
#include "core/context.h"
#include "core/cuda_check.h"
#include "core/cuda_owners.h"
#include "core/graph.h"
#include "core/rank_group.h"

namespace ftbert {
namespace {

constexpr size_t kMostBlocks = 8192;            // of a kernel whose blocks are all there at once
constexpr size_t kLeastPart = size_t{1} << 20;  // bytes
// Of the parts of all ranks together: larger ones are not sent but read. Inboxes take twice as much on each GPU.
constexpr size_t kMostSent = size_t{64} << 20;  // bytes
// Of each block, how often each rank has come there, and how often this rank has been waiting for it.
constexpr size_t kArrivalBytes = kMostBlocks * 2 * PeerParts::kMostRanks * sizeof(uint32_t);

void check_equal(int one, int other) {
  cudaDeviceProp a{}, b{};
  FTBERT_CUDA_CHECK(cudaGetDeviceProperties(&a, one));
  FTBERT_CUDA_CHECK(cudaGetDeviceProperties(&b, other));
  FTBERT_CHECK(std::string_view(a.name) == b.name && a.multiProcessorCount == b.multiProcessorCount,
               "the ranks of a model must be equal GPUs; cuda:", one, " is ", a.name, " with ", a.multiProcessorCount,
               " multiprocessors, cuda:", other, " is ", b.name, " with ", b.multiProcessorCount);
}

bool read_each_other(const std::vector<int>& devices) {
  const char* const asked = std::getenv("FTBERT_PEER_MEMORY");
  if (asked && std::string_view(asked) == "off") return false;
  for (const int from : devices)
    for (const int to : devices) {
      int can = from == to;
      if (!can) FTBERT_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, from, to));
      if (!can) return false;
    }
  return devices.size() <= PeerParts::kMostRanks;
}

void enable_access(int from, int to) {
  const DeviceGuard guard(from);
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();
  else
    FTBERT_CUDA_CHECK(error);
}

// Memory of one GPU that all read and write.
class PeerMemory {
 public:
  PeerMemory(int device, size_t bytes) : device_(device) {
    const DeviceGuard guard(device);
    FTBERT_CUDA_CHECK(cudaMalloc(&data_, bytes));
  }
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  ~PeerMemory() {
    const DeviceGuard guard(device_);
    cudaFree(data_);
  }
  void* data() const { return data_; }

 private:
  int device_;
  void* data_ = nullptr;
};

class CudaRanks : public RankGroup<Cuda> {
 public:
  explicit CudaRanks(const std::vector<int>& devices) : RankGroup(devices.size()), devices_(devices) {
    for (const int one : devices)
      for (const int other : devices)
        if (one != other) enable_access(one, other);
    FTBERT_CUDA_CHECK(
        cudaHostAlloc(reinterpret_cast<void**>(&stop_), sizeof(int32_t), cudaHostAllocPortable | cudaHostAllocMapped));
    for (const int device : devices) arrivals_.push_back(std::make_unique<PeerMemory>(device, kArrivalBytes));
    make_ranks<Rank>(*this, devices.size());
    CudaRanks::reset();
  }
  ~CudaRanks() override {
    for (const int device : devices_) {  // a rank may still read another's memory
      const DeviceGuard guard(device);
      cudaDeviceSynchronize();
    }
    cudaFreeHost(stop_);
  }

  const char* way() const override { return "in each other's memory"; }

  void reset() override {
    *stop_ = 1;
    synchronize();
    for (size_t rank = 0; rank < devices_.size(); ++rank) {
      const DeviceGuard guard(devices_[rank]);
      FTBERT_CUDA_CHECK(cudaMemset(arrivals_[rank]->data(), 0, kArrivalBytes));
      for (const auto& [bytes, room] : rooms_) empty(room, rank);
    }
    synchronize();
    *stop_ = 0;
    meeting_.reset();
  }

 private:
  struct Rank : Member {
    Rank(CudaRanks& group, Shard shard) : Member(group.meeting_, shard), group(group) {}
    bool records() const override { return true; }
    void launch_together(const Context<Cuda>& context, const std::function<void()>& launch) override {
      if (is_recording(context.stream)) return launch();
      agree(true);
      launch();
      agree(true);
    }
    void reserve(size_t bytes) override { room = group.reserve(bytes); }
    PeerParts parts(size_t bytes, int turn) override {
      FTBERT_CHECK(bytes <= room, "a sum of ", bytes, " bytes, where ", room, " are there");
      return group.parts(mine.rank, room, turn);
    }

    void all_reduce(Context<Cuda>&, DType, void*, int64_t) override { throw Error("kernels add up these parts"); }

    CudaRanks& group;
    size_t room = 0;  // of this call's sums
  };

  void synchronize() const {
    for (const int device : devices_) {
      const DeviceGuard guard(device);
      FTBERT_CUDA_CHECK(cudaDeviceSynchronize());
    }
  }

  // Of sums of up to a number of bytes, of each rank and for two turns.
  struct Room {
    std::vector<std::unique_ptr<PeerMemory>> parts, inboxes;
    size_t inbox_bytes = 0;  // of an inbox, from one sender
  };

  // Memory of a power of two is there for each size of call, and stays: recorded launches know where it lies, and all
  // ranks take the same.
  size_t reserve(size_t bytes) {
    const size_t each = std::max(kLeastPart, std::bit_ceil(bytes));
    const std::lock_guard lock(mutex_);
    if (rooms_.contains(each)) return each;
    Room made;
    if (each * devices_.size() <= kMostSent) made.inbox_bytes = each;
    for (const int device : devices_) {
      made.parts.push_back(std::make_unique<PeerMemory>(device, 2 * each));
      if (made.inbox_bytes > 0)
        made.inboxes.push_back(std::make_unique<PeerMemory>(device, 2 * devices_.size() * made.inbox_bytes));
    }
    for (size_t rank = 0; rank < devices_.size(); ++rank) empty(made, rank);
    rooms_.emplace(each, std::move(made));
    return each;
  }

  // Nothing has come. On a stream of its own: another thread may be recording on this GPU.
  void empty(const Room& room, size_t rank) const {
    if (room.inbox_bytes == 0) return;
    const DeviceGuard guard(devices_[rank]);
    const Stream stream = make_stream();
    FTBERT_CUDA_CHECK(
        cudaMemsetAsync(room.inboxes[rank]->data(), 0xff, 2 * devices_.size() * room.inbox_bytes, stream.get()));
    FTBERT_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
  }

  PeerParts parts(int64_t rank, size_t each, int turn) {
    PeerParts all;
    all.rank = static_cast<int>(rank), all.size = static_cast<int>(devices_.size()), all.stop = stop_;
    const std::lock_guard lock(mutex_);
    const Room& room = rooms_.at(each);
    all.inbox_bytes = room.inbox_bytes;
    for (size_t one = 0; one < devices_.size(); ++one) {
      all.parts[one] = static_cast<char*>(room.parts[one]->data()) + turn * each;
      all.arrivals[one] = static_cast<uint32_t*>(arrivals_[one]->data());
      if (room.inbox_bytes == 0) continue;
      all.inboxes[one] = static_cast<char*>(room.inboxes[one]->data()) + turn * devices_.size() * room.inbox_bytes;
    }
    return all;
  }

  const std::vector<int> devices_;
  int32_t* stop_ = nullptr;
  std::vector<std::unique_ptr<PeerMemory>> arrivals_;
  std::mutex mutex_;
  std::map<size_t, Room> rooms_;  // by bytes of a part
};

}  // namespace

template <>
std::unique_ptr<RankGroup<Cuda>> make_rank_group<Cuda>(const std::vector<int>& devices) {
  for (const int one : devices) check_equal(devices.front(), one);
  if (!read_each_other(devices)) return make_nccl_ranks(devices);
  return std::make_unique<CudaRanks>(devices);
}

}  // namespace ftbert
