// One object of a description in JSON, read key by key. Every complaint is kept, so that a user sees all at once.
#pragma once
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/json.h"

namespace ftbert {

class Complaints {
 public:
  void add(const std::string& path, const std::string& words);  // the same one counts once
  bool enough() const;                                          // more would not be shown
  void throw_any(std::string_view about) const;                 // Error of at most 20 lines

 private:
  std::set<std::string> known_;
  std::string lines_;
};

// A value and where it stands.
struct JsonAt {
  const Json* json = nullptr;
  std::string path;
};

// What `own` says; where it lacks a key, what `common` says. null is neither: the key is absent. A section inside
// another must not outlive it.
class Section {
 public:
  Section(Complaints& complaints, JsonAt own, JsonAt common = {})
      : complaints_(complaints), own_(std::move(own)), common_(std::move(common)) {}

  const JsonAt& source() const { return own_; }
  // Every value that was read, with the default of an absent key; sections inside from their finish() on.
  const Json::Object& values() const { return values_; }
  void keep(std::string_view key, Json value);  // as one of them, in the place of one that is there

  // `otherwise` where the key is absent; without one that is a complaint. After a complaint, some possible value.
  int64_t integer(std::string_view key, int64_t low, int64_t high, std::optional<int64_t> otherwise = {});
  double number(std::string_view key, double above, double high, std::optional<double> otherwise = {});
  std::optional<double> number_or_none(std::string_view key, double above, double high);
  bool boolean(std::string_view key, bool otherwise);
  std::string text(std::string_view key, std::optional<std::string> otherwise = {});
  template <class T>
  T choice(std::string_view key, const std::vector<std::pair<std::string, T>>& choices) {  // the first: otherwise
    const std::string word = text(key, choices[0].first);
    std::string known;
    for (const auto& [name, value] : choices) {
      if (name == word) return value;
      known += (known.empty() ? "one of " : ", ") + name;
    }
    complain(key, "expected " + known + ", got '" + shown(word) + "'");
    return choices[0].second;
  }
  // nullopt where the key is absent, or no object, which is a complaint.
  std::optional<Section> section(std::string_view key, bool needed = false);
  const Json::Array* array(std::string_view key, bool needed = false);  // nullptr where the key is absent
  // Those of a list, in (above, high].
  std::vector<double> numbers(std::string_view key, const Json::Array& list, double above, double high);

  void require(bool condition, std::string_view key, const std::string& words);
  void complain(std::string_view key, const std::string& words);  // "" for the section itself
  void finish();                                                  // complains about keys that nobody read

 private:
  const Json* find(std::string_view key, bool needed = false);  // to be needed and absent is a complaint
  std::string path_of(std::string_view key) const;              // where it was found
  void expected(std::string_view key, const std::string& what, const Json& got);
  double number_of(std::string_view key, const Json& found, double above, double high);
  template <class T>
  T kept(std::string_view key, T value) {
    keep(key, {value});
    return value;
  }

  Complaints& complaints_;
  JsonAt own_, common_;
  std::set<std::string, std::less<>> asked_;
  Json::Object values_;
  Section* around_ = nullptr;
  std::string key_;  // in the section around it
};

}  // namespace ftbert
