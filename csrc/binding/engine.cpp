// One forward call between torch and the core: checks with words, memory from torch's allocator, the current stream.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <set>

#include "binding/call_words.h"
#include "binding/encoder_class.h"
#include "binding/padding.h"
#include "binding/process_group.h"
#include "binding/ranks.h"
#include "binding/replay.h"
#include "binding/sum_time.h"
#include "binding/tensors.h"
#include "core/device.h"
#include "gemm/cublaslt.h"
#include "kernels/kernels.h"
#include "layers/positions.h"
#include "layers/shared_prefix.h"

namespace ftbert::binding {
namespace {

template <class Device, class T>
class EngineOf : public Engine {
 public:
  EngineOf(const EncoderConfig& config, Weights<T> weights, at::Device device, std::optional<AttentionPath> attention)
      : device_(device),
        encoder_(CallContext<Device>(device).context, config, std::move(weights), attention,
                 [&](int64_t floats) {
                   kept_.push_back(at::empty({floats}, options(at::kFloat)));
                   return data<float>(kept_.back());
                 }),
        replay_(encoder_, device) {
    if (!kept_.empty() && device.is_cuda())  // calls may come on any stream
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }

  std::vector<at::Tensor> forward(const Call& call, const std::vector<Want>& wants) const override {
    const c10::DeviceGuard guard(device_);
    CallContext<Device> on(device_);
    on.context.communicator = communicator_.get();
    const std::unique_lock<std::mutex> alone = communicator_ ? communicator_->alone() : std::unique_lock<std::mutex>();
    return alike(
        processes_.get(), [&] { return lines_of(call, wants, processes_->contents()); },
        [&] { return run_call(on, call, wants); });
  }

  void use_cuda_graphs(bool on) const override { replay_.enable(on); }
  bool uses_cuda_graphs() const override { return replay_.enabled(); }

  AttentionPath attention_path() const override { return encoder_.attention().path; }
  void join(AnyCommunicator communicator) override {
    communicator_ = communicator.of<Device>();
    processes_ = communicator.processes;
  }
  AnyCommunicator communicator() const override {
    if constexpr (std::is_same_v<Device, Cpu>)
      return {communicator_, nullptr, processes_};
    else
      return {nullptr, communicator_, processes_};
  }
  double seconds_of_sum(int64_t rows) const override {
    return communicator_ ? binding::seconds_of_sum<Device, T>(device_, *communicator_, rows, encoder_.config().hidden)
                         : 0;
  }
  const Encoder<Device, T>& encoder() const { return encoder_; }

  std::map<std::string, std::string> info() const override {
    const CallContext<Device> on(device_);
    std::map<std::string, std::string> all = {{"attention", is_fused() ? "fused" : "general"},
                                              {"attention_reason", encoder_.attention().reason},
                                              {"activation", activations()},
                                              {"gemm", products_name(on.context)},
                                              {"deferred_layernorm", encoder_.deferred_state(on.context)},
                                              {"cuda_graphs", replay_.state()}};
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

  // What a forward pass has left, for the tensors that the caller wants.
  struct Result {
    CheckedInput input;
    OutputRows named = {};      // by the caller
    const T* hidden = nullptr;  // [input.batch.output_rows, hidden]
    at::Tensor memory;          // where these lie; undefined: in memory that is lent
    at::Tensor states;          // [layers+1, ...]

    OutputRows rows_of(RowKind kind) const { return kind == RowKind::any ? named : OutputRows{kind}; }
  };

  std::vector<at::Tensor> run_call(CallContext<Device>& on, const Call& call, const std::vector<Want>& wants) const {
    const EncoderConfig& c = encoder_.config();
    FTBERT_CHECK(!call.rows || asks_for(wants, Want::rows), "rows: nothing of `want` reads them");
    Result r{call.cu_seqlens ? check_packed<Device>(on.context, device_, c, call.input_ids, *call.cu_seqlens,
                                                    call.max_seqlen, call.token_type_ids)
                             : unpad<Device>(on.context, device_, c, call.input_ids, call.attention_mask,
                                             call.token_type_ids, call.hidden ? Wait::first : wait(wants))};
    FTBERT_CHECK(r.input.padded() || !asks_for(wants, Want::packed_index),
                 "want: packed_index is of padded ids; these are packed");
    std::optional<SharedPrefix<Device>> prefix;
    if (call.shared_prefix != 0) {
      share_prefix(r.input, call.shared_prefix, call.max_seqlen);
      prefix.emplace(c, attention_path(), kDType<T>, r.input.batch);
    }
    if (asks_for(wants, Want::rows)) choose_rows(r.input, call.rows);
    // Here nothing can be wrong with the call any more: a stage in another process sees that, too, and has sent.
    if (call.hidden) go_on_from(r.input, call.hidden(r.input.batch.tokens()), c.hidden, kDType<T>);
    r.named = r.input.batch.rows;
    r.input.batch.rows = r.rows_of(rows_read(wants));

    using Lease = typename Replay<Device, T>::Lease;
    const bool states = asks_for(wants, Want::hidden_states);
    // Its memory, until this returns. A recording has no scratch for weights, and serves no shared prefix.
    const bool direct = states || call.shared_prefix > 0 || weight_scratch(on.context, r.input.batch) > 0 ||
                        (communicator_ && !communicator_->records());
    const Lease replayed = direct ? Lease() : replay_.run(on.context, r.input.batch);
    if (replayed) {
      r.hidden = replayed.hidden();
    } else {
      HiddenStateHook<T> hook;
      if (states) hook = keep_states(on.context, r);
      r.memory = run(on, r.input, prefix, hook);
      r.hidden = data<T>(r.memory);
    }
    std::vector<at::Tensor> made;
    for (const Want want : wants) made.push_back(not_shared(make(on, r, want), call, made));
    r.input.settle(c);
    return made;
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

  size_t weight_scratch(const Context<Device>& context, const Batch& batch) const {
    return encoder_.weight_scratch_bytes(context, std::max(batch.tokens(), batch.output_rows()));
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

  // [rows_with_slack(output_rows), hidden]
  at::Tensor run(CallContext<Device>& call, const CheckedInput& input, std::optional<SharedPrefix<Device>>& prefix,
                 const HiddenStateHook<T>& hook) const {
    const EncoderConfig& c = encoder_.config();
    Context<Device>& context = call.for_products(weight_scratch(call.context, input.batch));
    Batch batch = input.batch;
    const at::Tensor hidden = empty({rows_with_slack<Device>(batch.output_rows()), c.hidden});
    const auto plan = encoder_.plan(context, batch);
    const auto take = [&](Workspace& from) -> Positions {
      if (!prefix) return Positions::take(from, c, batch.tokens(), input.padded());
      prefix->take(from, batch);
      return {};
    };
    Workspace measure;
    take(measure);
    const size_t bytes = measure.bytes() + plan.bytes;
    const at::Tensor memory = at::empty({static_cast<int64_t>(bytes)}, options(at::kByte));
    Workspace workspace(memory.data_ptr(), bytes);
    const Positions positions = take(workspace);
    if (prefix) {
      prefix->find_places(context, batch);
    } else {
      find_positions(context, c, batch, batch.tokens(), positions);
      batch.positions = positions.ids;
      batch.columns = positions.columns;
    }
    const Workspace rest(workspace.take<char>(static_cast<int64_t>(plan.bytes)), plan.bytes);
    if (communicator_) {
      communicator_->reserve(sum_bytes<Device, T>(c, batch));
      communicator_->agree(true);
    }
    encoder_.forward(context, batch, plan, rest, data<T>(hidden), hook);
    if (communicator_) communicator_->agree(true);
    return hidden;
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
        if (r.memory.defined()) r.input.settle(encoder_.config());
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
    }
    throw Error("an unknown want");
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
    const EncoderConfig& c = encoder_.config();
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
std::unique_ptr<Engine> make_engine(const EncoderConfig& config, Weights<T> weights, at::Device device,
                                    std::optional<AttentionPath> attention) {
  return std::make_unique<EngineOf<Device, T>>(config, std::move(weights), device, attention);
}

template <class Device, class T>
const Encoder<Device, T>& encoder_of(const Engine& engine) {
  return dynamic_cast<const EngineOf<Device, T>&>(engine).encoder();
}

#define FTBERT_INSTANTIATE(D, T)                                                                   \
  template const Encoder<D, T>& encoder_of<D, T>(const Engine&);                                   \
  template std::unique_ptr<Engine> make_engine<D, T>(const EncoderConfig&, Weights<T>, at::Device, \
                                                     std::optional<AttentionPath>);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert::binding
