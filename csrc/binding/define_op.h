// How the ops come to be: a schema, a function, and words for tensors that no kernel can read.
#pragma once
#include <torch/library.h>

#include <optional>
#include <vector>

#include "binding/visible.h"

namespace ftbert::binding {

// The op that the schema names. on_cpu: none where Python registers it.
FTBERT_VISIBLE void define_op(torch::Library& m, const char* schema, std::optional<torch::CppFunction> on_cpu,
                              torch::CppFunction on_cuda, const std::vector<at::Tag>& tags);

// One function for both devices: the core's own switch chooses.
template <class F>
void define_op(torch::Library& m, const char* schema, F* function, const std::vector<at::Tag>& tags = {}) {
  define_op(m, schema, torch::CppFunction(function), torch::CppFunction(function), tags);
}

FTBERT_VISIBLE void refuse_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack*);

template <class F>
void define_cuda_op(torch::Library& m, const char* schema, F* function) {
  define_op(m, schema, torch::CppFunction::makeFromBoxedFunction<&refuse_on_cpu>(), torch::CppFunction(function), {});
}

// An op of CUDA kernels that PyTorch's functions compose on the CPU: Python registers that (torch.library).
template <class F>
void define_op_but_cpu(torch::Library& m, const char* schema, F* function) {
  define_op(m, schema, std::nullopt, torch::CppFunction(function), {});
}

}  // namespace ftbert::binding
