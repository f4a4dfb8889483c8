// Errors: one exception type with words a user can act on. The core never prints and never exits.
#pragma once
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace ftbert {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One argument of a message as text. No streams: they would make every file that checks something slow to compile.
template <class Word>
std::string text_of(const Word& word) {
  if constexpr (std::is_floating_point_v<Word>) {
    char buffer[32];
    std::snprintf(buffer, sizeof(buffer), "%g", static_cast<double>(word));
    return buffer;
  } else if constexpr (std::is_arithmetic_v<Word>) {
    return std::to_string(word);
  } else {
    return std::string(std::string_view(word));
  }
}

template <class... Words>
[[noreturn]] void fail(const Words&... words) {
  throw Error((text_of(words) + ...));
}

}  // namespace ftbert

// FTBERT_CHECK(condition, "expected ", a, ", got ", b): throws Error with these joined. A macro, so that the
// words cost nothing while the condition holds.
#define FTBERT_CHECK(condition, ...) \
  do {                               \
    if (!(condition)) [[unlikely]]   \
      ::ftbert::fail(__VA_ARGS__);   \
  } while (false)
