#include "core/json.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "core/check.h"

namespace ftbert {
namespace {

constexpr size_t kMostBytes = size_t{4} << 20;
constexpr int kMostDepth = 32;

// Where a value stands: a key or an index in what is around it.
struct Place {
  const Place* around = nullptr;
  std::string_view key;
  size_t index = 0;
  int depth = 0;

  std::string text() const {
    if (!around) return "";
    const std::string outer = around->text();
    if (key.data() == nullptr) return outer + "[" + std::to_string(index) + "]";
    return outer + (outer.empty() ? "" : ".") + shown(key);
  }
};

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json document() {
    if (text_.size() > kMostBytes) fail("expected at most ", kMostBytes, " bytes of JSON, got ", text_.size());
    const Place top;
    Json json = value(top);
    blanks();
    if (at_ < text_.size()) wrong(top, "the end");
    return json;
  }

 private:
  [[noreturn]] void wrong(const Place& place, const char* expected) const {
    const std::string path = place.text();
    fail("not valid JSON: ", path, path.empty() ? "" : ": ", "expected ", expected, " at byte ", at_);
  }

  char next() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool take(char c) {
    if (next() != c || at_ == text_.size()) return false;
    ++at_;
    return true;
  }
  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  void blanks() {
    while (next() == ' ' || next() == '\t' || next() == '\n' || next() == '\r') ++at_;
  }

  Json value(const Place& place) {
    if (place.depth > kMostDepth) wrong(place, "at most 32 levels");
    blanks();
    if (take('{')) return {object(place)};
    if (take('[')) return {array(place)};
    if (take('"')) return {string(place)};
    if (take("null")) return {nullptr};
    if (take("true")) return {true};
    if (take("false")) return {false};
    return number(place);
  }

  Json::Array array(const Place& place) {
    Json::Array items;
    blanks();
    if (take(']')) return items;
    do {
      items.push_back(value({.around = &place, .key = {}, .index = items.size(), .depth = place.depth + 1}));
      blanks();
    } while (take(','));
    if (!take(']')) wrong(place, "',' or ']'");
    return items;
  }

  Json::Object object(const Place& place) {
    Json::Object members;
    blanks();
    if (take('}')) return members;
    do {
      blanks();
      if (!take('"')) wrong(place, "a key");
      std::string key = string(place);
      blanks();
      if (!take(':')) wrong(place, "':'");
      Json json = value({.around = &place, .key = key, .index = 0, .depth = place.depth + 1});
      members.push_back({std::move(key), std::move(json)});
      blanks();
    } while (take(','));
    if (!take('}')) wrong(place, "',' or '}'");
    std::ranges::sort(members, {}, &Json::Member::key);
    const auto twice = std::ranges::adjacent_find(members, {}, &Json::Member::key);
    if (twice != members.end())
      wrong({.around = &place, .key = twice->key, .index = 0, .depth = 0}, "each key once in the object that ends");
    return members;
  }

  // Behind the opening quote.
  std::string string(const Place& place) {
    std::string made;
    while (!take('"')) {
      if (at_ == text_.size() || static_cast<unsigned char>(next()) < 0x20) wrong(place, "the end of a string");
      if (!take('\\')) {
        made += text_[at_++];
        continue;
      }
      static constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
      if (take('u')) {
        unicode(place, made);
      } else {
        const size_t which = at_ < text_.size() ? kEscapes.find(next()) : std::string_view::npos;
        if (which == std::string_view::npos) wrong(place, "an escape of JSON's");
        made += kMeant[which];
        ++at_;
      }
    }
    return made;
  }

  uint32_t hex(const Place& place) {
    uint32_t code = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (digits.size() < 4 || error != std::errc() || end != digits.data() + 4) wrong(place, "four hex digits");
    at_ += 4;
    return code;
  }

  void unicode(const Place& place, std::string& made) {
    uint32_t code = hex(place);
    if (code >= 0xD800 && code < 0xE000) {
      const bool pair = code < 0xDC00 && take("\\u");
      const uint32_t low = pair ? hex(place) : 0;
      if (low < 0xDC00 || low >= 0xE000) wrong(place, "a pair of surrogates");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  // bytes behind the first
    static constexpr uint32_t kFirst[] = {0, 0xC0, 0xE0, 0xF0};
    made += static_cast<char>(kFirst[more] | code >> 6 * more);
    for (int i = more - 1; i >= 0; --i) made += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
  }

  Json number(const Place& place) {
    const size_t begin = at_;
    const auto digits = [&] {
      if (next() < '0' || next() > '9') wrong(place, "a value");
      while (next() >= '0' && next() <= '9') ++at_;
    };
    take('-');
    if (!take('0')) digits();
    const bool whole = next() != '.' && next() != 'e' && next() != 'E';
    if (take('.')) digits();
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      digits();
    }
    const char *first = text_.data() + begin, *last = text_.data() + at_;
    int64_t integer = 0;
    if (whole && std::from_chars(first, last, integer).ec == std::errc()) return {integer};
    double real = 0;
    if (std::from_chars(first, last, real).ec != std::errc())
      wrong(place, "a number within a double's range before the end");
    return {real};
  }

  std::string_view text_;
  size_t at_ = 0;
};

std::string quoted(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string made = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      made.append("\\u00").append({kHex[c >> 4], kHex[c & 0xF]});
      continue;
    }
    if (c == '"' || c == '\\') made += '\\';
    made += c;
  }
  return made + '"';
}

std::string number_text(double real) {
  char digits[32];
  const std::string made(digits, std::to_chars(digits, digits + sizeof(digits), real).ptr);  // the fewest that say it
  return made.find_first_of(".e") == std::string::npos ? made + ".0" : made;
}

}  // namespace

const Json* Json::find(std::string_view key) const {
  const Object* object = as<Object>();
  if (!object) return nullptr;
  const auto it = std::ranges::lower_bound(*object, key, {}, &Member::key);
  return it != object->end() && it->key == key ? &it->value : nullptr;
}

Json parse_json(std::string_view text) { return Parser(text).document(); }

std::string json_text(const Json& json) {
  if (json.is_null()) return "null";
  if (const bool* truth = json.as<bool>()) return *truth ? "true" : "false";
  if (const int64_t* integer = json.as<int64_t>()) return std::to_string(*integer);
  if (const double* real = json.as<double>()) return number_text(*real);
  if (const std::string* text = json.as<std::string>()) return quoted(*text);
  std::string items;
  const auto begin = [&] { items += items.empty() ? "" : ", "; };
  if (const Json::Array* array = json.as<Json::Array>()) {
    for (const Json& one : *array) begin(), items += json_text(one);
    return "[" + items + "]";
  }
  for (const auto& [key, value] : *json.as<Json::Object>()) begin(), items += quoted(key) + ": " + json_text(value);
  return "{" + items + "}";
}

std::string shown(std::string_view text) {
  std::string made(text.substr(0, 60));
  for (char& c : made)
    if (c < 0x20 || c > 0x7e) c = '?';
  return text.size() > 60 ? made + "..." : made;
}

std::string shown(const Json& json) {
  if (const double* real = json.as<double>()) return text_of(*real);
  if (const std::string* text = json.as<std::string>()) return std::string("'").append(shown(*text)).append("'");
  if (const Json::Array* array = json.as<Json::Array>()) return "a list of " + std::to_string(array->size());
  if (const Json::Object* object = json.as<Json::Object>()) return "an object of " + std::to_string(object->size());
  return json_text(json);
}

}  // namespace ftbert
