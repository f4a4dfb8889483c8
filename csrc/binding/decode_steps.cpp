#include "binding/decode_steps.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <memory>

#include "binding/padding.h"
#include "core/communicator.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "core/graph.h"
#include "core/workspace.h"

namespace ftbert::binding {
namespace {

constexpr int64_t kMostSequences = 256;  // beyond, kernels take longer than their launches
constexpr size_t kMostRecordings = 64;   // the one not used for longest goes
constexpr int64_t kLeastRange = 256;     // of lengths: up to this, and from power to power of two

}  // namespace

template <class Device, class T>
struct DecodeSteps<Device, T>::Recording {
  int64_t sequences, longest;  // longest: an upper bound of tokens, with those that are there
  bool tf32;
  Batch batch;
  T* made = nullptr;  // [rows_with_slack(sequences), cols]
  void* gemm_workspace = nullptr;
  typename Decoder<Device, T>::Plan plan;
  Workspace workspace;
  std::unique_ptr<LaunchGraph> graph;
  bool ran = false, refused = false;

  // Takes memory for all of it. Over an empty workspace the pointers are null, and only its size counts.
  void carve(const Decoder<Device, T>& decoder, const Context<Device>& context, Workspace& all) {
    made = all.take<T>(rows_with_slack<Device>(sequences) * decoder.cols());
    gemm_workspace = all.take<char>(static_cast<int64_t>(context.gemm_workspace_bytes));
    workspace = Workspace(all.take<char>(static_cast<int64_t>(plan.bytes)), plan.bytes);
  }
};

template <class Device, class T>
DecodeSteps<Device, T>::DecodeSteps(const Decoder<Device, T>& decoder, const EncoderConfig& config, CacheMemory& memory,
                                    at::Device device)
    : decoder_(decoder), config_(config), memory_(memory), device_(device) {}

template <class Device, class T>
DecodeSteps<Device, T>::~DecodeSteps() = default;

template <class Device, class T>
void DecodeSteps<Device, T>::clear() {
  recordings_.clear();
  memory_.order.forget(buffers_);
  buffers_ = at::Tensor();
}

template <class Device, class T>
CacheSlots DecodeSteps<Device, T>::slots() const {
  return {data<int32_t>(slots_), data<int32_t>(memory_.lengths), memory_.cache.positions()};
}

// The call's ids, and its slots where they are others than before, to where recordings read them.
template <class Device, class T>
void DecodeSteps<Device, T>::stage(Context<Device>& context, const DecoderCall& call) {
  const c10::InferenceMode normal(false);  // these are written in place, in whatever mode the calls come
  if (!ids_.defined()) {
    const at::TensorOptions there = at::TensorOptions().device(device_);
    const int64_t most = std::min(kMostSequences, memory_.cache.slots());
    const at::Tensor slots = at::empty({most}, there.dtype(at::kInt));
    const at::Tensor offsets = at::arange(most + 1, there.dtype(at::kInt));
    if (!config_.stage.first()) {
      hidden_ = at::empty({most, config_.hidden}, there.dtype(scalar_type_of(kDType<T>)));
      memory_.order.keep(hidden_);
    }
    ids_ = at::empty({most}, there.dtype(at::kLong));  // last: what is defined here says that all are
    slots_ = slots, offsets_ = offsets;
    for (const at::Tensor& one : {ids_, slots_, offsets_}) memory_.order.keep(one);
  }
  const int64_t count = call.count();
  const auto* const slots = data<int32_t>(call.slots);
  if (!std::equal(slots, slots + count, staged_.begin(), staged_.end())) {
    staged_.clear();  // until they are there
    slots_.narrow(0, 0, count).copy_(call.slots.pin_memory(), /*non_blocking=*/true);
    staged_.assign(slots, slots + count);
  }
  CheckedInput input = check_packed<Device>(context, device_, config_, call.input_ids, offsets_.narrow(0, 0, count + 1),
                                            1, std::nullopt);
  copy_on_device(context, input.batch.ids, data<int64_t>(ids_), count * sizeof(int64_t));
  if (!hidden_.defined()) return;
  go_on_from(input, call.hidden, config_.hidden, kDType<T>);
  copy_on_device(context, input.batch.hidden, data<T>(hidden_), call.hidden.nbytes());
}

template <class Device, class T>
auto DecodeSteps<Device, T>::find(const Context<Device>& context, const DecoderCall& call) -> Recording& {
  const int64_t count = call.count();
  const auto range = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(kLeastRange, call.max_k))));
  const int64_t longest = std::min(memory_.cache.positions(), range);
  const auto known = std::find_if(recordings_.begin(), recordings_.end(), [&](const Recording& r) {
    return r.sequences == count && r.longest == longest && r.tf32 == context.tf32;
  });
  if (known != recordings_.end()) {
    recordings_.splice(recordings_.begin(), recordings_, known);
    return recordings_.front();
  }
  Recording made{.sequences = count, .longest = longest, .tf32 = context.tf32};
  made.batch = {.sequences = Sequences::of_tokens(data<int32_t>(offsets_), count, 1, count),
                .ids = data<int64_t>(ids_),
                .hidden = hidden_.defined() ? data<T>(hidden_) : nullptr};
  made.batch.sequences.max_k = longest;
  made.plan = decoder_.plan(context, made.batch);
  Workspace measure;
  made.carve(decoder_, context, measure);
  const size_t have = buffers_.defined() ? buffers_.nbytes() : 0;
  if (measure.bytes() > have) {
    clear();  // recordings point into the old buffer
    buffers_ = at::empty({static_cast<int64_t>(std::max(measure.bytes(), have + have / 2))},
                         at::TensorOptions().device(device_).dtype(at::kByte));
    memory_.order.keep(buffers_);
  }
  Workspace all(buffers_.data_ptr(), buffers_.nbytes());
  made.carve(decoder_, context, all);
  if (recordings_.size() >= kMostRecordings) recordings_.pop_back();
  return recordings_.emplace_front(std::move(made));
}

template <class Device, class T>
at::Tensor DecodeSteps<Device, T>::run(Context<Device>& context, const DecoderCall& call) {
  const int64_t count = call.count();
  if (count > kMostSequences || is_recording(context.stream)) return {};
  if (context.communicator && !context.communicator->records()) return {};
  if (decoder_.weight_scratch_bytes(context, count, count) > 0) return {};  // recordings have none
  Recording* found = nullptr;
  at::Tensor made;
  try {
    stage(context, call);
    found = &find(context, call);
    made = at::empty({count, decoder_.cols()}, at::TensorOptions().device(device_).dtype(scalar_type_of(kDType<T>)));
  } catch (const c10::OutOfMemoryError&) {
    if (context.communicator) throw;  // ranks run alike
    return {};
  }
  Recording& step = *found;
  Context<Device> mine = context;
  mine.gemm_workspace = step.gemm_workspace;
  const auto forward = [&](Context<Device>& on) {
    decoder_.forward(on, step.batch, slots(), step.plan, step.workspace, step.made);
  };
  if (context.communicator) context.communicator->reserve(sum_bytes<Device, T>(config_, step.batch));
  if (step.ran && !step.graph && !step.refused) {
    try {
      step.graph = record_graph([&](void* stream) {
        Context<Device> recorder = mine;
        recorder.stream = stream;
        forward(recorder);
      });
      ++recorded_;
    } catch (const Error&) {
      step.refused = true;
    }
  }
  const auto agree = [&](bool here) { return context.communicator ? context.communicator->agree(here) : here; };
  if (agree(step.graph != nullptr))
    step.graph->launch(mine.stream);
  else
    forward(mine);
  agree(true);
  step.ran = true;
  copy_on_device(context, step.made, made.mutable_data_ptr(), made.nbytes());
  return made;
}

#define FTBERT_INSTANTIATE(T) template class DecodeSteps<Cuda, T>;
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert::binding
