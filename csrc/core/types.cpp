#include "core/types.h"

#include "core/check.h"

namespace ftbert {
namespace {

// HuggingFace's spellings (transformers/activations.py, ACT2FN) and our own; the first of each is its name. `gelu` is
// the erf form there.
constexpr std::pair<std::string_view, Activation> kActivations[] = {
    {"gelu", Activation::gelu_erf},
    {"gelu_erf", Activation::gelu_erf},
    {"gelu_python", Activation::gelu_erf},
    {"gelu_tanh", Activation::gelu_tanh},
    {"gelu_new", Activation::gelu_tanh},
    {"gelu_fast", Activation::gelu_tanh},
    {"gelu_pytorch_tanh", Activation::gelu_tanh},
    {"quick_gelu", Activation::quick_gelu},
    {"relu", Activation::relu},
    {"silu", Activation::silu},
    {"swish", Activation::silu},
    {"tanh", Activation::tanh},
    {"none", Activation::none},
};

constexpr std::pair<std::string_view, PoolingMode> kPoolings[] = {
#define FTBERT_NAMED(name) {#name, PoolingMode::name},
    FTBERT_POOLING_MODES(FTBERT_NAMED)
#undef FTBERT_NAMED
};

constexpr std::string_view kDTypes[] = {
#define FTBERT_NAME(name) #name,
    FTBERT_DTYPES(FTBERT_NAME)
#undef FTBERT_NAME
};

template <class Table>
auto look_up(const Table& table, std::string_view name, const char* what) {
  std::string known;
  for (const auto& [key, value] : table) {
    if (key == name) return value;
    known += known.empty() ? "" : ", ";
    known += key;
  }
  throw Error(std::string("unknown ") + what + " '" + std::string(name) + "'; supported: " + known);
}

}  // namespace

Activation parse_activation(std::string_view name) { return look_up(kActivations, name, "activation"); }
PoolingMode parse_pooling(std::string_view name) { return look_up(kPoolings, name, "pooling mode"); }

std::string_view to_string(Activation activation) {
  for (const auto& [name, named] : kActivations)
    if (named == activation) return name;
  return "?";
}

std::vector<std::pair<std::string_view, std::string_view>> activation_spellings() {
  std::vector<std::pair<std::string_view, std::string_view>> all;
  for (const auto& [spelling, activation] : kActivations) all.emplace_back(spelling, to_string(activation));
  return all;
}

std::string_view to_string(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

}  // namespace ftbert
