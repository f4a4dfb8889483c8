// GPUs that do not read each other's memory: sums by the NCCL that PyTorch has loaded.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/context.h"
#include "core/cuda_check.h"
#include "core/cuda_owners.h"
#include "core/rank_group.h"

namespace ftbert {
namespace {

// As nccl.h has them; no release since 2.10 has changed them.
using Comm = void*;
constexpr int kSum = 0, kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9;

int nccl_type(DType dtype) {
  switch (dtype) {
    case DType::fp16: return kFloat16;
    case DType::bf16: return kBfloat16;
    case DType::fp32: return kFloat32;
    default: fail("NCCL adds up fp16, bf16 and fp32, got ", to_string(dtype));
  }
}

struct Nccl {
  int (*init_all)(Comm*, int, const int*);
  int (*all_reduce)(const void*, void*, size_t, int, int, Comm, cudaStream_t);
  int (*abort)(Comm);
  const char* (*words)(int);

  static const Nccl& get() {
    static const Nccl found = [] {
      void* const library = dlopen("libnccl.so.2", RTLD_NOW);
      FTBERT_CHECK(library, "these GPUs do not read each other's memory, and libnccl.so.2 is not there: ", dlerror());
      const auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
        FTBERT_CHECK(function, "libnccl.so.2 has no ", name);
      };
      Nccl made{};
      find(made.init_all, "ncclCommInitAll");
      find(made.all_reduce, "ncclAllReduce");
      find(made.abort, "ncclCommAbort");
      find(made.words, "ncclGetErrorString");
      return made;
    }();
    return found;
  }
  void check(int result, const char* what) const { FTBERT_CHECK(result == 0, "NCCL: ", what, ": ", words(result)); }
};

class NcclRanks : public RankGroup<Cuda> {
 public:
  explicit NcclRanks(const std::vector<int>& devices)
      : RankGroup(devices.size()), devices_(devices), comms_(devices.size()) {
    make_ranks<Rank>(*this, devices.size());
    connect();
  }
  ~NcclRanks() override { disconnect(); }

  void reset() override {
    disconnect();
    for (const int device : devices_) {
      const DeviceGuard guard(device);
      FTBERT_CUDA_CHECK(cudaDeviceSynchronize());
    }
    connect();
    meeting_.reset();
  }
  const char* way() const override { return "by NCCL, without graphs: these GPUs do not read each other's memory"; }

 private:
  // Nobody records its work: a recording would outlive what `stop` takes away.
  struct Rank : Member {
    Rank(NcclRanks& group, Shard shard) : Member(group.meeting_, shard), group(group) {}
    void all_reduce(Context<Cuda>& context, DType dtype, void* x, int64_t count) override {
      const Nccl& nccl = Nccl::get();
      agree(true);
      nccl.check(nccl.all_reduce(x, x, static_cast<size_t>(count), nccl_type(dtype), kSum, group.comms_[mine.rank],
                                 static_cast<cudaStream_t>(context.stream)),
                 "a sum over ranks");
      agree(true);
    }

    NcclRanks& group;
  };

  // Where no thread is in a call.
  void connect() {
    const Nccl& nccl = Nccl::get();
    if (!comms_.front())
      nccl.check(nccl.init_all(comms_.data(), static_cast<int>(devices_.size()), devices_.data()), "ncclCommInitAll");
  }
  void disconnect() {
    for (Comm& one : comms_)
      if (one) Nccl::get().abort(std::exchange(one, nullptr));
  }

  const std::vector<int> devices_;
  std::vector<Comm> comms_;
};

}  // namespace

std::unique_ptr<RankGroup<Cuda>> make_nccl_ranks(const std::vector<int>& devices) {
  return std::make_unique<NcclRanks>(devices);
}

}  // namespace ftbert
