#include <ATen/ops/cat.h>

#include <algorithm>

#include "binding/micro_batches.h"
#include "binding/ranks.h"

namespace ftbert::binding {
namespace {

void check_stages(const Stages& stages) {
  const auto& here = stages.here;
  FTBERT_CHECK(here.size() > 1, "expected at least two stages, got ", here.size());
  for (size_t i = 0; i < here.size(); ++i) {
    const Stage& stage = here[i]->config().stage;
    FTBERT_CHECK(stage.index == static_cast<int64_t>(i) && stage.count == static_cast<int64_t>(here.size()),
                 "expected stage ", i, " of ", here.size(), ", got stage ", stage.index, " of ", stage.count);
    FTBERT_CHECK(here[i]->device().type() == here[0]->device().type() && here[i]->dtype() == here[0]->dtype(),
                 "expected stages on devices of one kind and in one dtype, got ", here[i]->device().str(), " beside ",
                 here[0]->device().str());
  }
}

// Launches of a GPU return at once: stage s computes one micro-batch while the host launches the next on stage s - 1.
// On the CPU stages follow each other.
class EngineOfStages : public Engine {
 public:
  explicit EngineOfStages(const Stages& stages) : stages_(stages.here) {}

  std::vector<at::Tensor> forward(const Call& call, const std::vector<Want>& wants) const override {
    const Call here = call_at(call, first().device(), first().device());  // from now on its mask is on the CPU
    const std::vector<Run> runs = micro_batches(here, static_cast<int64_t>(stages_.size()));
    // All of it goes to all devices first: a copy between two GPUs waits for what both have begun.
    std::vector<Call> calls;
    std::vector<StageResults> results;
    for (const auto& stage : stages_) {
      calls.push_back(call_at(here, first().device(), stage->device()));
      results.emplace_back(stage->config().stage, wants);
    }
    for (const Run& run : runs) {
      at::Tensor stream;
      for (size_t i = 0; i < stages_.size(); ++i) {
        Call part = part_of(calls[i], run);
        if (i > 0) part.hidden = [&](int64_t) { return stream.to(stages_[i]->device(), /*non_blocking=*/true); };
        stream = results[i].add(run, stages_[i]->engine().forward(part, results[i].asked()));
      }
    }
    std::vector<at::Tensor> made;
    for (const Want want : wants) {
      const bool twice = std::count(wants.begin(), wants.begin() + static_cast<int64_t>(made.size()), want) > 0;
      const at::Tensor one = result(results, want);
      made.push_back(twice ? one.clone() : one);
    }
    return made;
  }

  void use_cuda_graphs(bool on) const override {
    for (const auto& stage : stages_) stage->engine().use_cuda_graphs(on);
  }
  bool uses_cuda_graphs() const override { return first().engine().uses_cuda_graphs(); }
  AttentionPath attention_path() const override { return first().engine().attention_path(); }
  void join(AnyCommunicator) override { fail("these stages are together already"); }
  AnyCommunicator communicator() const override { return {}; }

  std::map<std::string, std::string> info() const override {
    std::map<std::string, std::string> all = first().engine().info();
    std::string places;
    for (const auto& stage : stages_) places += (places.empty() ? "" : ", ") + layers_of(*stage);
    all["parallel"] = "pipeline, " + places;
    return all;
  }

 private:
  const EncoderClass& first() const { return *stages_.front(); }

  // On the first device. Only now: it would wait there for the last stage.
  at::Tensor result(const std::vector<StageResults>& results, Want want) const {
    const auto here = [&](const at::Tensor& made) { return made.to(first().device(), /*non_blocking=*/true); };
    if (want == Want::cu_seqlens || want == Want::packed_index) return results.front().joined(want);
    if (want != Want::hidden_states) return here(results.back().joined(want));
    std::vector<at::Tensor> states;
    for (const StageResults& one : results) states.push_back(here(one.joined(want)));
    return at::cat(states);
  }

  const std::vector<c10::intrusive_ptr<EncoderClass>> stages_;
};

}  // namespace

std::string layers_of(const EncoderClass& stage) {
  const int64_t first = stage.config().stage.first_layer, last = first + stage.config().depth() - 1;
  return (first == last ? "layer " : "layers " + std::to_string(first) + " to ") + std::to_string(last) + " on " +
         stage.device().str();
}

std::unique_ptr<Engine> make_engine_of_stages(const Stages& stages) {
  check_stages(stages);
  return std::make_unique<EngineOfStages>(stages);
}

}  // namespace ftbert::binding
