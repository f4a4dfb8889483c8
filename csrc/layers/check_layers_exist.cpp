#include <optional>
#include <set>
#include <string>

#include "core/check.h"
#include "layers/layer_stack.h"

namespace ftbert {
namespace {

constexpr int64_t kMostTurns = int64_t{1} << 21, kMostTableFloats = int64_t{1} << 29;

}  // namespace

void check_layers_exist(const ModelConfig& config) {
  std::set<std::string> lacking;
  const auto refuse = [&](bool asked, const char* what) {
    if (asked) lacking.insert(what);
  };
  const auto norm = [&](const NormConfig& c) {
    if (c.kind == NormKind::rms) return;
    refuse(c.offset != 0, "an offset of a LayerNorm's weights");
    refuse(c.rounding == NormRounding::before_gamma, "LayerNorms that round before_gamma");
  };
  norm(config.embedding_norm);
  norm(config.projection_norm);
  if (config.convolution) {
    norm(config.convolution->norm);
    refuse(config.stage.whole() && config.depth() < 2, "a convolution beside the last layer");
    refuse(!config.layers.empty() && config.layers[0].norm_place == NormPlace::pre,
           "a convolution beside a layer with norms before its blocks");
  }
  norm(config.position_norm);
  norm(config.final_norm);
  for (const LayerConfig& c : config.layers) {
    for (const NormConfig* one : {&c.attention_norm, &c.attention_result_norm, &c.ffn_norm, &c.ffn_result_norm})
      norm(*one);
    if (c.attention.qk_norm) norm(*c.attention.qk_norm);
    if (const std::optional<Rotary>& rotary = c.attention.rotary)
      refuse(config.max_positions > kMostTurns || config.max_positions * rotary->dims > kMostTableFloats,
             "tables of rotary positions of more than 2^21 rows or 2 GiB");
    if (const Rotary* const stretched = config.stretched())
      refuse(c.attention.rotary && *c.attention.rotary != *stretched,
             "rotary positions that follow a sequence's length in some layers alone");
  }
  std::string words;
  for (const std::string& one : lacking) words += "\n  " + one;
  FTBERT_CHECK(words.empty(), "the model configuration asks for what ftbert does not compute:", words);
}

}  // namespace ftbert
