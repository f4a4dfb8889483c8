#include "binding/engine.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "binding/call_words.h"
#include "binding/micro_batches.h"
#include "binding/process_group.h"
#include "binding/rank_runner.h"

namespace ftbert::binding {
namespace {

bool layers_alike(const ModelConfig& one, const ModelConfig& other) {
  if (one.depth() != other.depth() || one.hidden != other.hidden) return false;
  for (int64_t i = 0; i < one.depth(); ++i)
    if (layer_weight_specs(one, one.layers[i]) != layer_weight_specs(other, other.layers[i])) return false;
  return true;
}

void check_kind(const char* members, const EncoderClass& one, const EncoderClass& first) {
  FTBERT_CHECK(one.device().type() == first.device().type() && one.dtype() == first.dtype(), "expected ", members,
               " on devices of one kind and in one dtype, got ", one.device().str(), " beside ", first.device().str());
}

std::vector<at::Device> devices_of_ranks(const std::vector<EncoderPtr>& shards) {
  FTBERT_CHECK(shards.size() > 1, "expected the shards of at least two ranks, got ", shards.size());
  std::vector<at::Device> devices;
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    const EncoderClass& one = *shards[rank];
    const Shard expected{static_cast<int64_t>(rank), static_cast<int64_t>(shards.size())};
    FTBERT_CHECK(one.config().shard == expected, "expected rank ", rank, "'s shard of ", shards.size(), ", got rank ",
                 one.config().shard.rank, "'s of ", one.config().shard.size);
    check_kind("shards", one, *shards[0]);
    FTBERT_CHECK(layers_alike(one.config(), shards[0]->config()), "shard ", rank,
                 " is of another model than the first");
    FTBERT_CHECK(one.device().is_cpu() || std::count(devices.begin(), devices.end(), one.device()) == 0,
                 "two shards on ", one.device().str());
    devices.push_back(one.device());
  }
  return devices;
}

std::unique_ptr<const ProcessGroup> group_of_stages(const Stages& stages) {
  const auto& here = stages.here;
  const Stage& first = here.front()->config().stage;
  if (stages.processes) {
    FTBERT_CHECK(here.size() == 1 && static_cast<int64_t>(stages.first_layers.size()) == first.count,
                 "expected one stage of ", first.count, ", and the first layers of all");
    return std::make_unique<const ProcessGroup>(*stages.processes, first.index, first.count);
  }
  FTBERT_CHECK(here.size() > 1, "expected at least two stages, got ", here.size());
  for (size_t i = 0; i < here.size(); ++i) {
    const Stage& stage = here[i]->config().stage;
    FTBERT_CHECK(stage.index == static_cast<int64_t>(i) && stage.count == static_cast<int64_t>(here.size()),
                 "expected stage ", i, " of ", here.size(), ", got stage ", stage.index, " of ", stage.count);
    check_kind("stages", *here[i], *here[0]);
  }
  return nullptr;
}

// A call's caches are those of all members.
void choose_cache(Call& call, size_t member) {
  if (!call.caches.empty()) call.caches = call.caches.subspan(member, 1);
}

// For people: "layers 0 to 5 on cuda:0".
std::string layers_of(const EncoderClass& stage) {
  const int64_t first = stage.config().stage.first_layer, last = first + stage.config().depth() - 1;
  return (first == last ? "layer " : "layers " + std::to_string(first) + " to ") + std::to_string(last) + " on " +
         stage.device().str();
}

std::string joined(const std::vector<EncoderPtr>& members, std::string (*words)(const EncoderClass&)) {
  std::string all;
  for (const EncoderPtr& one : members) all += (all.empty() ? "" : ", ") + words(*one);
  return all;
}

}  // namespace

Engine::Engine(std::unique_ptr<Forward> here) : here_(std::move(here)) {}

Engine::Engine(std::vector<EncoderPtr> ranks)
    : members_(std::move(ranks)), runner_(std::make_shared<RankRunner>(devices_of_ranks(members_))) {
  for (size_t rank = 0; rank < members_.size(); ++rank)
    members_[rank]->engine().join(runner_->communicator(static_cast<int64_t>(rank)));
}

Engine::Engine(const Stages& stages, ModelConfig whole)
    : members_(stages.here),
      whole_(std::move(whole)),
      first_layers_(stages.first_layers),
      group_(group_of_stages(stages)) {}

Engine::~Engine() = default;

std::vector<at::Tensor> Engine::forward(const Call& call, const std::vector<Want>& wants) const {
  if (here_) return here_->run(call, wants);
  if (runner_) return on_ranks(call, wants);
  if (!group_) return through_stages(call, wants);
  const std::lock_guard calls(calls_);
  return alike(
      group_.get(), [&] { return lines_of(call, wants, group_->contents()); },
      [&] { return through_stages(call, wants); });
}

void Engine::use_cuda_graphs(bool on) const {
  if (here_) return here_->use_cuda_graphs(on);
  const auto switch_all = [&] {
    for (const EncoderPtr& one : members_) one->engine().use_cuda_graphs(on);
  };
  if (runner_)
    runner_->between_calls(switch_all);
  else
    switch_all();
}

std::map<std::string, std::string> Engine::info() const {
  std::map<std::string, std::string> all = first().info();
  if (runner_)
    all["parallel"] = "tensor, a share of heads and of inter on each of " +
                      joined(members_, [](const EncoderClass& one) { return one.device().str(); }) + "; sums " +
                      runner_->way();
  else if (group_)
    all["parallel"] = "pipeline over " + std::to_string(place().count) + " processes, of " +
                      std::to_string(whole_.depth()) + " layers here " + joined(members_, layers_of);
  else if (!members_.empty())
    all["parallel"] = "pipeline, " + joined(members_, layers_of);
  return all;
}

void Engine::join(AnyCommunicator communicator) {
  FTBERT_CHECK(here_, "these ", runner_ ? "ranks" : "stages", " are together already");
  here_->join(std::move(communicator));
}

// ---- ranks --------------------------------------------------------------------------------------------------------

std::vector<at::Tensor> Engine::on_ranks(const Call& call, const std::vector<Want>& wants) const {
  std::vector<Call> calls{call};
  std::vector<at::Tensor> made;
  const auto work = [&](int64_t rank) {
    std::vector<at::Tensor> results = members_[rank]->engine().forward(calls[rank], wants);
    if (rank == 0) made = std::move(results);
  };
  runner_->run(work, [&] {
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      const auto move = [&](at::Tensor& tensor) { tensor = runner_->at_rank(tensor, static_cast<int64_t>(rank)); };
      Call there = call;
      there.move_ids(move);
      if (there.attention_mask) move(*there.attention_mask);
      choose_cache(there, rank);
      calls.push_back(std::move(there));
    }
  });
  return made;
}

double Engine::seconds_of_sum(int64_t rows) const {
  double seconds = 0;
  if (!runner_) return seconds;
  runner_->run([&](int64_t rank) {
    const double taken = members_[rank]->engine().here_->seconds_of_sum(rows);
    if (rank == 0) seconds = taken;
  });
  return seconds;
}

// ---- stages -------------------------------------------------------------------------------------------------------

// Launches of a GPU return at once: stage s computes one micro-batch while the host launches the next on stage s - 1.
// On the CPU the stages of a process follow each other.
std::vector<at::Tensor> Engine::through_stages(const Call& call, const std::vector<Want>& wants) const {
  const at::Device first = members_.front()->device();
  const Call here = call_at(call, first, first);  // from now on its mask is on the CPU
  const std::vector<Run> runs = micro_batches(here, place().count);
  // All of it goes to all devices first: a copy between two GPUs waits for what both have begun.
  std::vector<Call> calls;
  std::vector<StageResults> results;
  for (size_t i = 0; i < members_.size(); ++i) {
    calls.push_back(call_at(here, first, members_[i]->device()));
    choose_cache(calls.back(), i);
    results.emplace_back(members_[i]->config().stage, wants);
  }
  std::vector<ProcessGroup::Sent> sent;
  const auto wait = [&] {
    for (const ProcessGroup::Sent& one : sent) one.wait();
  };
  try {
    for (const Run& run : runs) {
      at::Tensor stream;
      for (size_t i = 0; i < members_.size(); ++i) {
        Call one = micro_batch_of(calls[i], run);
        const at::Device device = members_[i]->device();
        if (!members_[i]->config().stage.first())
          one.hidden = [&](int64_t tokens) {
            return i > 0 ? stream.to(device, /*non_blocking=*/true) : receive(tokens);
          };
        stream = results[i].add(run, members_[i]->engine().forward(one, results[i].asked()));
      }
      if (stream.defined()) sent.push_back(group_->send(stream, place().index + 1));
    }
  } catch (...) {
    wait();  // the next stage is to get what is on its way
    throw;
  }
  wait();
  std::vector<at::Tensor> made;
  for (const Want want : wants) {
    const auto before = static_cast<size_t>(std::find(wants.begin(), wants.end(), want) - wants.begin());
    made.push_back(before < made.size() ? made[before].clone() : result(call, results, want));
  }
  return made;
}

// On the first device of this process. Only now: it would wait there for the last stage.
at::Tensor Engine::result(const Call& call, const std::vector<StageResults>& results, Want want) const {
  const StageResults& last = results.back();
  if (want == Want::cu_seqlens || want == Want::packed_index) return results.front().joined(want);
  if (want == Want::hidden_states) return hidden_states(results);
  if (!group_) return last.joined(want).to(members_.front()->device(), /*non_blocking=*/true);
  const at::Tensor made = place().last() ? last.joined(want).contiguous() : empty(shape_of(call, want, last.tokens()));
  group_->broadcast(made, place().count - 1);
  return made;
}

// Of all stages, each from the stage that has them.
at::Tensor Engine::hidden_states(const std::vector<StageResults>& results) const {
  std::vector<at::Tensor> own;
  for (const StageResults& one : results)
    own.push_back(one.joined(Want::hidden_states).to(members_.front()->device(), /*non_blocking=*/true));
  if (!group_) return at::cat(own);
  std::vector<int64_t> shape = own.front().sizes().vec();
  shape[0] = whole_.depth() + 1;
  const at::Tensor all = empty(shape);
  for (int64_t i = 0; i < place().count; ++i) {
    const int64_t begin = i == 0 ? 0 : first_layers_[i] + 1;
    const int64_t end = (i + 1 < place().count ? first_layers_[i + 1] : whole_.depth()) + 1;
    const at::Tensor states = all.narrow(0, begin, end - begin);
    if (i == place().index) states.copy_(own.front());
    group_->broadcast(states, i);
  }
  return all;
}

// From the process of the stage before.
at::Tensor Engine::receive(int64_t tokens) const {
  const at::Tensor hidden = empty({tokens, whole_.hidden});
  group_->receive(hidden, place().index - 1);
  return hidden;
}

// Of a result of the last stage. tokens: of the valid ones.
std::vector<int64_t> Engine::shape_of(const Call& call, Want want, int64_t tokens) const {
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

at::Tensor Engine::empty(at::IntArrayRef shape) const {
  const EncoderClass& stage = *members_.front();
  return at::empty(shape, at::TensorOptions().device(stage.device()).dtype(stage.dtype()));
}

}  // namespace ftbert::binding
