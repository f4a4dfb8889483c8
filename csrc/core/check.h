// Errors: one exception type with words a user can act on. The core never prints and never exits.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace ftbert {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// check(condition, "expected ", a, ", got ", b): throws Error with the pieces joined.
template <class... Words>
void check(bool condition, const Words&... words) {
  if (condition) [[likely]]
    return;
  std::ostringstream message;
  (message << ... << words);
  throw Error(message.str());
}

}  // namespace ftbert
