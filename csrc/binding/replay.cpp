#include "binding/replay.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string_view>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/workspace.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"

namespace ftbert::binding {
namespace {

// From here on the GPU works longer on a layer's kernels than the host takes to launch them (base size, H200: 1.73 ms
// without and 1.62 with a graph at 4096 tokens, no difference at 16384).
constexpr int64_t kMostTokens = 8192;
constexpr size_t kMostRecordings = 128;  // of a slot; the one not used for longest goes
constexpr size_t kMostSlots = 4;         // calls under way at once, each with buffers of its own

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

bool cuda_graphs_by_default() {
  const char* value = std::getenv("FTBERT_CUDA_GRAPHS");
  return !value || (std::string_view(value) != "off" && std::string_view(value) != "0");
}

std::optional<ReplaySize> ReplaySize::holding(const Context<Cuda>& context, const EncoderInput& input,
                                              AttentionPath attention) {
  if (input.tokens == 0 || input.tokens > kMostTokens) return std::nullopt;
  // Empty sequences cost a block that looks and leaves. Between powers of two there are three more sizes.
  const int64_t batch_step = std::max<int64_t>(1, static_cast<int64_t>(std::bit_floor(uint64_t(input.batch))) / 4);
  // The general path computes every score up to the longest length, the fused one only what is there.
  const int64_t longest = std::max<int64_t>(16, input.max_seqlen);
  return ReplaySize{.tokens = cuda_gemm_rows(input.tokens),
                    .batch = round_up(input.batch, batch_step),
                    .max_seqlen = attention == AttentionPath::fused
                                      ? static_cast<int64_t>(std::bit_ceil(uint64_t(longest)))
                                      : round_up(longest, 32),
                    .rows = input.rows,
                    .tf32 = context.tf32};
}

template <class Device, class T>
struct Replay<Device, T>::Recording {
  ReplaySize size;
  EncoderInput input;  // over the staged buffers
  int64_t* staged_ids = nullptr;
  int64_t* staged_types = nullptr;
  int32_t* positions = nullptr;
  int32_t* columns = nullptr;
  int32_t* cu_seqlens = nullptr;
  T* hidden = nullptr;
  void* gemm_workspace = nullptr;
  Workspace workspace;  // of the forward pass
  size_t bytes = 0;     // of all
  std::unique_ptr<LaunchGraph> graph;
  bool ran = false, refused = false;

  // Run over a null buffer to measure, over the real one to carve.
  void carve(const Encoder<Device, T>& encoder, const Context<Device>& context, void* base, size_t capacity) {
    const EncoderConfig& c = encoder.config();
    Workspace all = base ? Workspace(base, capacity) : Workspace();
    staged_ids = all.take<int64_t>(size.tokens);
    staged_types = all.take<int64_t>(size.tokens);
    positions = all.take<int32_t>(size.tokens);
    if (c.relative_span > 0) columns = c.counts_tokens() ? all.take<int32_t>(size.tokens) : positions;
    cu_seqlens = all.take<int32_t>(size.batch + 1);
    gemm_workspace = all.take<char>(static_cast<int64_t>(context.gemm_workspace_bytes));
    // While measuring, any address stands for the buffers that are there.
    const int32_t* there = positions ? positions : reinterpret_cast<const int32_t*>(this);
    input = {.input_ids = staged_ids,
             .token_type_ids = c.token_types > 0 ? staged_types : nullptr,
             .cu_seqlens = cu_seqlens,
             .tokens = size.tokens,
             .batch = size.batch,
             .seq = size.max_seqlen,
             .max_seqlen = size.max_seqlen,
             .positions = there,
             .columns = c.relative_span > 0 ? (columns ? columns : there) : nullptr,
             .rows = size.rows};
    hidden = all.take<T>(rows_with_slack<Device>(input.output_rows()) * c.hidden);
    const size_t forward = encoder.workspace_bytes(context, input);
    void* const rest = all.take<char>(static_cast<int64_t>(forward));
    workspace = Workspace(rest, forward);
    bytes = all.bytes();
  }
};

// Buffers of their own, so that calls of different streams and threads do not meet. Recordings share a slot's buffers:
// its calls follow each other.
template <class Device, class T>
struct Replay<Device, T>::Slot {
  bool busy = false;  // a host thread holds it
  void* stream = nullptr;
  std::unique_ptr<StreamMark> last_use = make_stream_mark();
  at::Tensor memory;
  std::list<Recording> recordings;  // the one used last comes first
};

template <class Device, class T>
Replay<Device, T>::Replay(const Encoder<Device, T>& encoder, at::Device device)
    : encoder_(encoder), device_(device), enabled_(cuda_graphs_by_default()) {}

template <class Device, class T>
Replay<Device, T>::~Replay() = default;

template <class Device, class T>
Replay<Device, T>::Lease::~Lease() {
  if (!owner_) return;
  try {
    slot_->last_use->set(stream_);
  } catch (const Error&) {  // the GPU is lost; the next call says so
  }
  owner_->release(slot_);
}

template <class Device, class T>
void Replay<Device, T>::release(Slot* slot) {
  const std::lock_guard lock(mutex_);
  slot->busy = false;
  if (!enabled_) slots_.remove_if([slot](const Slot& other) { return &other == slot; });
}

template <class Device, class T>
bool Replay<Device, T>::enabled() const {
  const std::lock_guard lock(mutex_);
  return enabled_;
}

template <class Device, class T>
void Replay<Device, T>::enable(bool on) {
  const std::lock_guard lock(mutex_);
  enabled_ = on;
  if (!on) std::erase_if(slots_, [](const Slot& slot) { return !slot.busy; });
}

template <class Device, class T>
std::string Replay<Device, T>::state() const {
  const std::lock_guard lock(mutex_);
  if (!enabled_) return "off";
  return "up to " + std::to_string(kMostTokens) + " tokens, " + std::to_string(recorded_) + " recorded so far" +
         (refusal_.empty() ? "" : "; not always: " + refusal_);
}

// A slot that this stream used before, a new one, or any: then the stream waits for the other's work. nullptr: none.
template <class Device, class T>
auto Replay<Device, T>::acquire(void* stream) -> Slot* {
  const std::lock_guard lock(mutex_);
  if (!enabled_) return nullptr;
  Slot* found = nullptr;
  for (Slot& slot : slots_)
    if (!slot.busy && (!found || slot.stream == stream)) found = &slot;
  if ((!found || found->stream != stream) && slots_.size() < kMostSlots) {
    found = &slots_.emplace_back();
    found->stream = stream;
  }
  if (!found) return nullptr;
  found->last_use->wait(stream);  // also where it looks like the same stream: handles are used again
  if (found->stream != stream) {
    found->stream = stream;
    if (found->memory.defined()) {
      const c10::impl::VirtualGuardImpl torch(device_.type());
      torch.recordDataPtrOnStream(found->memory.storage().data_ptr(), torch.getStream(device_));
    }
  }
  found->busy = true;
  return found;
}

template <class Device, class T>
auto Replay<Device, T>::find(Slot& slot, const ReplaySize& size, const Context<Device>& context) -> Recording& {
  std::list<Recording>& all = slot.recordings;
  const auto known = std::find_if(all.begin(), all.end(), [&](const Recording& r) { return r.size == size; });
  if (known != all.end()) {
    all.splice(all.begin(), all, known);
    return all.front();
  }
  Recording recording;
  recording.size = size;
  recording.carve(encoder_, context, nullptr, 0);
  const size_t have = slot.memory.defined() ? slot.memory.nbytes() : 0;
  if (recording.bytes > have) {
    all.clear();  // they point into the old buffer
    slot.memory = at::Tensor();
    slot.memory = at::empty({static_cast<int64_t>(std::max(recording.bytes, have + have / 2))},
                            at::TensorOptions().device(device_).dtype(at::kByte));
  }
  recording.carve(encoder_, context, slot.memory.data_ptr(), slot.memory.nbytes());
  if (all.size() >= kMostRecordings) all.pop_back();
  return all.emplace_front(std::move(recording));
}

template <class Device, class T>
void Replay<Device, T>::stage(Context<Device>& context, const EncoderInput& input, Recording& recording) {
  const bool counted = encoder_.config().counts_tokens();
  padding_stage<Device>(context, input.input_ids, input.token_type_ids, input.token_index, input.cu_seqlens,
                        input.tokens, input.batch, input.seq, recording.size.tokens, recording.size.batch,
                        recording.staged_ids, recording.staged_types, counted ? recording.columns : recording.positions,
                        recording.cu_seqlens);
  if (counted) encoder_.find_positions(context, input, recording.size.tokens, recording.positions, nullptr);
}

template <class Device, class T>
auto Replay<Device, T>::run(const Context<Device>& context, const EncoderInput& input) -> Lease {
  Lease lease;
  const std::optional<ReplaySize> size = ReplaySize::holding(context, input, encoder_.attention().path);
  if (!size || is_recording(context.stream)) return lease;
  Slot* const slot = acquire(context.stream);
  if (!slot) return lease;
  lease.owner_ = this;  // from here on the slot is given back, whatever happens
  lease.slot_ = slot;
  lease.stream_ = context.stream;
  Recording* found = nullptr;
  try {
    found = &find(*slot, *size, context);
  } catch (const c10::OutOfMemoryError&) {
    return Lease();
  }
  Recording& recording = *found;
  Context<Device> mine = context;
  mine.gemm_workspace = recording.gemm_workspace;
  stage(mine, input, recording);
  if (recording.ran && !recording.graph && !recording.refused) {
    try {
      recording.graph = record_graph([&](void* stream) {
        Context<Device> recorder = mine;
        recorder.stream = stream;
        encoder_.forward(recorder, recording.input, recording.workspace, recording.hidden);
      });
      const std::lock_guard lock(mutex_);
      ++recorded_;
    } catch (const Error& error) {
      recording.refused = true;
      const std::lock_guard lock(mutex_);
      refusal_ = error.what();
    }
  }
  if (recording.graph)
    recording.graph->launch(mine.stream);
  else
    encoder_.forward(mine, recording.input, recording.workspace, recording.hidden);
  recording.ran = true;
  lease.hidden_ = recording.hidden;
  return lease;
}

#define FTBERT_INSTANTIATE(T) template class Replay<Cuda, T>;
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert::binding
