// Runs calls of a model, encoder or decoder, wherever it lies: on one device, as ranks or as stages. Ranks have a share
// of each layer's heads and of inter each; stages have some of the layers each.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "binding/call.h"
#include "binding/encoder_class.h"
#include "binding/forward.h"

namespace ftbert::binding {

class ProcessGroup;  // binding/process_group.h
class RankRunner;    // binding/rank_runner.h
class StageResults;  // binding/micro_batches.h

// A model whose layers lie on several devices, one stage after another. here: the stages of this process, in order;
// all, or with processes its own, whose number is the process's.
struct Stages {
  std::vector<EncoderPtr> here;
  std::string config;                 // of the whole model, as given
  std::vector<int64_t> first_layers;  // by stage
  std::shared_ptr<const Processes> processes;
  TensorDict shared;  // what heads read by `weight`, on the first of `here`'s device
};

class Engine {
 public:
  // A model, a rank's share of it or a stage, on one device.
  explicit Engine(std::unique_ptr<Forward> here);
  // The ranks of this process, in their order, each on a device of its own: a call runs on all of them, and gives what
  // the first makes. Calls follow each other, whatever streams they come on. An exception of one rank ends the call on
  // all.
  explicit Engine(std::vector<EncoderPtr> ranks);
  // Calls go through the stages by micro-batches (binding/micro_batches.h); ids and results lie on the first's device.
  // Where stages are processes, each makes the same calls and gets what the last stage makes. whole: of all stages.
  Engine(const Stages& stages, ModelConfig whole);
  ~Engine();

  // One tensor for each want, in their order.
  std::vector<at::Tensor> forward(const Call& call, const std::vector<Want>& wants) const;
  // Ranks or stages of this process; empty: the model is on one device.
  const std::vector<EncoderPtr>& members() const { return members_; }

  void use_cuda_graphs(bool on) const;
  bool uses_cuda_graphs() const { return first().uses_cuda_graphs(); }
  AttentionPath attention_path() const { return first().attention_path(); }
  std::map<std::string, std::string> info() const;
  // Of one device, before the first call of a rank's share: with whom it adds up.
  void join(AnyCommunicator communicator);
  // Of one device, before the first call with this cache.
  void attach(DecoderCache& cache) const { here_->attach(cache); }
  // Of several ranks in this process: what a sum over ranks takes (binding/sum_time.h); else 0.
  double seconds_of_sum(int64_t rows) const;

 private:
  const Forward& first() const { return here_ ? *here_ : members_.front()->engine().first(); }
  std::vector<at::Tensor> on_ranks(const Call& call, const std::vector<Want>& wants) const;

  const Stage& place() const { return members_.front()->config().stage; }  // of the first stage of this process
  std::vector<at::Tensor> through_stages(const Call& call, const std::vector<Want>& wants) const;
  at::Tensor result(const Call& call, const std::vector<StageResults>& results, Want want) const;
  at::Tensor hidden_states(const std::vector<StageResults>& results) const;
  at::Tensor receive(int64_t tokens) const;
  std::vector<int64_t> shape_of(const Call& call, Want want, int64_t tokens) const;
  at::Tensor empty(at::IntArrayRef shape) const;

  const std::unique_ptr<Forward> here_;
  const std::vector<EncoderPtr> members_;
  const std::shared_ptr<RankRunner> runner_;         // of ranks
  const ModelConfig whole_;                          // of stages
  const std::vector<int64_t> first_layers_;          // likewise, of each
  const std::unique_ptr<const ProcessGroup> group_;  // of stages that are processes
  mutable std::mutex calls_;                         // likewise: the others make calls one after another, too
};

}  // namespace ftbert::binding
