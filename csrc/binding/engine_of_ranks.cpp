#include <algorithm>

#include "binding/rank_runner.h"
#include "binding/ranks.h"

namespace ftbert::binding {
namespace {

bool layers_alike(const EncoderConfig& one, const EncoderConfig& other) {
  if (one.depth() != other.depth() || one.hidden != other.hidden) return false;
  for (int64_t i = 0; i < one.depth(); ++i)
    if (layer_weight_specs(one, one.layers[i]) != layer_weight_specs(other, other.layers[i])) return false;
  return true;
}

std::vector<at::Device> devices_of(const std::vector<c10::intrusive_ptr<EncoderClass>>& shards) {
  FTBERT_CHECK(shards.size() > 1, "expected the shards of at least two ranks, got ", shards.size());
  std::vector<at::Device> devices;
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    const EncoderClass& one = *shards[rank];
    const Shard expected{static_cast<int64_t>(rank), static_cast<int64_t>(shards.size())};
    FTBERT_CHECK(one.config().shard == expected, "expected rank ", rank, "'s shard of ", shards.size(), ", got rank ",
                 one.config().shard.rank, "'s of ", one.config().shard.size);
    FTBERT_CHECK(one.device().type() == shards[0]->device().type() && one.dtype() == shards[0]->dtype(),
                 "expected shards on devices of one kind and in one dtype, got ", one.device().str(), " beside ",
                 shards[0]->device().str());
    FTBERT_CHECK(layers_alike(one.config(), shards[0]->config()), "shard ", rank,
                 " is of another model than the first");
    FTBERT_CHECK(one.device().is_cpu() || std::count(devices.begin(), devices.end(), one.device()) == 0,
                 "two shards on ", one.device().str());
    devices.push_back(one.device());
  }
  return devices;
}

class EngineOfRanks : public Engine {
 public:
  explicit EngineOfRanks(const std::vector<c10::intrusive_ptr<EncoderClass>>& shards)
      : shards_(shards), runner_(std::make_shared<RankRunner>(devices_of(shards))) {
    for (size_t rank = 0; rank < shards_.size(); ++rank)
      shards_[rank]->engine().join(runner_->communicator(static_cast<int64_t>(rank)));
  }

  std::vector<at::Tensor> forward(const Call& call, const std::vector<Want>& wants) const override {
    std::vector<Call> calls{call};
    std::vector<at::Tensor> made;
    const auto work = [&](int64_t rank) {
      std::vector<at::Tensor> results = shards_[rank]->engine().forward(calls[rank], wants);
      if (rank == 0) made = std::move(results);
    };
    runner_->run(work, [&] {
      for (int64_t rank = 1; rank < static_cast<int64_t>(shards_.size()); ++rank) calls.push_back(at_rank(call, rank));
    });
    return made;
  }

  void use_cuda_graphs(bool on) const override {
    runner_->between_calls([&] {
      for (const auto& shard : shards_) shard->engine().use_cuda_graphs(on);
    });
  }
  bool uses_cuda_graphs() const override { return first().uses_cuda_graphs(); }
  AttentionPath attention_path() const override { return first().attention_path(); }
  void join(AnyCommunicator) override { fail("these ranks are together already"); }
  AnyCommunicator communicator() const override { return first().communicator(); }
  std::shared_ptr<RankRunner> runner() const override { return runner_; }

  double seconds_of_sum(int64_t rows) const override {
    double seconds = 0;
    runner_->run([&](int64_t rank) {
      const double taken = shards_[rank]->engine().seconds_of_sum(rows);
      if (rank == 0) seconds = taken;
    });
    return seconds;
  }

  std::map<std::string, std::string> info() const override {
    std::map<std::string, std::string> all = first().info();
    std::string places;
    for (const at::Device& device : runner_->devices()) places += (places.empty() ? "" : ", ") + device.str();
    all["parallel"] = "tensor, a share of heads and of inter on each of " + places + "; sums " + runner_->way();
    return all;
  }

 private:
  const Engine& first() const { return shards_.front()->engine(); }

  Call at_rank(const Call& call, int64_t rank) const {
    const auto there = [&](const std::optional<at::Tensor>& t) -> std::optional<at::Tensor> {
      if (!t) return t;
      return runner_->at_rank(*t, rank);
    };
    return {runner_->at_rank(call.input_ids, rank),
            there(call.attention_mask),
            there(call.token_type_ids),
            there(call.cu_seqlens),
            call.max_seqlen,
            there(call.rows),
            call.shared_prefix};
  }

  const std::vector<c10::intrusive_ptr<EncoderClass>> shards_;
  const std::shared_ptr<RankRunner> runner_;
};

}  // namespace

std::unique_ptr<Engine> make_engine_of_ranks(const std::vector<c10::intrusive_ptr<EncoderClass>>& shards) {
  return std::make_unique<EngineOfRanks>(shards);
}

}  // namespace ftbert::binding
