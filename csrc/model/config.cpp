#include "model/config.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <set>
#include <vector>

#include "core/check.h"

namespace ftbert {
namespace {

// Reads entries one by one and keeps every complaint, so that a user sees all of them at once.
class Reader {
 public:
  explicit Reader(const std::map<std::string, std::string>& entries) : entries_(entries) {}

  int64_t integer(const char* key, int64_t low, int64_t high = int64_t{1} << 40, bool optional = false) {
    const std::string* text = find(key, optional);
    if (!text) return low;
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
    if (error != std::errc() || end != text->data() + text->size() || value < low || value > high) {
      complain(key, *text, "an integer >= " + std::to_string(low));
      return low;
    }
    return value;
  }

  double positive(const char* key) {
    const std::string* text = find(key);
    if (!text) return 1;
    char* end = nullptr;
    const double value = std::strtod(text->c_str(), &end);
    if (end == text->c_str() || *end || !(value > 0) || value > 1) {
      complain(key, *text, "a number in (0, 1]");
      return 1;
    }
    return value;
  }

  template <class T>
  T choice(const char* key, const std::vector<std::pair<std::string, T>>& choices, bool optional = false) {
    const std::string* text = find(key, optional);
    if (!text) return choices[0].second;
    std::string known;
    for (const auto& [name, value] : choices) {
      if (name == *text) return value;
      known += (known.empty() ? "one of " : ", ") + name;
    }
    complain(key, *text, known);
    return choices[0].second;
  }

  Activation activation(const char* key) {
    const std::string* text = find(key);
    if (!text) return Activation::none;
    try {
      return parse_activation(*text);
    } catch (const Error& error) {
      complaints_ += std::string("\n  ") + key + ": " + error.what();
      return Activation::none;
    }
  }

  void require(bool condition, const std::string& complaint) {
    if (!condition) complaints_ += "\n  " + complaint;
  }

  void finish() {
    for (const auto& [key, value] : entries_)
      if (!seen_.count(key)) complaints_ += "\n  " + key + ": unknown entry";
    FTBERT_CHECK(complaints_.empty(), "the model configuration is not valid:", complaints_);
  }

 private:
  const std::string* find(const char* key, bool optional = false) {
    seen_.insert(key);
    const auto it = entries_.find(key);
    if (it == entries_.end()) {
      if (!optional) complaints_ += std::string("\n  ") + key + ": missing";
      return nullptr;
    }
    return &it->second;
  }
  void complain(const char* key, const std::string& got, const std::string& expected) {
    complaints_ += std::string("\n  ") + key + ": expected " + expected + ", got '" + got + "'";
  }

  const std::map<std::string, std::string>& entries_;
  std::set<std::string> seen_;
  std::string complaints_;
};

}  // namespace

int64_t EncoderConfig::max_seq() const {
  // The first row that a token can use is padding_id + 1 where positions count from the padding id.
  return positions == PositionKind::from_padding ? max_positions - padding_id - 1 : max_positions;
}

EncoderConfig EncoderConfig::parse(const std::map<std::string, std::string>& entries) {
  Reader read(entries);
  EncoderConfig c;
  LayerConfig layer;  // every layer's
  c.vocab = read.integer("vocab", 1);
  c.hidden = read.integer("hidden", 1, 1 << 20);
  const int64_t depth = read.integer("layers", 0, 1 << 16);
  Heads& heads = layer.attention.heads;
  heads.count = heads.kv = c.relative_heads = read.integer("heads", 1, 1 << 16);
  heads.size = read.integer("head_size", 1, 1 << 16);
  heads.scale = 1.0f / std::sqrt(static_cast<float>(heads.size));
  layer.ffn.inter = read.integer("inter", 1, 1 << 24);
  c.embedding = read.integer("embedding", 1, 1 << 20);
  c.max_positions = read.integer("max_positions", 1);
  c.token_types = read.integer("token_types", 0);
  c.padding_id = read.integer("padding_id", 0);
  c.relative_span = read.integer("relative_span", 0, 1 << 20, /*optional=*/true);
  layer.attention.relative_bias = c.relative_span > 0;
  // So many layers have tensors of their own, the others share them in runs; 0: all.
  const int64_t distinct = read.integer("distinct_layers", 0, depth, /*optional=*/true);
  const NormConfig norm{.kind = NormKind::layer, .eps = read.positive("layer_norm_eps")};
  layer.attention_norm = layer.ffn_norm = norm;
  layer.ffn.activation = read.activation("activation");
  layer.norm_place = read.choice<NormPlace>("norm_place", {{"post", NormPlace::post}, {"pre", NormPlace::pre}});
  c.positions = read.choice<PositionKind>("positions", {{"absolute", PositionKind::absolute},
                                                        {"from_padding", PositionKind::from_padding},
                                                        {"none", PositionKind::none}});
  const std::vector<std::pair<std::string, bool>> no_yes{{"false", false}, {"true", true}};
  const std::vector<std::pair<std::string, bool>> yes_no{{"true", true}, {"false", false}};
  if (read.choice("embedding_norm", yes_no, /*optional=*/true)) c.embedding_norm = norm;
  if (layer.norm_place == NormPlace::pre) c.final_norm = norm;
  c.embedding_projection = read.choice("embedding_projection", no_yes, /*optional=*/true);
  c.pooler = read.choice("pooler", no_yes);
  read.require(c.embedding_projection || c.embedding == c.hidden,
               "embedding " + std::to_string(c.embedding) + " differs from hidden " + std::to_string(c.hidden) +
                   ": that needs embedding_projection");
  read.require(heads.width() == c.hidden, "heads * head_size must equal hidden: " + std::to_string(heads.count) +
                                              " * " + std::to_string(heads.size) + " != " + std::to_string(c.hidden));
  read.finish();
  for (int64_t i = 0; i < depth; ++i) {
    layer.weights_of = distinct ? i * distinct / depth : i;
    c.layers.push_back(layer);
  }
  return c;
}

}  // namespace ftbert
