#include "binding/replay.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
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
constexpr int64_t kMostSteps = 256;      // sequences of a decoder's step; beyond, kernels take longer than launches
constexpr int64_t kLeastRange = 256;     // of lengths in a cache: up to this, and from power to power of two
constexpr size_t kMostRecordings = 128;  // of a lane; the recording not used for longest goes
constexpr size_t kMostLanes = 4;         // calls under way at once, each with buffers of its own

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

int64_t power_of_two(int64_t least) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(least))); }

}  // namespace

bool cuda_graphs_by_default() {
  const char* value = std::getenv("FTBERT_CUDA_GRAPHS");
  return !value || (std::string_view(value) != "off" && std::string_view(value) != "0");
}

std::optional<ReplaySize> ReplaySize::holding(const Context<Cuda>& context, const Batch& batch,
                                              AttentionPath attention) {
  const Sequences& s = batch.sequences;
  if (batch.shared_prefix > 0) return std::nullopt;
  if (batch.cache) {
    if (s.max_q != 1 || s.count > kMostSteps) return std::nullopt;
    return ReplaySize{.tokens = s.count,
                      .sequences = s.count,
                      .longest = std::min(batch.cache->positions(), power_of_two(std::max(kLeastRange, s.max_k))),
                      .rows = RowKind::all,
                      .named_rows = 0,
                      .tf32 = context.tf32};
  }
  const int64_t named = batch.rows.kind == RowKind::any ? cuda_gemm_rows(batch.rows.count) : 0;
  if (s.rows == 0 || batch.output_rows() == 0 || std::max(s.rows, named) > kMostTokens) return std::nullopt;
  // Empty sequences cost a block that looks and leaves. Between powers of two there are three more sizes.
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(std::bit_floor(uint64_t(s.count))) / 4);
  // The general path computes every score up to the longest length, the fused one only what is there.
  const int64_t longest = std::max<int64_t>(16, s.max_k);
  return ReplaySize{.tokens = cuda_gemm_rows(s.rows),
                    .sequences = round_up(s.count, step),
                    .longest = attention == AttentionPath::fused ? power_of_two(longest) : round_up(longest, 32),
                    .rows = batch.rows.kind,
                    .named_rows = named,
                    .tf32 = context.tf32,
                    .ends_of_keys = s.end_k != nullptr};
}

template <class Device, class T>
struct Replay<Device, T>::Recording {
  using Plan = typename Encoder<Device, T>::Plan;
  ReplaySize size;
  // Buffers into which a call's batch is copied, and to which `batch` points.
  int64_t* ids = nullptr;
  int64_t* types = nullptr;
  int32_t* cu_seqlens = nullptr;
  int32_t* end_k = nullptr;  // [sequences]; of those past the call's, which have no queries, nobody reads it
  int64_t* rows = nullptr;
  T* input = nullptr;  // [tokens, hidden] of a later stage
  Positions positions;
  Batch batch;
  T* made = nullptr;  // as Encoder::forward has it
  void* gemm_workspace = nullptr;
  Plan plan;
  Workspace workspace;  // of the forward pass
  std::unique_ptr<LaunchGraph> graph;
  bool ran = false, refused = false;

  // Takes memory for all of it. Over an empty workspace the pointers are null, and only its size counts.
  void carve(const Replay& of, const Context<Device>& context, const Linear<T>* head, Workspace& all) {
    const ModelConfig& c = of.encoder_.config();
    ids = all.take<int64_t>(size.tokens);
    if (!c.stage.first()) input = all.take<T>(size.tokens * c.hidden);
    if (of.cache_) {
      const KvCache& cache = of.cache_->cache;
      batch = {.sequences = Sequences::of_tokens(data<int32_t>(of.offsets_), size.sequences, 1, size.tokens),
               .ids = ids,
               .cache = &cache,
               .slots = {.index = data<int32_t>(of.slots_),
                         .lengths = data<int32_t>(of.cache_->lengths),
                         .positions = cache.positions()},
               .hidden = input};
      batch.sequences.max_k = size.longest;
    } else {
      types = all.take<int64_t>(size.tokens);
      positions = Positions::take(all, c, size.tokens, /*padded=*/true);
      cu_seqlens = all.take<int32_t>(size.sequences + 1);
      if (size.ends_of_keys) end_k = all.take<int32_t>(size.sequences);
      rows = all.take<int64_t>(size.named_rows);
      batch = {.sequences = Sequences::of_tokens(cu_seqlens, size.sequences, size.longest, size.tokens),
               .ids = ids,
               .types = c.token_types > 0 ? types : nullptr,
               .positions = positions.ids,
               .columns = positions.columns,
               .rows = {.kind = size.rows, .index = rows, .count = size.named_rows},
               .hidden = input};
      batch.sequences.end_k = end_k;
    }
    gemm_workspace = all.take<char>(static_cast<int64_t>(context.gemm_workspace_bytes));
    made = all.take<T>(head ? unread_rows_with_slack<Device>(batch.output_rows()) * head->weight.n
                            : rows_with_slack<Device>(batch.output_rows()) * c.hidden);
    plan = of.encoder_.plan(context, batch, head);
    workspace = Workspace(all.take<char>(static_cast<int64_t>(plan.bytes)), plan.bytes);
  }
};

// Buffers of their own, so that calls of different streams and threads do not meet. Recordings share a lane's memory:
// its calls follow each other.
template <class Device, class T>
struct Replay<Device, T>::Lane {
  explicit Lane(at::Device device) : own(std::in_place, device), order(*own) {}
  explicit Lane(StreamOrder& of_cache) : order(of_cache) {}
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane() { order.forget(memory); }

  std::optional<StreamOrder> own;
  StreamOrder& order;
  bool busy = false;       // a host thread holds it
  void* stream = nullptr;  // of the use before
  at::Tensor memory;
  std::list<Recording> recordings;  // the one used last comes first
};

template <class Device, class T>
Replay<Device, T>::Replay(const Encoder<Device, T>& encoder, at::Device device)
    : encoder_(encoder), device_(device), enabled_(cuda_graphs_by_default()) {}

template <class Device, class T>
Replay<Device, T>::Replay(const Encoder<Device, T>& encoder, DecoderCache& cache)
    : encoder_(encoder), device_(cache.device), enabled_(true), cache_(&cache) {}

template <class Device, class T>
Replay<Device, T>::~Replay() = default;

template <class Device, class T>
void Replay<Device, T>::give_back(Lane& lane) {
  if (cache_) return;
  lane.order.end();
  const std::lock_guard lock(mutex_);
  lane.busy = false;
  if (!enabled_) lanes_.remove_if([&](const Lane& other) { return &other == &lane; });
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
  if (!on) std::erase_if(lanes_, [](const Lane& lane) { return !lane.busy; });
}

template <class Device, class T>
void Replay<Device, T>::clear() {
  lanes_.clear();
}

template <class Device, class T>
std::string Replay<Device, T>::state() const {
  const std::lock_guard lock(mutex_);
  if (!enabled_) return "off";
  return "up to " + std::to_string(kMostTokens) + " tokens, " + std::to_string(recorded_) + " recorded so far" +
         (refusal_.empty() ? "" : "; not always: " + refusal_);
}

template <class Device, class T>
int64_t Replay<Device, T>::recorded() const {
  const std::lock_guard lock(mutex_);
  return recorded_;
}

// A lane that this stream used before, a new one, or any: then the stream waits for the other's work. nullptr: none.
// Steps have one lane.
template <class Device, class T>
auto Replay<Device, T>::acquire(void* stream) -> Lane* {
  if (cache_) return lanes_.empty() ? &lanes_.emplace_back(cache_->order) : &lanes_.front();
  const std::lock_guard lock(mutex_);
  if (!enabled_) return nullptr;
  Lane* found = nullptr;
  for (Lane& lane : lanes_)
    if (!lane.busy && (!found || lane.stream == stream)) found = &lane;
  if ((!found || found->stream != stream) && lanes_.size() < kMostLanes) found = &lanes_.emplace_back(device_);
  if (!found) return nullptr;
  found->order.begin();
  found->stream = stream;
  found->busy = true;
  return found;
}

template <class Device, class T>
auto Replay<Device, T>::find(Lane& lane, const ReplaySize& size, const Context<Device>& context, const Linear<T>* head)
    -> Recording& {
  std::list<Recording>& all = lane.recordings;
  const auto known = std::find_if(all.begin(), all.end(), [&](const Recording& r) { return r.size == size; });
  if (known != all.end()) {
    all.splice(all.begin(), all, known);
    return all.front();
  }
  if (cache_ && !slots_.defined()) {
    const c10::InferenceMode normal(false);  // slots are written in place, in whatever mode the calls come
    const at::TensorOptions there = at::TensorOptions().device(device_).dtype(at::kInt);
    const int64_t most = std::min(kMostSteps, cache_->cache.slots());
    offsets_ = at::arange(most + 1, there);
    slots_ = at::empty({most}, there);
    for (const at::Tensor& one : {offsets_, slots_}) lane.order.keep(one);
  }
  Recording recording;
  recording.size = size;
  Workspace measure;
  recording.carve(*this, context, head, measure);
  const size_t have = lane.memory.defined() ? lane.memory.nbytes() : 0;
  if (measure.bytes() > have) {
    all.clear();  // they point into the old buffer
    lane.order.forget(lane.memory);
    lane.memory = at::Tensor();
    lane.memory = at::empty({static_cast<int64_t>(std::max(measure.bytes(), have + have / 2))},
                            at::TensorOptions().device(device_).dtype(at::kByte));
    lane.order.keep(lane.memory);
  }
  Workspace memory(lane.memory.data_ptr(), lane.memory.nbytes());
  recording.carve(*this, context, head, memory);
  if (all.size() >= kMostRecordings) all.pop_back();
  return all.emplace_front(std::move(recording));
}

// The call's batch, to where its recording reads it.
template <class Device, class T>
void Replay<Device, T>::fill(Context<Device>& context, const Batch& batch, const at::Tensor& slots,
                             const Recording& recording) {
  const Sequences& s = batch.sequences;
  const ModelConfig& c = encoder_.config();
  if (recording.input) copy_on_device(context, batch.hidden, recording.input, s.rows * c.hidden * sizeof(T));
  if (cache_) {
    copy_on_device(context, batch.ids, recording.ids, s.rows * sizeof(int64_t));
    return fill_slots(slots);
  }
  const Positions& positions = recording.positions;
  // Columns are copied with the ids; positions that are not columns are counted in the ids.
  padding_stage<Device>(context, batch.ids, batch.types, batch.to_padded, s.cu_q, s.rows, s.count, batch.seq,
                        recording.size.tokens, recording.size.sequences, recording.ids, recording.types,
                        c.counts_tokens() ? positions.columns : positions.ids, recording.cu_seqlens);
  if (c.counts_tokens()) find_positions(context, c, batch, recording.size.tokens, {positions.ids, nullptr});
  if (recording.end_k) copy_on_device(context, s.end_k, recording.end_k, s.count * sizeof(int32_t));
  // Behind them are those of calls before: rows that nobody reads.
  if (batch.rows.count > 0)
    copy_on_device(context, batch.rows.index, recording.rows, batch.rows.count * sizeof(int64_t));
}

template <class Device, class T>
void Replay<Device, T>::fill_slots(const at::Tensor& slots) {
  const auto* const first = data<int32_t>(slots);
  const auto* const end = first + slots.numel();
  if (std::equal(first, end, slots_now_.begin(), slots_now_.end())) return;
  const c10::InferenceMode normal(false);
  slots_now_.clear();  // until they are on their way
  slots_.narrow(0, 0, slots.numel()).copy_(slots.pin_memory(), /*non_blocking=*/true);
  slots_now_.assign(first, end);
}

template <class Device, class T>
void Replay<Device, T>::record(const Context<Device>& context, Recording& recording, const Linear<T>* head) {
  try {
    recording.graph = record_graph([&](void* stream) {
      Context<Device> recorder = context;
      recorder.stream = stream;
      encoder_.forward(recorder, recording.batch, recording.plan, recording.workspace, recording.made, nullptr, head);
    });
    const std::lock_guard lock(mutex_);
    ++recorded_;
  } catch (const Error& error) {
    recording.refused = true;
    const std::lock_guard lock(mutex_);
    refusal_ = error.what();
  }
}

template <class Device, class T>
auto Replay<Device, T>::run(const Context<Device>& context, const ReplaySize& size, const Batch& batch,
                            const at::Tensor& slots, const Linear<T>* head) -> Lease {
  if (is_recording(context.stream)) return {};
  Lease lease{.lane = {acquire(context.stream), GiveBack{this}}};  // given back, whatever happens
  if (!lease.lane) return lease;
  Recording* found = nullptr;
  Context<Device> mine = context;
  try {
    found = &find(*lease.lane, size, context, head);
    mine.gemm_workspace = found->gemm_workspace;
    fill(mine, batch, slots, *found);
  } catch (const c10::OutOfMemoryError&) {
    if (context.communicator) throw;  // ranks run alike
    return {};
  }
  Recording& recording = *found;
  if (context.communicator) context.communicator->reserve(sum_bytes<Device, T>(encoder_.config(), recording.batch));
  if (recording.ran && !recording.graph && !recording.refused) record(mine, recording, head);
  const auto agree = [&](bool here) { return context.communicator ? context.communicator->agree(here) : here; };
  if (agree(recording.graph != nullptr))
    recording.graph->launch(mine.stream);
  else
    encoder_.forward(mine, recording.batch, recording.plan, recording.workspace, recording.made, nullptr, head);
  agree(true);
  recording.ran = true;
  lease.rows = recording.made;
  return lease;
}

#define FTBERT_INSTANTIATE(T) template class Replay<Cuda, T>;
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)
#undef FTBERT_INSTANTIATE

}  // namespace ftbert::binding
