#include "binding/define_op.h"

#include <string>

#include "binding/tensors.h"

namespace ftbert::binding {
namespace {

// What kernels cannot read, said once for every op: torch would list its backends. Boxed, for any schema: names the
// argument.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i)
    if (given[i].isTensor()) plain((op.schema().name() + ": " + arguments[i].name()).c_str(), given[i].toTensor());
  fail(op.schema().name(), ": expected dense tensors on the CPU or a GPU");
}

// What torch computes when somebody reads it: a negative or conjugate view, a tensor of zeros without memory. Its
// fallback resolves them for ops that return what they write, and takes the process down behind others.
void refuse_unresolved(const c10::OperatorHandle& op, torch::jit::Stack*) {
  fail(op.schema().name(), ": writes into its arguments: expected tensors that torch has computed, got a view that it ",
       "resolves when it is read; call resolve_neg(), resolve_conj() or clone() first");
}

}  // namespace

void refuse_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack*) {
  fail(op.schema().name(), ": runs on a GPU, got tensors on the CPU");
}

void define_op(torch::Library& m, const char* schema, std::optional<torch::CppFunction> on_cpu,
               torch::CppFunction on_cuda, const std::vector<at::Tag>& tags) {
  using Key = c10::DispatchKey;
  const std::string text = schema, name = text.substr(0, text.find('('));
  m.def(schema, tags);
  if (on_cpu) m.impl(name.c_str(), torch::dispatch(Key::CPU, std::move(*on_cpu)));
  m.impl(name.c_str(), torch::dispatch(Key::CUDA, std::move(on_cuda)));
  for (const Key key :
       {Key::SparseCPU, Key::SparseCUDA, Key::SparseCsrCPU, Key::SparseCsrCUDA, Key::QuantizedCPU, Key::QuantizedCUDA,
        Key::NestedTensorCPU, Key::NestedTensorCUDA, Key::AutogradNestedTensor, Key::MkldnnCPU})
    m.impl(name.c_str(), torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&refuse>()));
  if (text.find('!') == std::string::npos) return;
  for (const Key key : {Key::Negative, Key::Conjugate, Key::ZeroTensor})
    m.impl(name.c_str(), torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&refuse_unresolved>()));
}

}  // namespace ftbert::binding
