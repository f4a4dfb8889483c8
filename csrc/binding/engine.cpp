// One forward call between torch and the core: checks with words, memory from torch's allocator, the current stream.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

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
  EngineOf(const EncoderConfig& config, Weights<T> weights, at::Device device, at::ScalarType products,
           AttentionPath path)
      : device_(device),
        products_(products),
        encoder_(config, std::move(weights), path,
                 attention_supports<Device, T>(CallContext<Device>(device).context, config.head_size)),
        replay_(encoder_, device) {
    const CallContext<Device> call(device);
    encoder_.fold_layernorms(call.context, [&](int64_t floats) {
      folded_ = at::empty({floats}, options(at::kFloat));
      return data<float>(folded_);
    });
    if (folded_.defined())  // calls may come on any stream
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }

  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input_ids,
                                             const std::optional<at::Tensor>& attention_mask,
                                             const std::optional<at::Tensor>& token_type_ids) const override {
    const c10::DeviceGuard guard(device_);
    CallContext<Device> call(device_, products_);
    const EncoderConfig& c = encoder_.config();
    PaddedInput padded = unpad<Device>(call.context, device_, c, input_ids, attention_mask, token_type_ids, wait());
    const EncoderInput& input = padded.encoder;
    const auto finish = [&](const T* packed, at::Tensor hidden) -> std::tuple<at::Tensor, at::Tensor> {
      if (!hidden.defined()) {
        hidden = at::empty({input.batch, input.seq, c.hidden}, options(ScalarTypeOf<T>::value));
        restore_padding<Device, T>(call.context, packed, data<int32_t>(padded.packed_index), input.batch * input.seq,
                                   c.hidden, data<T>(hidden));
      }
      return {hidden, pooled(call, packed, input.cu_seqlens, input.batch)};
    };
    if (const auto replayed = replay_.run(call.context, input)) {
      auto results = finish(replayed.hidden(), {});
      padded.settle(c);
      return results;
    }
    const at::Tensor packed = without_slack(run(call, input), input.tokens);
    padded.settle(c);
    const bool full = input.tokens == input.batch * input.seq;
    return finish(data<T>(packed), full ? packed.view({input.batch, input.seq, c.hidden}) : at::Tensor());
  }

  std::tuple<at::Tensor, at::Tensor> forward_first(const at::Tensor& input_ids,
                                                   const std::optional<at::Tensor>& attention_mask,
                                                   const std::optional<at::Tensor>& token_type_ids) const override {
    const c10::DeviceGuard guard(device_);
    CallContext<Device> call(device_, products_);
    PaddedInput padded =
        unpad<Device>(call.context, device_, encoder_.config(), input_ids, attention_mask, token_type_ids, wait());
    EncoderInput& input = padded.encoder;
    input.rows = OutputRows::first;
    const auto finish = [&](at::Tensor first, const T* rows) -> std::tuple<at::Tensor, at::Tensor> {
      const at::Tensor pooled = pooled_first(call, rows, input.cu_seqlens, input.batch);
      padded.settle(encoder_.config());
      return {first, pooled};
    };
    if (const auto replayed = replay_.run(call.context, input))
      return finish(copied(call.context, replayed.hidden(), input.batch), replayed.hidden());
    const at::Tensor first = run(call, input);
    return finish(without_slack(first, input.batch), data<T>(first));
  }

  at::Tensor forward_hidden_states(const at::Tensor& input_ids, const std::optional<at::Tensor>& attention_mask,
                                   const std::optional<at::Tensor>& token_type_ids) const override {
    const c10::DeviceGuard guard(device_);
    CallContext<Device> call(device_, products_);
    const EncoderConfig& c = encoder_.config();
    const PaddedInput padded = unpad<Device>(call.context, device_, c, input_ids, attention_mask, token_type_ids);
    const int64_t batch = padded.encoder.batch, seq = padded.encoder.seq, stride = batch * seq * c.hidden;
    const at::Tensor all = at::empty({c.layers + 1, batch, seq, c.hidden}, options(ScalarTypeOf<T>::value));
    if (padded.encoder.tokens == 0) return all.zero_();
    run(call, padded.encoder, [&](int64_t i, const T* hidden) {
      restore_padding<Device, T>(call.context, hidden, data<int32_t>(padded.packed_index), batch * seq, c.hidden,
                                 data<T>(all) + i * stride);
    });
    return all;
  }

  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_unpadded(
      const at::Tensor& input_ids, const std::optional<at::Tensor>& attention_mask,
      const std::optional<at::Tensor>& token_type_ids) const override {
    const c10::DeviceGuard guard(device_);
    CallContext<Device> call(device_, products_);
    const PaddedInput padded =
        unpad<Device>(call.context, device_, encoder_.config(), input_ids, attention_mask, token_type_ids);
    return {run_packed(call, padded.encoder), padded.packed_index, padded.cu_seqlens};
  }

  at::Tensor forward_packed(const at::Tensor& input_ids, const at::Tensor& cu_seqlens, int64_t max_seqlen,
                            const std::optional<at::Tensor>& token_type_ids) const override {
    const c10::DeviceGuard guard(device_);
    CallContext<Device> call(device_, products_);
    const PackedTensors packed = check_packed<Device>(call.context, device_, encoder_.config(), input_ids, cu_seqlens,
                                                      max_seqlen, token_type_ids);
    return run_packed(call, packed.encoder);
  }

  at::Tensor forward_first_packed(const at::Tensor& input_ids, const at::Tensor& cu_seqlens, int64_t max_seqlen,
                                  const std::optional<at::Tensor>& token_type_ids) const override {
    const c10::DeviceGuard guard(device_);
    CallContext<Device> call(device_, products_);
    PackedTensors packed = check_packed<Device>(call.context, device_, encoder_.config(), input_ids, cu_seqlens,
                                                max_seqlen, token_type_ids);
    packed.encoder.rows = OutputRows::first;
    return run_packed(call, packed.encoder);
  }

  at::Tensor pool(const at::Tensor& hidden, const at::Tensor& cu_seqlens) const override {
    const c10::DeviceGuard guard(device_);
    CallContext<Device> call(device_, products_);
    const at::Tensor packed = hidden.contiguous();
    return pooled(call, data<T>(packed), data<int32_t>(cu_seqlens), cu_seqlens.size(0) - 1);
  }

  void use_cuda_graphs(bool on) const override { replay_.enable(on); }
  bool uses_cuda_graphs() const override { return replay_.enabled(); }

  std::map<std::string, std::string> info() const override {
    std::map<std::string, std::string> all{
        {"attention", encoder_.uses_fused_attention() ? "fused" : "general"},
        {"attention_reason", encoder_.attention_reason()},
        {"activation", std::string(to_string(encoder_.config().activation))},
    };
    if constexpr (std::is_same_v<Device, Cpu>)
      all["gemm"] = torch_gemm_name();
    else
      all["gemm"] = gemm_library_version();
    if (products_ != ScalarTypeOf<T>::value)
      all["attention_products"] =
          encoder_.uses_fused_attention() ? attention_operands(encoder_.config().head_size) : "fp32";
    all["folded_layernorm"] = encoder_.folded_state(CallContext<Device>(device_).context);
    all["cuda_graphs"] = replay_.state();
    return all;
  }

 private:
  // The general attention path's work grows with the longest sequence that there may be.
  Wait wait() const { return encoder_.uses_fused_attention() ? Wait::last : Wait::first; }

  at::TensorOptions options(at::ScalarType type) const { return at::TensorOptions().device(device_).dtype(type); }

  at::Tensor run_packed(CallContext<Device>& call, const EncoderInput& input) const {
    const auto replayed = replay_.run(call.context, input);
    if (replayed) return copied(call.context, replayed.hidden(), input.output_rows());
    return without_slack(run(call, input), input.output_rows());
  }

  at::Tensor copied(const Context<Device>& context, const T* hidden, int64_t rows) const {
    const at::Tensor copy = at::empty({rows, encoder_.config().hidden}, options(ScalarTypeOf<T>::value));
    if constexpr (std::is_same_v<Device, Cuda>) copy_on_device(context, hidden, data<T>(copy), copy.nbytes());
    return copy;  // the CPU has no recordings
  }

  // [padded_rows(output_rows), hidden]
  at::Tensor run(CallContext<Device>& call, const EncoderInput& input, const HiddenStateHook<T>& hook = nullptr) const {
    const int64_t cols = encoder_.config().hidden;
    const at::Tensor hidden =
        at::empty({Encoder<Device, T>::padded_rows(input.output_rows()), cols}, options(ScalarTypeOf<T>::value));
    Context<Device>& context = call.for_products();
    const size_t bytes = encoder_.workspace_bytes(context, input);
    const at::Tensor workspace = at::empty({static_cast<int64_t>(bytes)}, options(at::kByte));
    encoder_.forward(context, input, Workspace(workspace.data_ptr(), bytes), data<T>(hidden), hook);
    return hidden;
  }

  // A caller may keep many small results: what stands behind the last row is not kept with them.
  static at::Tensor without_slack(const at::Tensor& rows, int64_t count) {
    const at::Tensor view = rows.narrow(0, 0, count);
    return 8 * (rows.size(0) - count) > count ? view.clone() : view;
  }

  at::Tensor pooled(CallContext<Device>& call, const T* hidden, const int32_t* cu_seqlens, int64_t batch) const {
    const EncoderConfig& c = encoder_.config();
    if (!c.pooler) return pooled_first(call, nullptr, cu_seqlens, batch);
    const at::Tensor first =
        at::empty({Encoder<Device, T>::padded_rows(batch), c.hidden}, options(ScalarTypeOf<T>::value));
    first_rows<Device, T>(call.context, hidden, 0, cu_seqlens, batch, c.hidden, data<T>(first));
    return pooled_first(call, data<T>(first), cu_seqlens, batch);
  }

  // first [padded_rows(batch), hidden]
  at::Tensor pooled_first(CallContext<Device>& call, const T* first, const int32_t* cu_seqlens, int64_t batch) const {
    const EncoderConfig& c = encoder_.config();
    if (!c.pooler) return at::empty({batch, 0}, options(ScalarTypeOf<T>::value));
    const at::Tensor out =
        at::empty({Encoder<Device, T>::padded_rows(batch), c.hidden}, options(ScalarTypeOf<T>::value));
    encoder_.pool(call.for_products(), first, cu_seqlens, batch, data<T>(out));
    return without_slack(out, batch);
  }

  at::Device device_;
  at::ScalarType products_;  // of the operands of products
  at::Tensor folded_;        // where encoder_ keeps what its folded LayerNorms need
  Encoder<Device, T> encoder_;
  mutable Replay<Device, T> replay_;  // locks itself
};

}  // namespace

template <class Device, class T>
std::unique_ptr<Engine> make_engine(const EncoderConfig& config, Weights<T> weights, at::Device device,
                                    at::ScalarType products, AttentionPath path) {
  return std::make_unique<EngineOf<Device, T>>(config, std::move(weights), device, products, path);
}

#define FTBERT_INSTANTIATE(D, T)                                                                                   \
  template std::unique_ptr<Engine> make_engine<D, T>(const EncoderConfig&, Weights<T>, at::Device, at::ScalarType, \
                                                     AttentionPath);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert::binding
