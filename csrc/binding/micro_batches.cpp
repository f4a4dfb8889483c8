#include "binding/micro_batches.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "binding/tensors.h"

namespace ftbert::binding {
namespace {

// From some 300 rows on a product of 16-bit numbers takes longer to compute than its weights to read (H100: 990 TFLOP/s
// over 3.35 TB/s); below that a second micro-batch would cost as much as a first. This many fill all of a GPU.
constexpr int64_t kLeastTokens = 1024;

// S stages wait for (S - 1) / (M + S - 1) of the time with M micro-batches: here for less than a fifth.
constexpr int64_t kMicroBatchesOfStage = 4;

// Where each sequence begins, and the last one ends; empty where the call is wrong, for the stages to say.
std::vector<int64_t> offsets_of(const Call& call) {
  std::vector<int64_t> offsets{0};
  if (call.cu_seqlens) {
    const at::Tensor cu = call.cu_seqlens->to(at::kCPU, at::kLong).contiguous();
    if (cu.dim() != 1 || cu.numel() == 0) return {};
    offsets.assign(data<int64_t>(cu), data<int64_t>(cu) + cu.numel());
    const bool fits = offsets.front() == 0 && offsets.back() == call.input_ids.numel();
    return fits && std::is_sorted(offsets.begin(), offsets.end()) ? offsets : std::vector<int64_t>();
  }
  const int64_t batch = call.input_ids.size(0);
  if (!call.attention_mask) {
    for (int64_t i = 1; i <= batch; ++i) offsets.push_back(i * call.input_ids.size(1));
    return offsets;
  }
  if (call.attention_mask->sizes() != call.input_ids.sizes()) return {};
  const at::Tensor lengths = call.attention_mask->ne(0).sum(1).to(at::kCPU, at::kLong).contiguous();
  for (int64_t i = 0; i < batch; ++i) offsets.push_back(offsets.back() + data<int64_t>(lengths)[i]);
  return offsets;
}

Run run_of(const std::vector<int64_t>& offsets, int64_t begin, int64_t end) {
  return {.first_sequence = begin,
          .sequences = end - begin,
          .first_token = offsets[begin],
          .tokens = offsets[end] - offsets[begin]};
}

// Wants that each stage answers for its layers or knows; of `rows` only whether they exist.
bool of_every_stage(Want want) {
  return want == Want::hidden_states || want == Want::cu_seqlens || want == Want::packed_index || want == Want::rows;
}

}  // namespace

std::vector<Run> micro_batches(const Call& call, int64_t stages) {
  const bool cut = call.input_ids.dim() == (call.cu_seqlens ? 1 : 2) && !call.rows && call.shared_prefix == 0 &&
                   call.caches.empty() && call.input_ids.numel() >= 2 * kLeastTokens;
  const std::vector<int64_t> offsets = cut ? offsets_of(call) : std::vector<int64_t>();
  if (offsets.size() < 2) return {Run{}};
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1, tokens = offsets.back();
  const int64_t most = std::min(tokens / kLeastTokens, kMicroBatchesOfStage * stages);
  std::vector<Run> runs;
  int64_t begin = 0;
  for (int64_t i = 1; i < most; ++i) {
    const int64_t wanted = tokens * i / most;
    int64_t end = std::lower_bound(offsets.begin(), offsets.end(), wanted) - offsets.begin();
    if (wanted - offsets[end - 1] < offsets[end] - wanted) --end;
    if (end <= begin || end >= count) continue;
    runs.push_back(run_of(offsets, begin, end));
    begin = end;
  }
  if (begin == 0) return {Run{}};
  runs.push_back(run_of(offsets, begin, count));
  return runs;
}

Call call_at(const Call& call, at::Device first, at::Device device) {
  const auto move = [&](at::Tensor& tensor) {
    if (tensor.device() == first) tensor = tensor.to(device, /*non_blocking=*/true);
  };
  Call there = call;
  there.move_ids(move);
  if (call.attention_mask) there.attention_mask = call.attention_mask->cpu();
  return there;
}

Call micro_batch_of(const Call& call, const Run& run) {
  if (run.sequences == 0) return call;
  const int64_t first = call.cu_seqlens ? run.first_token : run.first_sequence;
  const int64_t count = call.cu_seqlens ? run.tokens : run.sequences;
  const auto some = [&](const std::optional<at::Tensor>& all) -> std::optional<at::Tensor> {
    if (!all) return all;
    return all->narrow(0, first, count);
  };
  Call made = call;
  made.input_ids = call.input_ids.narrow(0, first, count);
  made.attention_mask = some(call.attention_mask);
  made.token_type_ids = some(call.token_type_ids);
  if (call.cu_seqlens)
    made.cu_seqlens = call.cu_seqlens->narrow(0, run.first_sequence, run.sequences + 1).sub(run.first_token);
  if (call.keys) made.keys = call.keys->narrow(0, run.first_sequence, run.sequences);
  return made;
}

StageResults::StageResults(const Stage& stage, const std::vector<Want>& wants) : stage_(stage) {
  if (!stage.last()) asked_.push_back(Want::packed_tokens);
  for (const Want want : wants)
    if ((stage.last() || of_every_stage(want)) && std::find(asked_.begin(), asked_.end(), want) == asked_.end())
      asked_.push_back(want);
}

at::Tensor StageResults::add(const Run& run, std::vector<at::Tensor> made) {
  runs_.push_back(run);
  for (size_t i = stage_.last() ? 0 : 1; i < asked_.size(); ++i) made_[asked_[i]].push_back(made[i]);
  if (stage_.last()) return {};
  tokens_ += made[0].size(0);
  return made[0];
}

at::Tensor StageResults::joined(Want want) const {
  const std::vector<at::Tensor>& made = made_.at(want);
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i < made.size(); ++i) {
    at::Tensor piece = made[i];
    const int64_t before = runs_[i].first_token;
    if (want == Want::hidden_states && !stage_.first()) piece = piece.narrow(0, 1, piece.size(0) - 1);
    if (want == Want::cu_seqlens && i > 0) piece = piece.narrow(0, 1, piece.size(0) - 1).add(before);
    if (want == Want::packed_index && i > 0) piece = piece.add(piece.ge(0).mul(before).to(piece.scalar_type()));
    pieces.push_back(std::move(piece));
  }
  return pieces.size() == 1 ? pieces.front() : at::cat(pieces, want == Want::hidden_states ? 1 : 0);
}

}  // namespace ftbert::binding
