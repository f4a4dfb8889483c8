#include "binding/replay.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string_view>

#include "core/check.h"
#include "core/communicator.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "core/workspace.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"
#include "layers/positions.h"

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

std::optional<ReplaySize> ReplaySize::holding(const Context<Cuda>& context, const Batch& batch,
                                              AttentionPath attention) {
  const Sequences& s = batch.sequences;
  const int64_t named = batch.rows.kind == RowKind::any ? cuda_gemm_rows(batch.rows.count) : 0;
  if (s.rows == 0 || batch.output_rows() == 0 || std::max(s.rows, named) > kMostTokens) return std::nullopt;
  // Empty sequences cost a block that looks and leaves. Between powers of two there are three more sizes.
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(std::bit_floor(uint64_t(s.count))) / 4);
  // The general path computes every score up to the longest length, the fused one only what is there.
  const int64_t longest = std::max<int64_t>(16, s.max_k);
  return ReplaySize{.tokens = cuda_gemm_rows(s.rows),
                    .sequences = round_up(s.count, step),
                    .longest = attention == AttentionPath::fused
                                   ? static_cast<int64_t>(std::bit_ceil(uint64_t(longest)))
                                   : round_up(longest, 32),
                    .rows = batch.rows.kind,
                    .named_rows = named,
                    .tf32 = context.tf32};
}

template <class Device, class T>
struct Replay<Device, T>::Recording {
  using Plan = typename Encoder<Device, T>::Plan;
  ReplaySize size;
  // What a call's batch is copied into, and `batch` points at.
  int64_t* ids = nullptr;
  int64_t* types = nullptr;
  int32_t* cu_seqlens = nullptr;
  int64_t* rows = nullptr;
  T* input = nullptr;  // [tokens, hidden] of a later stage
  Positions positions;
  Batch batch;
  T* hidden = nullptr;
  void* gemm_workspace = nullptr;
  Plan plan;
  Workspace workspace;  // of the forward pass
  std::unique_ptr<LaunchGraph> graph;
  bool ran = false, refused = false;

  // Takes memory for all of it. Over an empty workspace the pointers are null, and only its size counts.
  void carve(const Encoder<Device, T>& encoder, const Context<Device>& context, Workspace& all) {
    const EncoderConfig& c = encoder.config();
    ids = all.take<int64_t>(size.tokens);
    types = all.take<int64_t>(size.tokens);
    positions = Positions::take(all, c, size.tokens, /*padded=*/true);
    cu_seqlens = all.take<int32_t>(size.sequences + 1);
    rows = all.take<int64_t>(size.named_rows);
    if (!c.stage.first()) input = all.take<T>(size.tokens * c.hidden);
    gemm_workspace = all.take<char>(static_cast<int64_t>(context.gemm_workspace_bytes));
    batch = {.sequences = Sequences::of_tokens(cu_seqlens, size.sequences, size.longest, size.tokens),
             .ids = ids,
             .types = c.token_types > 0 ? types : nullptr,
             .positions = positions.ids,
             .columns = positions.columns,
             .rows = {size.rows, rows, size.named_rows},
             .hidden = input};
    hidden = all.take<T>(rows_with_slack<Device>(batch.output_rows()) * c.hidden);
    plan = encoder.plan(context, batch);
    workspace = Workspace(all.take<char>(static_cast<int64_t>(plan.bytes)), plan.bytes);
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
  Workspace measure;
  recording.carve(encoder_, context, measure);
  const size_t have = slot.memory.defined() ? slot.memory.nbytes() : 0;
  if (measure.bytes() > have) {
    all.clear();  // they point into the old buffer
    slot.memory = at::Tensor();
    slot.memory = at::empty({static_cast<int64_t>(std::max(measure.bytes(), have + have / 2))},
                            at::TensorOptions().device(device_).dtype(at::kByte));
  }
  Workspace memory(slot.memory.data_ptr(), slot.memory.nbytes());
  recording.carve(encoder_, context, memory);
  if (all.size() >= kMostRecordings) all.pop_back();
  return all.emplace_front(std::move(recording));
}

template <class Device, class T>
void Replay<Device, T>::stage(Context<Device>& context, const Batch& batch, Recording& recording) {
  const Sequences& s = batch.sequences;
  const EncoderConfig& c = encoder_.config();
  const Positions& positions = recording.positions;
  // Columns are staged with the ids; positions that are not columns are counted in the ids.
  padding_stage<Device>(context, batch.ids, batch.types, batch.to_padded, s.cu_q, s.rows, s.count, batch.seq,
                        recording.size.tokens, recording.size.sequences, recording.ids, recording.types,
                        c.counts_tokens() ? positions.columns : positions.ids, recording.cu_seqlens);
  if (c.counts_tokens()) find_positions(context, c, batch, recording.size.tokens, {positions.ids, nullptr});
  // Behind them are those of calls before: rows that nobody reads.
  if (batch.rows.count > 0)
    copy_on_device(context, batch.rows.index, recording.rows, batch.rows.count * sizeof(int64_t));
  if (recording.input) copy_on_device(context, batch.hidden, recording.input, s.rows * c.hidden * sizeof(T));
}

template <class Device, class T>
auto Replay<Device, T>::run(const Context<Device>& context, const Batch& batch) -> Lease {
  Lease lease;
  const std::optional<ReplaySize> size = ReplaySize::holding(context, batch, encoder_.attention().path);
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
    if (context.communicator) throw;  // ranks run alike
    return Lease();
  }
  Recording& recording = *found;
  Context<Device> mine = context;
  mine.gemm_workspace = recording.gemm_workspace;
  stage(mine, batch, recording);
  if (context.communicator) context.communicator->reserve(sum_bytes<Device, T>(encoder_.config(), recording.batch));
  if (recording.ran && !recording.graph && !recording.refused) {
    try {
      recording.graph = record_graph([&](void* stream) {
        Context<Device> recorder = mine;
        recorder.stream = stream;
        encoder_.forward(recorder, recording.batch, recording.plan, recording.workspace, recording.hidden);
      });
      const std::lock_guard lock(mutex_);
      ++recorded_;
    } catch (const Error& error) {
      recording.refused = true;
      const std::lock_guard lock(mutex_);
      refusal_ = error.what();
    }
  }
  const auto agree = [&](bool here) { return context.communicator ? context.communicator->agree(here) : here; };
  if (agree(recording.graph != nullptr))
    recording.graph->launch(mine.stream);
  else
    encoder_.forward(mine, recording.batch, recording.plan, recording.workspace, recording.hidden);
  agree(true);
  recording.ran = true;
  lease.hidden_ = recording.hidden;
  return lease;
}

#define FTBERT_INSTANTIATE(T) template class Replay<Cuda, T>;
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert::binding
