#include "binding/forward.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <set>

#include "binding/call_words.h"
#include "binding/checked_input.h"
#include "binding/decoder_cache.h"
#include "binding/packed_weight.h"
#include "binding/process_group.h"
#include "binding/replay.h"
#include "binding/sum_time.h"
#include "binding/tensors.h"
#include "core/device.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"
#include "layers/positions.h"

namespace ftbert::binding {
namespace {

// Pinned, so that the copy does not wait for the GPU.
at::Tensor to_device(const at::Tensor& t, at::Device device) {
  return device.is_cpu() ? t : t.pin_memory().to(device, /*non_blocking=*/true);
}

template <class Device, class T>
class ForwardOf : public Forward {
 public:
  ForwardOf(const ModelConfig& config, Weights<T> weights, at::Device device, std::optional<AttentionPath> attention)
      : device_(device),
        encoder_(CallContext<Device>(device).for_products(), config, std::move(weights), attention,
                 [&](int64_t floats) {
                   kept_.push_back(at::empty({floats}, options(at::kFloat)));
                   return data<float>(kept_.back());
                 }),
        replay_(encoder_, device) {
    if (!kept_.empty() && device.is_cuda())  // calls may come on any stream
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }

  std::vector<at::Tensor> run(const Call& call, const std::vector<Want>& wants) const override {
    CallContext<Device> on(device_);
    std::optional<StreamOrder::Use> use;
    if (!call.caches.empty()) use.emplace(call.caches.front()->order);
    on.context.communicator = communicator_.get();
    const std::unique_lock<std::mutex> alone = communicator_ ? communicator_->alone() : std::unique_lock<std::mutex>();
    return alike(
        processes_.get(), [&] { return lines_of(call, wants, processes_->contents()); },
        [&] { return call.caches.empty() ? run_encoder(on, call, wants) : run_decoder(on, call, wants); });
  }

  void attach(DecoderCache& cache) const override {
    if (cache.head.weight.defined()) check_product_exists(CallContext<Device>(device_).context, linear_of(cache.head));
    cache.steps = std::make_unique<Replay<Device, T>>(encoder_, cache);
  }

  void use_cuda_graphs(bool on) const override { replay_.enable(on); }
  bool uses_cuda_graphs() const override { return replay_.enabled(); }

  AttentionPath attention_path() const override { return encoder_.attention().path; }
  void join(AnyCommunicator communicator) override {
    communicator_ = communicator.of<Device>();
    processes_ = communicator.processes;
  }
  double seconds_of_sum(int64_t rows) const override {
    return communicator_ ? binding::seconds_of_sum<Device, T>(device_, *communicator_, rows, encoder_.config().hidden)
                         : 0;
  }

  std::map<std::string, std::string> info() const override {
    const CallContext<Device> on(device_);
    std::map<std::string, std::string> all = {{"attention", is_fused() ? "fused" : "general"},
                                              {"attention_reason", encoder_.attention().reason},
                                              {"activation", activations()},
                                              {"gemm", products_name(on.context)},
                                              {"deferred_layernorm", encoder_.deferred_state(on.context)},
                                              {"cuda_graphs", replay_.state()}};
    if (const std::string kernels = encoder_.attention_kernels(on.context); !kernels.empty())
      all["attention_kernels"] = kernels;
    if (rounds_products(on.context)) all["products"] = "tf32";
    if (const Shard& shard = encoder_.config().shard; !shard.whole())
      all["parallel"] =
          "tensor, rank " + std::to_string(shard.rank) + " of " + std::to_string(shard.size) + " processes";
    return all;
  }

 private:
  // The op's schema promises memory of its own for each result: two wants may be the same rows, and the offsets the
  // caller's.
  static at::Tensor not_shared(at::Tensor result, const Call& call, const std::vector<at::Tensor>& before) {
    bool shared = call.cu_seqlens && result.is_alias_of(*call.cu_seqlens);
    for (const at::Tensor& other : before) shared = shared || result.is_alias_of(other);
    return shared ? result.clone() : result;
  }

  // Absent of a stage before the last.
  Linear<T> linear_of(const DecoderHead& head) const {
    if (!head.weight.defined()) return {};
    return {.weight = weight_matrix(*head.format, head.weight, head.vocab, encoder_.config().hidden),
            .bias = data<T>(head.bias),
            .input = {}};
  }

  // What a forward pass has left, for the tensors that the caller wants.
  struct Result {
    CheckedInput input;
    OutputRows named = {};      // by the caller
    const T* hidden = nullptr;  // [input.batch.output_rows, hidden]
    at::Tensor memory;          // where these lie; undefined: in memory that is lent
    at::Tensor states;          // [layers+1, ...]

    OutputRows rows_of(RowKind kind) const { return kind == RowKind::any ? named : OutputRows{kind}; }
  };

  std::vector<at::Tensor> run_encoder(CallContext<Device>& on, const Call& call, const std::vector<Want>& wants) const {
    const ModelConfig& c = encoder_.config();
    FTBERT_CHECK(!call.rows || asks_for(wants, Want::rows), "rows: nothing of `want` reads them");
    Result r{call.cu_seqlens ? check_packed<Device>(on.context, device_, c, call.input_ids, *call.cu_seqlens,
                                                    call.max_seqlen, call.token_type_ids, device_)
                             : unpad<Device>(on.context, device_, c, call.input_ids, call.attention_mask,
                                             call.token_type_ids, call.hidden ? Wait::first : wait(wants))};
    FTBERT_CHECK(r.input.padded() || !asks_for(wants, Want::packed_index),
                 "want: packed_index is of padded ids; these are packed");
    std::optional<SharedPrefix<Device>> prefix;
    if (call.shared_prefix != 0) {
      share_prefix(r.input, call.shared_prefix, call.max_seqlen);
      prefix.emplace(c, attention_path(), kDType<T>, r.input.batch);
    }
    if (call.keys) {
      FTBERT_CHECK(call.shared_prefix == 0, "keys: tokens behind a shared prefix are all keys");
      limit_keys(r.input, c, *call.keys);
    }
    if (asks_for(wants, Want::rows)) choose_rows(r.input, call.rows);
    // Here nothing can be wrong with the call any more: a stage in another process sees that, too, and has sent.
    if (call.hidden) take_hidden(r.input, call.hidden(r.input.batch.tokens()), c.hidden, kDType<T>);
    r.named = r.input.batch.rows;
    r.input.batch.rows = r.rows_of(rows_read(wants));

    const bool states = asks_for(wants, Want::hidden_states);
    const size_t scratch = encoder_.weight_scratch_bytes(on.context, r.input.batch);
    const std::optional<ReplaySize> size = states ? std::nullopt : replay_size(on.context, r.input.batch, scratch);
    using Lease = typename Replay<Device, T>::Lease;
    const Lease replayed = size ? replay_.run(on.context, *size, r.input.batch) : Lease();  // holds the memory
    if (replayed) {
      r.hidden = replayed.rows;
    } else {
      HiddenStateHook<T> hook;
      if (states) hook = keep_states(on.context, r);
      r.memory = run_now(on, r.input, scratch, prefix ? &*prefix : nullptr, hook);
      r.hidden = data<T>(r.memory);
    }
    std::vector<at::Tensor> made;
    for (const Want want : wants) made.push_back(not_shared(make(on, r, want), call, made));
    r.input.wait_for_count(c);
    return made;
  }

  // Of a stage before the last what its layers leave, else the logits.
  std::vector<at::Tensor> run_decoder(CallContext<Device>& on, const Call& call, const std::vector<Want>& wants) const {
    const ModelConfig& c = encoder_.config();
    DecoderCache& cache = *call.caches.front();
    CheckedInput input = check_packed<Device>(on.context, device_, c, call.input_ids, *call.cu_seqlens, call.max_seqlen,
                                              std::nullopt, at::kCPU);
    if (call.hidden) take_hidden(input, call.hidden(input.batch.tokens()), c.hidden, kDType<T>);
    Batch& batch = input.batch;
    batch.sequences.max_k = call.max_held;
    batch.cache = &cache.cache;
    if (asks_for(wants, Want::last_logits) && batch.tokens() > batch.sequences.count) batch.rows = {RowKind::last};
    const Linear<T> of_head = linear_of(cache.head);
    const Linear<T>* const head = of_head.weight.n > 0 ? &of_head : nullptr;
    const int64_t rows = batch.output_rows(), cols = head ? head->weight.n : c.hidden;
    const size_t scratch = encoder_.weight_scratch_bytes(on.context, batch, head);
    auto& steps = static_cast<Replay<Device, T>&>(*cache.steps);
    if (!uses_cuda_graphs()) {
      steps.clear();
    } else if (const std::optional<ReplaySize> size = replay_size(on.context, batch, scratch)) {
      const at::Tensor made = empty({rows, cols});  // before the launch, after which the slots hold the tokens
      if (const auto replayed = steps.run(on.context, *size, batch, call.slots, head)) {
        copy_on_device(on.context, replayed.rows, data<T>(made), made.nbytes());
        return {made};
      }
    }
    input.cu_seqlens = to_device(*call.cu_seqlens, device_);
    const at::Tensor slots = to_device(call.slots, device_);
    batch.sequences.cu_q = batch.sequences.cu_k = data<int32_t>(input.cu_seqlens);
    batch.slots = {
        .index = data<int32_t>(slots), .lengths = data<int32_t>(cache.lengths), .positions = cache.cache.positions()};
    return {run_now(on, input, scratch, nullptr, nullptr, head).narrow(0, 0, rows)};
  }

  // nullopt: no recording serves the call. It has no scratch for weights.
  std::optional<ReplaySize> replay_size(const Context<Device>& context, const Batch& batch, size_t scratch) const {
    if (scratch > 0 || (communicator_ && !communicator_->records())) return std::nullopt;
    return ReplaySize::holding(context, batch, attention_path());
  }

  // The rows of the last hidden state that a want reads; nullopt: none.
  static std::optional<RowKind> rows_read(Want want) {
    switch (want) {
      case Want::first:
      case Want::pooled: return RowKind::first;
      case Want::last: return RowKind::last;
      case Want::rows: return RowKind::any;
      case Want::cu_seqlens:
      case Want::packed_index: return std::nullopt;
      default: return RowKind::all;
    }
  }
  // Those that the last layer computes for all of them: all where two wants read different ones.
  static RowKind rows_read(const std::vector<Want>& wants) {
    std::optional<RowKind> read;
    for (const Want want : wants)
      if (const std::optional<RowKind> rows = rows_read(want))
        read = read.value_or(*rows) == *rows ? *rows : RowKind::all;
    return read.value_or(wants.empty() ? RowKind::all : RowKind::first);
  }
  static bool asks_for(const std::vector<Want>& wants, Want want) {
    return std::find(wants.begin(), wants.end(), want) != wants.end();
  }
  static bool rounds_products(const Context<Cpu>&) { return false; }
  static bool rounds_products(const Context<Cuda>& context) { return kDType<T> == DType::fp32 && context.tf32; }
  static std::string products_name(const Context<Cpu>&) { return torch_products_name(); }
  static std::string products_name(const Context<Cuda>&) { return gemm_library_version(); }

  // The general attention path's work grows with the longest sequence that there may be; packed results have the size
  // that is counted.
  Wait wait(const std::vector<Want>& wants) const {
    const bool counted = asks_for(wants, Want::packed_tokens) || asks_for(wants, Want::hidden_states);
    return is_fused() && !counted ? Wait::last : Wait::first;
  }

  bool is_fused() const { return attention_path() == AttentionPath::fused; }

  // Of all layers, each once: "gelu_erf".
  std::string activations() const {
    std::string all;
    std::set<Activation> seen;
    for (const LayerConfig& layer : encoder_.config().layers)
      if (seen.insert(layer.ffn.activation).second)
        all += (all.empty() ? "" : ", ") + std::string(to_string(layer.ffn.activation));
    return all.empty() ? std::string(to_string(Activation::none)) : all;
  }

  at::TensorOptions options(at::ScalarType type) const { return at::TensorOptions().device(device_).dtype(type); }
  at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, options(scalar_type_of(kDType<T>))); }

  // Unrecorded: as Encoder::forward has it.
  at::Tensor run_now(CallContext<Device>& call, const CheckedInput& input, size_t scratch, SharedPrefix<Device>* prefix,
                     const HiddenStateHook<T>& hook, const Linear<T>* head = nullptr) const {
    const ModelConfig& c = encoder_.config();
    Context<Device>& context = call.for_products(scratch);
    Batch batch = input.batch;
    const at::Tensor out = head ? empty({unread_rows_with_slack<Device>(batch.output_rows()), head->weight.n})
                                : empty({rows_with_slack<Device>(batch.output_rows()), c.hidden});
    const auto plan = encoder_.plan(context, batch, head);
    const auto take = [&](Workspace& from) -> Positions {
      if (prefix) prefix->take(from, batch);
      return batch.cache ? Positions() : Positions::take(from, c, batch.tokens(), input.padded());
    };
    Workspace measure;
    take(measure);
    const size_t bytes = measure.bytes() + plan.bytes;
    const at::Tensor memory = at::empty({static_cast<int64_t>(bytes)}, options(at::kByte));
    Workspace workspace(memory.data_ptr(), bytes);
    const Positions positions = take(workspace);
    if (prefix) {
      prefix->find_places(context, batch);
    } else if (!batch.cache) {
      find_positions(context, c, batch, batch.tokens(), positions);
      batch.positions = positions.ids;
      batch.columns = positions.columns;
    }
    const Workspace rest(workspace.take<char>(static_cast<int64_t>(plan.bytes)), plan.bytes);
    if (communicator_) {
      communicator_->reserve(sum_bytes<Device, T>(c, batch));
      communicator_->agree(true);
    }
    encoder_.forward(context, batch, plan, rest, data<T>(out), hook, head);
    if (communicator_) communicator_->agree(true);
    return out;
  }

  // Copies every hidden state on its way into r.states.
  HiddenStateHook<T> keep_states(Context<Device>& context, Result& r) const {
    const Batch& batch = r.input.batch;
    const int64_t cols = encoder_.config().hidden, states = encoder_.config().depth() + 1;
    r.states = r.input.padded() ? empty({states, batch.sequences.count, batch.seq, cols})
                                : empty({states, batch.tokens(), cols});
    if (batch.tokens() == 0) r.states.zero_();
    return [this, &context, &r](int64_t i, const T* hidden) { as_ids_lie(context, r, hidden, data<T>(r.states[i])); };
  }

  // Packed rows -> rows as the caller's ids lie.
  void as_ids_lie(Context<Device>& context, const Result& r, const T* packed, T* out) const {
    const Batch& batch = r.input.batch;
    const int64_t cols = encoder_.config().hidden;
    if (r.input.padded())
      restore_padding<Device, T>(context, packed, data<int32_t>(r.input.to_packed), batch.sequences.count * batch.seq,
                                 cols, out);
    else
      copy_on_device(context, packed, out, batch.tokens() * cols * sizeof(T));
  }

  at::Tensor make(CallContext<Device>& call, Result& r, Want want) const {
    const Batch& batch = r.input.batch;
    const int64_t sequences = batch.sequences.count, cols = encoder_.config().hidden;
    switch (want) {
      case Want::tokens: {
        if (!r.input.padded()) return kept(call.context, r, batch.tokens());
        // Without padding they are there already, which is known when the count is.
        if (r.memory.defined()) r.input.wait_for_count(encoder_.config());
        if (r.memory.defined() && batch.tokens() == sequences * batch.seq)
          return without_slack(r.memory, batch.tokens()).view({sequences, batch.seq, cols});
        const at::Tensor out = empty({sequences, batch.seq, cols});
        as_ids_lie(call.context, r, r.hidden, data<T>(out));
        return out;
      }
      case Want::packed_tokens: return kept(call.context, r, batch.tokens());
      case Want::packed_index: return r.input.to_packed;
      case Want::cu_seqlens: return r.input.cu_seqlens;
      case Want::first:
      case Want::last:
      case Want::rows: {
        const OutputRows rows = r.rows_of(*rows_read(want));
        if (batch.rows.kind == rows.kind) return kept(call.context, r, batch.output_rows());
        return without_slack(gathered(call.context, r, rows), rows.of(batch.sequences));
      }
      case Want::pooled: return pooled(call, r);
      case Want::hidden_states: return r.states;
      case Want::logits:
      case Want::last_logits: break;
    }
    throw Error("want: logits are a decoder's");
  }

  // The first `count` rows in memory of their own.
  at::Tensor kept(const Context<Device>& context, const Result& r, int64_t count) const {
    if (r.memory.defined()) return without_slack(r.memory, count);
    const at::Tensor copy = empty({count, encoder_.config().hidden});
    copy_on_device(context, r.hidden, data<T>(copy), copy.nbytes());
    return copy;
  }

  // A caller may keep many small results: what stands behind the last row is not kept with them.
  static at::Tensor without_slack(const at::Tensor& rows, int64_t count) {
    const at::Tensor view = rows.narrow(0, 0, count);
    return 8 * (rows.size(0) - count) > count ? view.clone() : view;
  }

  // All tokens' rows -> some of them, [rows_with_slack(rows), hidden]
  at::Tensor gathered(Context<Device>& context, const Result& r, const OutputRows& rows) const {
    const Sequences& sequences = r.input.batch.sequences;
    const int64_t cols = encoder_.config().hidden;
    const at::Tensor out = empty({rows_with_slack<Device>(rows.of(sequences)), cols});
    gather_rows<Device, T>(context, r.hidden, sequences, rows, cols, data<T>(out));
    return out;
  }

  at::Tensor pooled(CallContext<Device>& call, const Result& r) const {
    const Sequences& sequences = r.input.batch.sequences;
    const ModelConfig& c = encoder_.config();
    if (!c.pooler) return empty({sequences.count, 0});
    at::Tensor of_all;
    const T* first = r.hidden;
    if (r.input.batch.rows.kind != RowKind::first) {
      of_all = gathered(call.context, r, {RowKind::first});
      first = data<T>(of_all);
    }
    const at::Tensor out = empty({rows_with_slack<Device>(sequences.count), c.hidden});
    encoder_.pooler(call.for_products(), first, sequences.cu_q, sequences.count, data<T>(out));
    return without_slack(out, sequences.count);
  }

  at::Device device_;
  std::vector<at::Tensor> kept_;  // what encoder_ has made of config and weights
  Encoder<Device, T> encoder_;
  std::shared_ptr<Communicator<Device>> communicator_;  // of a shard
  std::shared_ptr<const ProcessGroup> processes_;       // where its ranks are processes
  mutable Replay<Device, T> replay_;                    // locks itself
};

}  // namespace

template <class Device, class T>
std::unique_ptr<Forward> make_forward(const ModelConfig& config, Weights<T> weights, at::Device device,
                                      std::optional<AttentionPath> attention) {
  return std::make_unique<ForwardOf<Device, T>>(config, std::move(weights), device, attention);
}

#define FTBERT_INSTANTIATE(D, T) FTBERT_INSTANTIATE_ONE(make_forward<D, T>)
FTBERT_BACKENDS(FTBERT_INSTANTIATE)
#undef FTBERT_INSTANTIATE

}  // namespace ftbert::binding
