// One forward call between torch and the core: checks with words, memory from torch's allocator, the current stream.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "binding/encoder_class.h"
#include "binding/padding.h"
#include "binding/replay.h"
#include "binding/tensors.h"
#include "core/device.h"
#include "gemm/cublaslt.h"
#include "kernels/kernels.h"

namespace ftbert::binding {
namespace {

template <class Device, class T>
class EngineOf : public Engine {
 public:
  EngineOf(const EncoderConfig& config, Weights<T> weights, at::Device device, std::optional<AttentionPath> attention)
      : device_(device),
        encoder_(CallContext<Device>(device).context, config, std::move(weights), attention,
                 [&](int64_t floats) {
                   deferred_.push_back(at::empty({floats}, options(at::kFloat)));
                   return data<float>(deferred_.back());
                 }),
        replay_(encoder_, device) {
    if (!deferred_.empty())  // calls may come on any stream
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }

  std::vector<at::Tensor> forward(const Call& call, const std::vector<Want>& wants) const override {
    const c10::DeviceGuard guard(device_);
    CallContext<Device> on(device_);
    const EncoderConfig& c = encoder_.config();
    const bool states = asks_for(wants, Want::hidden_states), first = reads_first_tokens_only(wants);
    const bool padded = !call.cu_seqlens;
    Result r{padded, padded ? unpad<Device>(on.context, device_, c, call.input_ids, call.attention_mask,
                                            call.token_type_ids, wait(wants))
                            : check_packed<Device>(on.context, device_, c, call.input_ids, *call.cu_seqlens,
                                                   call.max_seqlen, call.token_type_ids)};
    EncoderInput& input = r.input.encoder;
    if (first) input.rows = OutputRows::first;

    using Lease = typename Replay<Device, T>::Lease;
    const Lease replayed = states ? Lease() : replay_.run(on.context, input);  // its memory, until this returns
    if (replayed) {
      r.hidden = replayed.hidden();
    } else {
      HiddenStateHook<T> hook;
      if (states) hook = keep_states(on.context, r);
      r.rows = run(on, input, hook);
      r.hidden = data<T>(r.rows);
    }
    // Whether there was padding at all is known when the count is there; all else is launched before that wait.
    const bool settle_first = !replayed && !first;
    if (settle_first) r.input.settle(c);
    std::vector<at::Tensor> made;
    for (const Want want : wants) made.push_back(own(make(on, r, want), call, made));
    if (!settle_first) r.input.settle(c);
    return made;
  }

  void use_cuda_graphs(bool on) const override { replay_.enable(on); }
  bool uses_cuda_graphs() const override { return replay_.enabled(); }

  std::map<std::string, std::string> info() const override {
    const CallContext<Device> on(device_);
    std::map<std::string, std::string> all = {{"attention", is_fused() ? "fused" : "general"},
                                              {"attention_reason", encoder_.attention().reason},
                                              {"activation", std::string(to_string(activation()))},
                                              {"gemm", products_name(on.context)},
                                              {"deferred_layernorm", encoder_.deferred_state(on.context)},
                                              {"cuda_graphs", replay_.state()}};
    if (rounds_products(on.context)) all["products"] = "tf32";
    return all;
  }

 private:
  // The op's schema promises memory of its own for each result: two wants may be the same rows, and the offsets the
  // caller's.
  static at::Tensor own(at::Tensor result, const Call& call, const std::vector<at::Tensor>& before) {
    bool shared = call.cu_seqlens && result.is_alias_of(*call.cu_seqlens);
    for (const at::Tensor& other : before) shared = shared || result.is_alias_of(other);
    return shared ? result.clone() : result;
  }

  // What a forward pass has left, for the tensors that the caller wants.
  struct Result {
    bool padded;
    CheckedInput input;
    const T* hidden = nullptr;  // [output_rows, hidden]
    at::Tensor rows;            // where these lie; undefined: in memory that is lent
    at::Tensor states;          // [layers+1, ...]
  };

  // Where nothing but first tokens is read, the last layer computes those alone.
  static bool reads_first_tokens_only(const std::vector<Want>& wants) {
    return !wants.empty() && std::all_of(wants.begin(), wants.end(), [](Want want) {
      return want == Want::first || want == Want::pooled || want == Want::cu_seqlens || want == Want::packed_index;
    });
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

  bool is_fused() const { return encoder_.attention().path == AttentionPath::fused; }

  Activation activation() const {
    const std::vector<LayerConfig>& layers = encoder_.config().layers;
    return layers.empty() ? Activation::none : layers.front().ffn.activation;
  }

  at::TensorOptions options(at::ScalarType type) const { return at::TensorOptions().device(device_).dtype(type); }
  at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, options(scalar_type_of(kDType<T>))); }

  // [rows_with_slack(output_rows), hidden]
  at::Tensor run(CallContext<Device>& call, const EncoderInput& input, const HiddenStateHook<T>& hook) const {
    const at::Tensor hidden = empty({rows_with_slack<Device>(input.output_rows()), encoder_.config().hidden});
    Context<Device>& context = call.for_products();
    const size_t bytes = encoder_.workspace_bytes(context, input);
    const at::Tensor workspace = at::empty({static_cast<int64_t>(bytes)}, options(at::kByte));
    encoder_.forward(context, input, Workspace(workspace.data_ptr(), bytes), data<T>(hidden), hook);
    return hidden;
  }

  // Copies every hidden state on its way into r.states.
  HiddenStateHook<T> keep_states(Context<Device>& context, Result& r) const {
    const EncoderInput& input = r.input.encoder;
    const int64_t cols = encoder_.config().hidden, states = encoder_.config().depth() + 1;
    r.states = r.padded ? empty({states, input.batch, input.seq, cols}) : empty({states, input.tokens, cols});
    if (input.tokens == 0) r.states.zero_();
    return [this, &context, &r](int64_t i, const T* hidden) { as_ids_lie(context, r, hidden, data<T>(r.states[i])); };
  }

  // Packed rows -> rows as the caller's ids lie.
  void as_ids_lie(Context<Device>& context, const Result& r, const T* packed, T* out) const {
    const EncoderInput& input = r.input.encoder;
    const int64_t cols = encoder_.config().hidden;
    if (r.padded)
      restore_padding<Device, T>(context, packed, data<int32_t>(r.input.packed_index), input.batch * input.seq, cols,
                                 out);
    else
      copy_on_device(context, packed, out, input.tokens * cols * sizeof(T));
  }

  at::Tensor make(CallContext<Device>& call, const Result& r, Want want) const {
    const EncoderInput& input = r.input.encoder;
    const int64_t cols = encoder_.config().hidden;
    switch (want) {
      case Want::tokens: {
        if (!r.padded) return kept(call.context, r, input.tokens);
        if (r.rows.defined() && input.tokens == input.batch * input.seq)
          return without_slack(r.rows, input.tokens).view({input.batch, input.seq, cols});
        const at::Tensor out = empty({input.batch, input.seq, cols});
        as_ids_lie(call.context, r, r.hidden, data<T>(out));
        return out;
      }
      case Want::packed_tokens: return kept(call.context, r, input.tokens);
      case Want::packed_index:
        FTBERT_CHECK(r.padded, "want: packed_index is of padded ids; these are packed");
        return r.input.packed_index;
      case Want::cu_seqlens: return r.input.cu_seqlens;
      case Want::first: {
        if (input.rows == OutputRows::first) return kept(call.context, r, input.batch);
        return without_slack(first_of(call.context, r), input.batch);
      }
      case Want::pooled: return pooled(call, r);
      case Want::hidden_states: return r.states;
    }
    throw Error("an unknown want");
  }

  // The first `count` rows in memory of their own.
  at::Tensor kept(const Context<Device>& context, const Result& r, int64_t count) const {
    if (r.rows.defined()) return without_slack(r.rows, count);
    const at::Tensor copy = empty({count, encoder_.config().hidden});
    copy_on_device(context, r.hidden, data<T>(copy), copy.nbytes());
    return copy;
  }

  // A caller may keep many small results: what stands behind the last row is not kept with them.
  static at::Tensor without_slack(const at::Tensor& rows, int64_t count) {
    const at::Tensor view = rows.narrow(0, 0, count);
    return 8 * (rows.size(0) - count) > count ? view.clone() : view;
  }

  // All tokens' rows -> [rows_with_slack(batch), hidden]
  at::Tensor first_of(Context<Device>& context, const Result& r) const {
    const EncoderInput& input = r.input.encoder;
    const at::Tensor first = empty({rows_with_slack<Device>(input.batch), encoder_.config().hidden});
    first_rows<Device, T>(context, r.hidden, 0, input.cu_seqlens, input.batch, encoder_.config().hidden,
                          data<T>(first));
    return first;
  }

  at::Tensor pooled(CallContext<Device>& call, const Result& r) const {
    const EncoderInput& input = r.input.encoder;
    const EncoderConfig& c = encoder_.config();
    if (!c.pooler) return empty({input.batch, 0});
    at::Tensor all_first;
    const T* first = r.hidden;
    if (input.rows != OutputRows::first) {
      all_first = first_of(call.context, r);
      first = data<T>(all_first);
    }
    const at::Tensor out = empty({rows_with_slack<Device>(input.batch), c.hidden});
    encoder_.pooler(call.for_products(), first, input.cu_seqlens, input.batch, data<T>(out));
    return without_slack(out, input.batch);
  }

  at::Device device_;
  std::vector<at::Tensor> deferred_;  // where encoder_ keeps what its deferred LayerNorms need
  Encoder<Device, T> encoder_;
  mutable Replay<Device, T> replay_;  // locks itself
};

}  // namespace

template <class Device, class T>
std::unique_ptr<Engine> make_engine(const EncoderConfig& config, Weights<T> weights, at::Device device,
                                    std::optional<AttentionPath> attention) {
  return std::make_unique<EngineOf<Device, T>>(config, std::move(weights), device, attention);
}

#define FTBERT_INSTANTIATE(D, T)                                                                   \
  template std::unique_ptr<Engine> make_engine<D, T>(const EncoderConfig&, Weights<T>, at::Device, \
                                                     std::optional<AttentionPath>);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert::binding
