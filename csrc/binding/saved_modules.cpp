// The ops of TorchScript files that were saved before forward_batch: the files load, and their calls say what to do.
#include "binding/saved_modules.h"

#include <string>

#include "core/check.h"

namespace ftbert::binding {
namespace {

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  fail(op.schema().name(), ": this TorchScript file was saved by an earlier release of ftbert, whose calls are other ",
       "ops; save it again: torch.jit.script(ftbert.load(folder).module).save(file)");
}

}  // namespace

void define_retired_ops(torch::Library& m) {
  for (const char* schema :
       {"forward(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor? attention_mask, Tensor? "
        "token_type_ids) -> (Tensor, Tensor)",
        "forward_first(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor? attention_mask, "
        "Tensor? token_type_ids) -> (Tensor, Tensor)",
        "forward_packed(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor cu_seqlens, SymInt "
        "max_seqlen, Tensor? token_type_ids) -> Tensor",
        "forward_first_packed(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor cu_seqlens, "
        "SymInt max_seqlen, Tensor? token_type_ids) -> Tensor",
        "forward_unpadded(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor? attention_mask, "
        "Tensor? token_type_ids) -> (Tensor, Tensor, Tensor)",
        "pool(__torch__.torch.classes.ftbert.Encoder encoder, Tensor hidden, Tensor cu_seqlens) -> Tensor"}) {
    const std::string text = schema;
    m.def(schema);
    m.impl(text.substr(0, text.find('(')).c_str(),
           torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                           torch::CppFunction::makeFromBoxedFunction<&refuse>()));
  }
}

}  // namespace ftbert::binding
