#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>

#include "binding/call_words.h"
#include "binding/micro_batches.h"
#include "binding/process_group.h"
#include "binding/ranks.h"
#include "binding/tensors.h"

namespace ftbert::binding {
namespace {

// This process has one stage, and the process group's next ranks the ones after it.
class EngineOfProcessStages : public Engine {
 public:
  EngineOfProcessStages(const Stages& stages, const EncoderConfig& whole)
      : stage_(stages.here.front()),
        whole_(whole),
        first_layers_(stages.first_layers),
        group_(*stages.processes, place().index, place().count) {
    FTBERT_CHECK(stages.here.size() == 1 && static_cast<int64_t>(first_layers_.size()) == place().count,
                 "expected one stage of ", place().count, ", and the first layers of all");
  }

  std::vector<at::Tensor> forward(const Call& call, const std::vector<Want>& wants) const override {
    const std::lock_guard calls(calls_);  // the others make them one after another, too
    return alike(&group_, [&] { return lines_of(call, wants, group_.contents()); }, [&] { return run(call, wants); });
  }

  void use_cuda_graphs(bool on) const override { stage_->engine().use_cuda_graphs(on); }
  bool uses_cuda_graphs() const override { return stage_->engine().uses_cuda_graphs(); }
  AttentionPath attention_path() const override { return stage_->engine().attention_path(); }
  void join(AnyCommunicator) override { fail("this stage is with the others already"); }
  AnyCommunicator communicator() const override { return {}; }

  std::map<std::string, std::string> info() const override {
    std::map<std::string, std::string> all = stage_->engine().info();
    all["parallel"] = "pipeline over " + std::to_string(place().count) + " processes, of " +
                      std::to_string(whole_.depth()) + " layers here " + layers_of(*stage_);
    return all;
  }

 private:
  const Stage& place() const { return stage_->config().stage; }

  std::vector<at::Tensor> run(const Call& call, const std::vector<Want>& wants) const {
    const Call mine = call_at(call, stage_->device(), stage_->device());
    StageResults results(place(), wants);
    std::vector<ProcessGroup::Sent> sent;
    const auto wait = [&] {
      for (const ProcessGroup::Sent& one : sent) one.wait();
    };
    try {
      for (const Run& run : micro_batches(mine, place().count)) {
        Call part = part_of(mine, run);
        if (!place().first()) part.hidden = [&](int64_t tokens) { return receive(tokens); };
        const at::Tensor stream = results.add(run, stage_->engine().forward(part, results.asked()));
        if (!place().last()) sent.push_back(group_.send(stream, place().index + 1));
      }
    } catch (...) {
      wait();  // the next stage is to get what is on its way
      throw;
    }
    wait();
    std::vector<at::Tensor> made;
    for (const Want want : wants) {
      if (const auto before = std::find(wants.begin(), wants.end(), want) - wants.begin();
          before < static_cast<int64_t>(made.size()))
        made.push_back(made[before].clone());
      else
        made.push_back(result(call, results, want));
    }
    return made;
  }

  at::Tensor empty(at::IntArrayRef shape) const {
    return at::empty(shape, at::TensorOptions().device(stage_->device()).dtype(stage_->dtype()));
  }

  at::Tensor receive(int64_t tokens) const {
    const at::Tensor hidden = empty({tokens, whole_.hidden});
    group_.receive(hidden, place().index - 1);
    return hidden;
  }

  at::Tensor result(const Call& call, const StageResults& results, Want want) const {
    if (want == Want::cu_seqlens || want == Want::packed_index) return results.joined(want);
    if (want == Want::hidden_states) return hidden_states(results);
    const at::Tensor made =
        place().last() ? results.joined(want).contiguous() : empty(shape_of(call, want, results.tokens()));
    group_.broadcast(made, place().count - 1);
    return made;
  }

  // Of the last stage. tokens: of the valid ones.
  std::vector<int64_t> shape_of(const Call& call, Want want, int64_t tokens) const {
    const int64_t cols = whole_.hidden;
    const int64_t batch = call.cu_seqlens ? call.cu_seqlens->size(0) - 1 : call.input_ids.size(0);
    switch (want) {
      case Want::tokens:
        if (!call.cu_seqlens) return {batch, call.input_ids.size(1), cols};
        return {tokens, cols};
      case Want::packed_tokens: return {tokens, cols};
      case Want::rows: return {call.rows->size(0), cols};
      case Want::pooled: return {batch, whole_.pooler ? cols : 0};
      default: return {batch, cols};
    }
  }

  // Each stage's, from who has it.
  at::Tensor hidden_states(const StageResults& results) const {
    const at::Tensor own = results.joined(Want::hidden_states);
    std::vector<int64_t> shape = own.sizes().vec();
    shape[0] = whole_.depth() + 1;
    const at::Tensor all = empty(shape);
    for (int64_t i = 0; i < place().count; ++i) {
      const int64_t begin = i == 0 ? 0 : first_layers_[i] + 1;
      const int64_t end = (i + 1 < place().count ? first_layers_[i + 1] : whole_.depth()) + 1;
      const at::Tensor states = all.narrow(0, begin, end - begin);
      if (i == place().index) states.copy_(own);
      group_.broadcast(states, i);
    }
    return all;
  }

  const c10::intrusive_ptr<EncoderClass> stage_;
  const EncoderConfig whole_;
  const std::vector<int64_t> first_layers_;
  const ProcessGroup group_;
  mutable std::mutex calls_;
};

}  // namespace

std::unique_ptr<Engine> make_engine_of_process_stages(const Stages& stages, const EncoderConfig& whole) {
  return std::make_unique<EngineOfProcessStages>(stages, whole);
}

}  // namespace ftbert::binding
