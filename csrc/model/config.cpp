#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "core/check.h"
#include "model/section.h"
#include "model/weights.h"

namespace ftbert {
namespace {

// The deepest encoders that were ever trained have 1000. Shared layers cost a file nothing, each call pays for all.
constexpr int64_t kMostLayers = 4096;
constexpr int64_t kMostWidth = int64_t{1} << 24, kMostRows = int64_t{1} << 40;

std::string too_many(int64_t layers) {
  return std::to_string(layers) + " layers are more than ftbert runs (" + std::to_string(kMostLayers) + ")";
}

NormConfig read_norm(Section& around, const char* key) {
  std::optional<Section> read = around.section(key);
  if (!read) return {};
  const NormConfig norm{.kind = read->choice<NormKind>("kind", {{"layer", NormKind::layer}, {"rms", NormKind::rms}}),
                        .bias = read->boolean("bias", true),
                        .eps = read->number("eps", 0, 1),
                        .offset = read->number("offset", -1e6, 1e6, 0),
                        .rounding = read->choice<NormRounding>(
                            "rounding", {{"once", NormRounding::once}, {"before_gamma", NormRounding::before_gamma}})};
  read->finish();
  return norm;
}

const Format* read_type(Section& read, const char* key) {
  std::vector<std::pair<std::string, const Format*>> choices{{"model", nullptr}};
  for (const Format* format : all_formats())
    if (format->in_checkpoints) choices.emplace_back(format->name, format);
  return read.choice(key, choices);
}

Window read_window(Section& read) {
  Window window;
  if (const Json::Array* sides = read.array("window")) {
    const auto side = [&](size_t i) -> int {
      const int64_t* distance = (*sides)[i].as<int64_t>();
      if (distance && *distance >= 0 && *distance < Window::kAll) return static_cast<int>(*distance);
      read.require((*sides)[i].is_null(), "window",
                   "expected distances from 0 to 2^31-2, or null, got " + shown((*sides)[i]));
      return Window::kAll;
    };
    read.require(sides->size() == 2, "window",
                 "expected [left, right], got " + std::to_string(sides->size()) + " numbers");
    if (sides->size() == 2) window = {.left = side(0), .right = side(1)};
    read.keep("window", {*sides});
  }
  if (!read.boolean("causal", false)) return window;
  read.require(window.right == 0 || window.right == Window::kAll, "causal",
               "contradicts a window that reaches " + std::to_string(window.right) + " keys to the right");
  window.right = 0;
  return window;
}

Rotary read_rotary(Section& read, int64_t head_size) {
  Rotary c{.dims = read.integer("dims", 2, 1 << 16, head_size),
           .frequencies = {},
           .amplitude = read.number("amplitude", 0, 1e6, 1),
           .interleaved = read.boolean("interleaved", false),
           .stretch = {}};
  read.require(
      c.dims % 2 == 0 && c.dims <= head_size, "dims",
      "expected an even number up to head_size " + std::to_string(head_size) + ", got " + std::to_string(c.dims));
  if (const Json::Array* listed = read.array("frequencies")) {
    c.frequencies = read.numbers("frequencies", *listed, 0, 1e6);
    read.require(
        2 * static_cast<int64_t>(listed->size()) == c.dims, "frequencies",
        "expected one for each pair of " + std::to_string(c.dims) + " dims, got " + std::to_string(listed->size()));
  } else {
    const double theta = read.number("theta", 0, 1e15);
    for (int64_t i = 0; i < c.dims; i += 2)
      c.frequencies.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(c.dims)));
  }
  if (std::optional<Section> stretch = read.section("stretch")) {
    c.stretch =
        Stretch{.factor = stretch->number("factor", 0, 1e6), .trained = stretch->integer("trained", 1, kMostRows)};
    stretch->finish();
    read.require(c.dims > 2, "stretch", "expected more than 2 dims");
  }
  read.finish();
  return c;
}

PositionScores read_position_scores(Section& read) {
  const PositionScores c{.keys = read.boolean("keys", false),
                         .queries = read.boolean("queries", false),
                         .shared = read.boolean("shared", true),
                         .keys_bias = read.boolean("keys_bias", true),
                         .queries_bias = read.boolean("queries_bias", true)};
  read.require(c.keys || c.queries, "keys", "neither keys nor queries are multiplied with positions");
  read.finish();
  return c;
}

AttentionConfig read_attention(Section& read) {
  AttentionConfig c;
  Heads& heads = c.heads;
  heads.count = read.integer("heads", 1, 1 << 16);
  heads.kv = read.integer("kv_heads", 1, 1 << 16, heads.count);
  heads.size = read.integer("head_size", 1, 1 << 16);
  heads.scale = static_cast<float>(read.number("scale", 0, 1e6, 1.0f / std::sqrt(static_cast<float>(heads.size))));
  c.soft_cap = static_cast<float>(read.number_or_none("soft_cap", 0, 1e6).value_or(0));
  c.window = read_window(read);
  c.relative_bias = read.boolean("relative_bias", false);
  if (std::optional<Section> scores = read.section("position_scores"))
    c.position_scores = read_position_scores(*scores);
  read.require(!c.position_scores || heads.kv == heads.count, "position_scores",
               "every head of queries needs keys of its own");
  if (std::optional<Section> rotary = read.section("rotary")) c.rotary = read_rotary(*rotary, heads.size);
  if (const NormConfig norm = read_norm(read, "qk_norm"); norm.kind != NormKind::none) c.qk_norm = norm;
  c.qkv_bias = read.boolean("qkv_bias", true);
  c.out_bias = read.boolean("out_bias", true);
  c.qkv_type = read_type(read, "qkv_type");
  c.out_type = read_type(read, "out_type");
  read.require(heads.count % heads.kv == 0, "kv_heads",
               std::to_string(heads.kv) + " does not divide heads " + std::to_string(heads.count));
  read.require(heads.qkv_width() <= kMostWidth, "heads",
               "heads * head_size is " + std::to_string(heads.width()) + ", too wide for a product");
  read.finish();
  return c;
}

Activation read_activation(Section& read, Activation otherwise) {
  const std::string activation = read.text("activation");
  try {
    if (!activation.empty()) return parse_activation(shown(activation));
  } catch (const Error& error) {
    read.complain("activation", error.what());
  }
  return otherwise;
}

Convolution read_convolution(Section& read) {
  Convolution c{.kernel = read.integer("kernel", 1, 255), .norm = {}};
  read.require(c.kernel % 2 == 1, "kernel", "expected an odd number of columns, got " + std::to_string(c.kernel));
  c.activation = read_activation(read, c.activation);
  c.norm = read_norm(read, "norm");
  read.require(c.norm.kind != NormKind::none, "norm", "is missing");
  read.finish();
  return c;
}

FeedForwardConfig read_ffn(Section& read) {
  FeedForwardConfig c{.inter = read.integer("inter", 1, kMostWidth)};
  c.activation = read_activation(read, c.activation);
  c.gated = read.boolean("gated", false);
  c.up_bias = read.boolean("up_bias", true);
  c.down_bias = read.boolean("down_bias", true);
  c.up_type = read_type(read, "up_type");
  c.down_type = read_type(read, "down_type");
  read.finish();
  return c;
}

LayerConfig read_layer(Section& read) {
  LayerConfig c;
  c.norm_place = read.choice<NormPlace>("norm_place", {{"post", NormPlace::post}, {"pre", NormPlace::pre}});
  if (std::optional<Section> attention = read.section("attention", /*needed=*/true))
    c.attention = read_attention(*attention);
  if (std::optional<Section> ffn = read.section("ffn", /*needed=*/true)) c.ffn = read_ffn(*ffn);
  c.attention_norm = read_norm(read, "attention_norm");
  c.attention_result_norm = read_norm(read, "attention_result_norm");
  c.ffn_norm = read_norm(read, "ffn_norm");
  c.ffn_result_norm = read_norm(read, "ffn_result_norm");
  return c;
}

// The layers of one entry of `layers`, behind those that are there, and an entry of its own for each; false where they
// become too many.
bool read_layers(Section& read, const ModelConfig& model, std::vector<LayerConfig>& layers, Json::Array& entries) {
  const int64_t first = static_cast<int64_t>(layers.size()), end = first + read.integer("repeat", 1, kMostRows, 1);
  const int64_t shared = read.integer("weights_of", 0, kMostRows, -1);  // -1: each has its own
  LayerConfig layer = read_layer(read);
  read.finish();
  if (layer.attention.relative_bias)
    read.require(layer.attention.heads.count == model.relative_heads, "attention",
                 "relative_bias: the model's table is for " + std::to_string(model.relative_heads) +
                     " heads, the layer has " + std::to_string(layer.attention.heads.count));
  read.require(!layer.attention.position_scores || model.position_span > 0, "attention",
               "position_scores: the model has no position_table");
  read.require(end <= kMostLayers, "repeat", too_many(end));
  for (int64_t i = first; i < std::min(end, kMostLayers); ++i) {
    layer.weights_of = shared < 0 ? model.stage.first_layer + i : shared;
    layers.push_back(layer);
    read.keep("repeat", {int64_t{1}});
    read.keep("weights_of", {layer.weights_of});
    entries.push_back({read.values()});
  }
  return end <= kMostLayers;
}

// The table of positions for scores.
void read_position_table(Section& read, ModelConfig& c) {
  constexpr int64_t kMostSpan = 1 << 16;
  c.position_span = read.integer("span", 1, kMostSpan);
  if (const Json::Array* listed = read.array("buckets")) {
    for (const Json& one : *listed) {
      const int64_t* bucket = one.as<int64_t>();
      const bool first = c.position_buckets.empty();
      const int64_t before = first ? 0 : c.position_buckets.back();
      if (!bucket || *bucket < before || *bucket > (first ? 0 : c.position_span)) {
        read.complain("buckets", "expected integers that ascend from 0 to span " + std::to_string(c.position_span) +
                                     " at most, got " + shown(one));
        break;
      }
      c.position_buckets.push_back(static_cast<int32_t>(*bucket));
    }
    read.require(!listed->empty(), "buckets", "expected at least that of distance 0");
    read.keep("buckets", {*listed});
  } else {
    for (int64_t d = 0; d <= c.position_span; ++d) c.position_buckets.push_back(static_cast<int32_t>(d));
  }
  c.position_norm = read_norm(read, "norm");
  read.finish();
}

std::vector<LayerConfig> read_all_layers(Section& read, const ModelConfig& model, Complaints& complaints) {
  std::vector<LayerConfig> layers;
  Json::Array all;
  bool few = true;
  const std::optional<Section> common = read.section("layer");
  const Json::Array* entries = read.array("layers", /*needed=*/true);
  const int64_t count = entries ? static_cast<int64_t>(entries->size()) : 0;
  read.require(count <= kMostLayers, "layers", too_many(count));
  for (int64_t i = 0; i < count && count <= kMostLayers && few && !complaints.enough(); ++i) {
    const Json& entry = (*entries)[i];
    const std::string path = "layers[" + std::to_string(i) + "]";
    if (!entry.as<Json::Object>()) {
      complaints.add(path, "expected an object, got " + shown(entry));
      continue;
    }
    Section layer(complaints, {&entry, path}, common ? common->source() : JsonAt{});
    few = read_layers(layer, model, layers, all);
  }
  read.keep("layers", {std::move(all)});
  return layers;
}

// Layers that share weights must ask for the same tensors.
void check_shared(const ModelConfig& c, Complaints& complaints) {
  std::map<int64_t, int64_t> first;  // of each set of weights
  const int64_t all = c.stage.whole() ? c.depth() : c.stage.layers;
  if (!c.stage.whole() && c.stage.first_layer + c.depth() > all)
    complaints.add("stage", std::to_string(c.depth()) + " layers from " + std::to_string(c.stage.first_layer) +
                                " on are more than there are, " + std::to_string(all));
  for (int64_t i = 0; i < c.depth(); ++i) {
    const int64_t weights = c.layers[i].weights_of, one = first.try_emplace(weights, i).first->second;
    const std::string name = "weights_of " + std::to_string(weights);
    if (weights >= all) complaints.add("layers", name + " is not below the number of layers, " + std::to_string(all));
    if (one != i && layer_weight_specs(c, c.layers[one]) != layer_weight_specs(c, c.layers[i]))
      complaints.add("layers", std::to_string(one) + " and " + std::to_string(i) + " have " + name +
                                   ", but tensors of different shapes or types");
  }
}

}  // namespace

bool ModelConfig::rotary() const {
  return std::any_of(layers.begin(), layers.end(), [](const LayerConfig& layer) { return layer.attention.rotary; });
}

const Rotary* ModelConfig::stretched() const {
  for (const LayerConfig& layer : layers)
    if (const std::optional<Rotary>& rotary = layer.attention.rotary; rotary && rotary->stretch) return &*rotary;
  return nullptr;
}

bool ModelConfig::by_distance() const {
  return std::any_of(layers.begin(), layers.end(), [](const LayerConfig& one) { return one.attention.by_distance(); });
}

int64_t ModelConfig::max_seq() const {
  // The first row that a token can use is padding_id + 1 where positions count from the padding id.
  return positions == PositionKind::from_padding ? max_positions - padding_id - 1 : max_positions;
}

ModelConfig ModelConfig::parse(std::string_view json, std::string* whole) {
  const Json document = parse_json(json);
  FTBERT_CHECK(document.as<Json::Object>(), "the model configuration: expected an object, got ", shown(document));
  Complaints complaints;
  Section read(complaints, {&document, ""});
  ModelConfig c;
  c.vocab = read.integer("vocab", 1, kMostRows);
  c.hidden = read.integer("hidden", 1, 1 << 20);
  c.embedding = read.integer("embedding", 1, 1 << 20);
  c.padding_id = read.integer("padding_id", 0, kMostRows, 0);
  c.token_types = read.integer("token_types", 0, kMostRows, 0);
  c.embedding_scale = read.number("embedding_scale", 0, 1e6, 1);
  c.word_type = read.choice<const Format*>("word_type", {{"model", nullptr}, {"int8", &formats::int8}});
  if (std::optional<Section> positions = read.section("positions", /*needed=*/true)) {
    c.positions = positions->choice<PositionKind>("kind", {{"absolute", PositionKind::absolute},
                                                           {"from_padding", PositionKind::from_padding},
                                                           {"none", PositionKind::none}});
    c.max_positions = positions->integer("rows", 1, kMostRows);
    positions->require(c.max_seq() >= 1, "rows",
                       "no token has a position: they count from padding id " + std::to_string(c.padding_id) +
                           " + 1, and there are " + std::to_string(c.max_positions));
    positions->finish();
  }
  if (std::optional<Section> bias = read.section("relative_bias")) {
    c.relative_span = bias->integer("span", 1, 1 << 20);
    c.relative_heads = bias->integer("heads", 1, 1 << 16);
    c.relative_of_layers = bias->choice<bool>("of", {{"model", false}, {"layers", true}});
    bias->finish();
  }
  if (std::optional<Section> dropout = read.section("token_dropout")) {
    c.token_dropout = {.mask_id = dropout->integer("mask_id", 0, c.vocab - 1),
                       .kept = static_cast<float>(dropout->number("kept", 0, 1))};
    dropout->finish();
  }
  if (std::optional<Section> table = read.section("position_table")) read_position_table(*table, c);
  if (std::optional<Section> convolution = read.section("convolution")) c.convolution = read_convolution(*convolution);
  if (std::optional<Section> shard = read.section("shard")) {
    c.shard.size = shard->integer("size", 1, 1 << 16);
    c.shard.rank = shard->integer("rank", 0, c.shard.size - 1);
    shard->finish();
  }
  if (std::optional<Section> stage = read.section("stage")) {
    c.stage.count = stage->integer("count", 1, kMostLayers);
    c.stage.index = stage->integer("index", 0, c.stage.count - 1);
    c.stage.layers = stage->integer("layers", 1, kMostLayers);
    c.stage.first_layer = stage->integer("first_layer", 0, c.stage.layers - 1);
    stage->finish();
  }
  c.embedding_norm = read_norm(read, "embedding_norm");
  c.final_norm = read_norm(read, "final_norm");
  c.states_before_final_norm = read.boolean("states_before_final_norm", false);
  c.embedding_projection = read.boolean("embedding_projection", false);
  c.projection_bias = read.boolean("projection_bias", true);
  c.projection_norm = read_norm(read, "projection_norm");
  c.pooler = read.boolean("pooler", false);
  c.layers = read_all_layers(read, c, complaints);
  read.finish();
  read.require(c.embedding_projection || c.embedding == c.hidden, "embedding",
               std::to_string(c.embedding) + " differs from hidden " + std::to_string(c.hidden) +
                   ": that needs embedding_projection");
  read.require(c.embedding_projection || c.projection_norm.kind == NormKind::none, "projection_norm",
               "there is no embedding_projection");
  bool biased = c.layers.empty() || c.relative_span == 0;
  for (const LayerConfig& layer : c.layers) biased = biased || layer.attention.relative_bias;
  read.require(biased, "relative_bias", "no layer has attention.relative_bias");
  bool positioned = c.layers.empty() || c.position_span == 0;
  for (const LayerConfig& layer : c.layers) positioned = positioned || layer.attention.position_scores;
  read.require(positioned, "position_table", "no layer has attention.position_scores");
  check_shared(c, complaints);
  complaints.throw_any("the model configuration is not valid:");
  if (whole) *whole = json_text({read.values()});
  return c;
}

}  // namespace ftbert
