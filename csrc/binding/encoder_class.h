// torch.classes.ftbert.Encoder: the core's encoder on one device, built from named tensors and a config.
#pragma once
#include <ATen/core/Dict.h>
#include <torch/custom_class.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "binding/call.h"
#include "encoder.h"

namespace ftbert::binding {

using TensorDict = c10::Dict<std::string, at::Tensor>;
using StringDict = c10::Dict<std::string, std::string>;

std::map<std::string, std::string> to_map(const StringDict& dict);

// What differs between (device, dtype) pairs, behind one virtual call.
struct Engine {
  virtual ~Engine() = default;
  // One tensor for each want, in their order.
  virtual std::vector<at::Tensor> forward(const Call& call, const std::vector<Want>& wants) const = 0;
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
  at::ScalarType dtype() const { return dtype_; }                // of the residual stream and of results
  at::ScalarType matrix_dtype() const { return matrix_dtype_; }  // as matrices are stored

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
  at::ScalarType dtype_ = at::kFloat, matrix_dtype_ = at::kFloat;
  std::unique_ptr<Engine> engine_;
};

// engine.cpp
template <class Device, class T>
std::unique_ptr<Engine> make_engine(const EncoderConfig& config, Weights<T> weights, at::Device device,
                                    std::optional<AttentionPath> attention);

}  // namespace ftbert::binding
