// torch.classes.ftbert.Encoder: the core's encoder on one device, built from named tensors and a config.
#pragma once
#include <ATen/core/Dict.h>
#include <torch/custom_class.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/types.h"
#include "model/config.h"

namespace ftbert::binding {

using TensorDict = c10::Dict<std::string, at::Tensor>;
using StringDict = c10::Dict<std::string, std::string>;

class Engine;  // binding/engine.h
struct Stages;

class EncoderClass : public torch::CustomClassHolder {
 public:
  // config: JSON (ModelConfig::parse). attention: "auto", "fused" or "general". All weights are on one device.
  // Matrices are as stored, other weights of the stream's dtype. The error lists all missing, extra, misshapen and
  // otherwise unfit weights. On the CPU a matrix may come packed (torch.ops.ftbert.pack_weight), and in bf16: then its
  // product is computed in bf16 with float sums. One in q8_0 may come packed on any device, with its scales
  // (torch.ops.ftbert.pack_q8_0), which then are no tensor of their own.
  EncoderClass(TensorDict weights, std::string config, std::string attention);

  // The ranks of one process, and a model in stages (binding/engine.h).
  explicit EncoderClass(std::vector<c10::intrusive_ptr<EncoderClass>> shards);
  explicit EncoderClass(const Stages& stages);
  ~EncoderClass() override;

  const Engine& engine() const { return *engine_; }
  Engine& engine() { return *engine_; }
  const ModelConfig& config() const { return config_; }
  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }  // of the residual stream and of results
  std::string matrix_dtype() const;                // the narrowest in which one is stored

  // All of the model is here, on one device.
  bool whole() const;
  // The weights in their plain layout (those repacked for the GEMM are laid out anew), and what was given.
  TensorDict weights() const;
  // One of them without a copy; throws for an unknown name and for a repacked matrix.
  at::Tensor weight(const std::string& name) const;
  std::string description() const { return description_; }  // the config as it was given
  std::string attention() const { return attention_; }
  StringDict info() const;
  // bf16 on the CPU: the matrices alone.
  c10::intrusive_ptr<EncoderClass> to(at::Device device, at::ScalarType dtype) const;

 private:
  TensorDict weights_;                        // plain tensors that kernels read
  std::map<std::string, at::Tensor> packed_;  // GEMM operands in the CPU library's layout or q8_0's, instead of plain
  std::map<std::string, const Format*> matrix_formats_;
  std::string description_, attention_;
  ModelConfig config_;
  at::Device device_{at::kCPU};
  at::ScalarType dtype_ = at::kFloat;
  std::unique_ptr<Engine> engine_;
};

using EncoderPtr = c10::intrusive_ptr<EncoderClass>;

}  // namespace ftbert::binding
