// torch.classes.ftbert.Encoder: the core's encoder on one device, built from named tensors and a config.
#pragma once
#include <ATen/core/Dict.h>
#include <torch/custom_class.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "binding/call.h"
#include "encoder.h"

namespace ftbert::binding {

using TensorDict = c10::Dict<std::string, at::Tensor>;
using StringDict = c10::Dict<std::string, std::string>;

struct AnyCommunicator;  // binding/ranks.h
struct Stages;
class RankRunner;  // binding/rank_runner.h

// What differs between (device, dtype) pairs, behind one virtual call.
struct Engine {
  virtual ~Engine() = default;
  // One tensor for each want, in their order.
  virtual std::vector<at::Tensor> forward(const Call& call, const std::vector<Want>& wants) const = 0;
  // On a GPU, whether small calls are recorded and repeated (binding/replay.h); does nothing on the CPU.
  virtual void use_cuda_graphs(bool on) const = 0;
  virtual bool uses_cuda_graphs() const = 0;
  virtual std::map<std::string, std::string> info() const = 0;
  virtual AttentionPath attention_path() const = 0;
  // Of a shard, before its first call: with whom it adds up.
  virtual void join(AnyCommunicator communicator) = 0;
  virtual AnyCommunicator communicator() const = 0;
  // Of a shard, where all ranks ask at once, or of several ranks in this process: what a sum over ranks takes
  // (binding/sum_time.h); else 0.
  virtual double seconds_of_sum(int64_t /*rows*/) const { return 0; }
  // Of several ranks in this process: what runs them.
  virtual std::shared_ptr<RankRunner> runner() const { return nullptr; }
};
// engine.cpp: the core's encoder in an engine of this device and type.
template <class Device, class T>
const Encoder<Device, T>& encoder_of(const Engine& engine);

class EncoderClass : public torch::CustomClassHolder {
 public:
  // config: JSON (EncoderConfig::parse). attention: "auto", "fused" or "general". All weights on one device; those that
  // are no matrices of one dtype, the stream's, each matrix as it is stored; missing, extra, misshapen and otherwise
  // unfit ones are all listed in the error. On the CPU a matrix may come packed (torch.ops.ftbert.pack_weight), and in
  // bf16: then its product is computed in bf16 with float sums. One in q8_0 may come packed on any device, with its
  // scales (torch.ops.ftbert.pack_q8_0), which then are no tensor of their own.
  EncoderClass(TensorDict weights, std::string config, std::string attention);

  // The ranks of one process: each shard, in their order, on a device of its own (binding/ranks.h).
  explicit EncoderClass(std::vector<c10::intrusive_ptr<EncoderClass>> shards);
  // A model in stages.
  explicit EncoderClass(const Stages& stages);

  const Engine& engine() const { return *engine_; }
  Engine& engine() { return *engine_; }
  const EncoderConfig& config() const { return config_; }
  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }  // of the residual stream and of results
  std::string matrix_dtype() const;                // the narrowest in which one is stored

  // All of the model is here, on one device.
  bool whole() const { return stages_.empty() && config_.shard.whole() && config_.stage.whole(); }
  // The weights in their plain layout (those repacked for the GEMM are laid out anew), and what was given.
  TensorDict weights() const;
  // One of them without a copy; throws for an unknown name and for a repacked matrix.
  at::Tensor weight(const std::string& name) const;
  std::string description() const { return description_; }  // the config as it was given
  std::string attention() const { return attention_; }
  const std::vector<c10::intrusive_ptr<EncoderClass>>& shards() const { return shards_; }  // empty: this is one
  const std::vector<c10::intrusive_ptr<EncoderClass>>& stages() const { return stages_; }  // likewise; those here
  StringDict info() const;
  // bf16 on the CPU: the matrices alone.
  c10::intrusive_ptr<EncoderClass> to(at::Device device, at::ScalarType dtype) const;

 private:
  std::map<std::string, int64_t> count_matrices() const;  // by the name of their type

  TensorDict weights_;                        // plain tensors that kernels read
  std::map<std::string, at::Tensor> packed_;  // GEMM operands in the CPU library's layout or q8_0's, instead of plain
  std::map<std::string, DType> matrix_dtypes_;
  std::string description_, attention_;
  EncoderConfig config_;
  at::Device device_{at::kCPU};
  at::ScalarType dtype_ = at::kFloat;
  std::vector<c10::intrusive_ptr<EncoderClass>> shards_, stages_;
  std::unique_ptr<Engine> engine_;
};

// engine.cpp
template <class Device, class T>
std::unique_ptr<Engine> make_engine(const EncoderConfig& config, Weights<T> weights, at::Device device,
                                    std::optional<AttentionPath> attention);

}  // namespace ftbert::binding
