// torch.classes.ftbert.Encoder: the core's encoder on one device, built from named tensors and a config.
#pragma once
#include <ATen/core/Dict.h>
#include <torch/custom_class.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "encoder.h"
#include "model/config.h"

namespace ftbert::binding {

using TensorDict = c10::Dict<std::string, at::Tensor>;
using StringDict = c10::Dict<std::string, std::string>;

std::map<std::string, std::string> to_map(const StringDict& dict);

// What differs between (device, dtype) pairs, behind one virtual call.
struct Engine {
  virtual ~Engine() = default;
  // -> last hidden state [batch, seq, hidden], pooled [batch, hidden] ([batch, 0] without a pooler)
  virtual std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input_ids,
                                                     const std::optional<at::Tensor>& attention_mask,
                                                     const std::optional<at::Tensor>& token_type_ids) const = 0;
  // -> last hidden state of the first kept tokens [batch, hidden] (0 for an empty row), pooled as above; what only the
  // other tokens' last hidden states need is not computed
  virtual std::tuple<at::Tensor, at::Tensor> forward_first(const at::Tensor& input_ids,
                                                           const std::optional<at::Tensor>& attention_mask,
                                                           const std::optional<at::Tensor>& token_type_ids) const = 0;
  // -> [layers+1, batch, seq, hidden]: the embedding's output, then every layer's
  virtual at::Tensor forward_hidden_states(const at::Tensor& input_ids, const std::optional<at::Tensor>& attention_mask,
                                           const std::optional<at::Tensor>& token_type_ids) const = 0;
  // -> packed [tokens, hidden], packed_index int32 [batch*seq] (-1 at padding), cu_seqlens int32 [batch+1]
  virtual std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_unpadded(
      const at::Tensor& input_ids, const std::optional<at::Tensor>& attention_mask,
      const std::optional<at::Tensor>& token_type_ids) const = 0;
  // -> [tokens, hidden]
  virtual at::Tensor forward_packed(const at::Tensor& input_ids, const at::Tensor& cu_seqlens, int64_t max_seqlen,
                                    const std::optional<at::Tensor>& token_type_ids) const = 0;
  // -> [batch, hidden], of the first tokens
  virtual at::Tensor forward_first_packed(const at::Tensor& input_ids, const at::Tensor& cu_seqlens, int64_t max_seqlen,
                                          const std::optional<at::Tensor>& token_type_ids) const = 0;
  // [tokens, hidden] -> [batch, hidden]
  virtual at::Tensor pool(const at::Tensor& hidden, const at::Tensor& cu_seqlens) const = 0;
  // On a GPU, whether small calls are recorded and repeated (binding/replay.h); does nothing on the CPU.
  virtual void use_cuda_graphs(bool on) const = 0;
  virtual bool uses_cuda_graphs() const = 0;
  virtual std::map<std::string, std::string> info() const = 0;
};

class EncoderClass : public torch::CustomClassHolder {
 public:
  // attention: "auto", "fused" or "general". All weights on one device and of one dtype; missing, extra and
  // misshapen ones are all listed in the error. On the CPU a matrix may come packed (torch.ops.ftbert.pack_weight), and
  // all of them in bf16 where the others are fp32: then products are computed in bf16 with float sums, all else in
  // fp32.
  EncoderClass(TensorDict weights, StringDict config, std::string attention);

  const Engine& engine() const { return *engine_; }
  const EncoderConfig& config() const { return config_; }
  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }                  // of results
  at::ScalarType product_dtype() const { return product_dtype_; }  // of the operands of products

  // The weights in their plain layout (those repacked for the GEMM are laid out anew), and what was given.
  TensorDict weights() const;
  // One of them without a copy; throws for an unknown name and for a repacked matrix.
  at::Tensor weight(const std::string& name) const;
  StringDict config_entries() const { return entries_; }
  std::string attention() const { return attention_; }
  StringDict info() const;
  // bf16 on the CPU: the matrices alone.
  c10::intrusive_ptr<EncoderClass> to(at::Device device, at::ScalarType dtype) const;

 private:
  TensorDict weights_;                        // plain tensors that kernels read
  std::map<std::string, at::Tensor> packed_;  // GEMM operands in the CPU library's layout, instead of plain
  StringDict entries_;
  std::string attention_;
  EncoderConfig config_;
  at::Device device_{at::kCPU};
  at::ScalarType dtype_ = at::kFloat, product_dtype_ = at::kFloat;
  std::unique_ptr<Engine> engine_;
};

// engine.cpp. products: the dtype of the operands of matrix products, which on the CPU may be bf16.
template <class Device, class T>
std::unique_ptr<Engine> make_engine(const EncoderConfig& config, Weights<T> weights, at::Device device,
                                    at::ScalarType products, AttentionPath path);

}  // namespace ftbert::binding
