// The forward pass of what lies on one device, a model, a rank's share of it or a stage: checks with words, memory from
// torch's allocator, the current stream.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "binding/call.h"
#include "binding/ranks.h"
#include "encoder.h"

namespace ftbert::binding {

// What differs between (device, dtype) pairs, behind one virtual call.
class Forward {
 public:
  virtual ~Forward() = default;
  // One tensor for each want, in their order.
  virtual std::vector<at::Tensor> run(const Call& call, const std::vector<Want>& wants) const = 0;
  // Before the first call with this cache: makes its recorder. Error where no product takes its head.
  virtual void attach(DecoderCache& cache) const = 0;
  // Before the first call of a rank's share: with whom it adds up.
  virtual void join(AnyCommunicator communicator) = 0;
  // Of a rank's share, where all ranks ask at once (binding/sum_time.h); else 0.
  virtual double seconds_of_sum(int64_t rows) const = 0;
  // On a GPU, whether small calls are recorded and repeated (binding/replay.h); does nothing on the CPU.
  virtual void use_cuda_graphs(bool on) const = 0;
  virtual bool uses_cuda_graphs() const = 0;
  virtual AttentionPath attention_path() const = 0;
  virtual std::map<std::string, std::string> info() const = 0;
};

template <class Device, class T>
std::unique_ptr<Forward> make_forward(const ModelConfig& config, Weights<T> weights, at::Device device,
                                      std::optional<AttentionPath> attention);

}  // namespace ftbert::binding
