// What kernels cannot read, said once for every op: torch would list its backends.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "binding/tensors.h"

namespace ftbert::binding {
namespace {

// Boxed, for any schema: names the argument.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i)
    if (given[i].isTensor()) plain((op.schema().name() + ": " + arguments[i].name()).c_str(), given[i].toTensor());
  fail(op.schema().name(), ": expected dense tensors on the CPU or a GPU");
}

void refuse_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack*) {
  fail(op.schema().name(), ": runs on a GPU, got tensors on the CPU");
}

}  // namespace

#define FTBERT_REFUSE(key)                                              \
  TORCH_LIBRARY_IMPL(ftbert, key, m) {                                  \
    for (const char* op : {"forward_batch",                             \
                           "pack_weight",                               \
                           "embeddings_layernorm",                      \
                           "add_bias_input_layernorm",                  \
                           "add_bias_act",                              \
                           "add_bias_act_",                             \
                           "attention",                                 \
                           "add_qkv_bias",                              \
                           "softmax",                                   \
                           "transpose",                                 \
                           "pooling",                                   \
                           "linear",                                    \
                           "linear_own",                                \
                           "linear_layernorm",                          \
                           "padding",                                   \
                           "padding_mask",                              \
                           "padding_positions",                         \
                           "padding_stage",                             \
                           "remove_padding",                            \
                           "restore_padding",                           \
                           "first_rows"})                               \
      m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>()); \
  }
FTBERT_REFUSE(SparseCPU)
FTBERT_REFUSE(SparseCUDA)
FTBERT_REFUSE(SparseCsrCPU)
FTBERT_REFUSE(SparseCsrCUDA)
FTBERT_REFUSE(QuantizedCPU)
FTBERT_REFUSE(QuantizedCUDA)
FTBERT_REFUSE(NestedTensorCPU)
FTBERT_REFUSE(AutogradNestedTensor)
FTBERT_REFUSE(NestedTensorCUDA)
FTBERT_REFUSE(MkldnnCPU)

TORCH_LIBRARY_IMPL(ftbert, CPU, m) {
  m.impl("linear_own", torch::CppFunction::makeFromBoxedFunction<&refuse_on_cpu>());
  m.impl("linear_layernorm", torch::CppFunction::makeFromBoxedFunction<&refuse_on_cpu>());
}

}  // namespace ftbert::binding
