// JSON text as values, for descriptions that come from files: bounded in size and depth, numbers exact.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace ftbert {

struct Json {
  struct Member;
  using Array = std::vector<Json>;
  using Object = std::vector<Member>;  // in the order of the keys, each once
  // A number is an integer where it is written as one and fits.
  std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object> value;

  template <class T>
  const T* as() const {  // nullptr where it is something else
    return std::get_if<T>(&value);
  }
  bool is_null() const { return as<std::nullptr_t>(); }
  const Json* find(std::string_view key) const;  // of an object; nullptr where it lacks the key or is none
};

struct Json::Member {
  std::string key;
  Json value;
};

// Throws Error that names the key and the byte at which text is no JSON, is longer than 4 MiB or nested deeper than 32.
Json parse_json(std::string_view text);

// JSON text that parse_json reads as the same values; numbers must be finite.
std::string json_text(const Json& json);

// For messages: short, in printable ASCII. A text in quotes, an array or object by its size.
std::string shown(const Json& json);
std::string shown(std::string_view text);

}  // namespace ftbert
