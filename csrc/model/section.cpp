#include "model/section.h"

#include <algorithm>

#include "core/check.h"

namespace ftbert {
namespace {

constexpr size_t kMostLines = 20;

std::string inside(const std::string& path, std::string_view key) {
  if (path.empty() || key.empty()) return path + shown(key);
  return path + "." + shown(key);
}

}  // namespace

void Complaints::add(const std::string& path, const std::string& words) {
  const std::string line = "\n  " + path + (path.empty() ? "" : ": ") + words;
  if (known_.insert(line).second && known_.size() <= kMostLines) lines_ += line;
}

bool Complaints::enough() const { return known_.size() > kMostLines; }

void Complaints::throw_any(std::string_view about) const {
  if (known_.empty()) return;
  const size_t more = known_.size() > kMostLines ? known_.size() - kMostLines : 0;
  fail(about, lines_, more ? "\n  and " + std::to_string(more) + " more" : std::string());
}

const Json* Section::find(std::string_view key, bool needed) {
  asked_.emplace(key);
  const Json* found = own_.json->find(key);
  if (!found && common_.json) found = common_.json->find(key);
  if (found && found->is_null()) found = nullptr;
  require(found || !needed, key, "missing");
  return found;
}

std::string Section::path_of(std::string_view key) const {
  const bool in_common = common_.json && !own_.json->find(key) && common_.json->find(key);
  return inside(in_common ? common_.path : own_.path, key);
}

void Section::complain(std::string_view key, const std::string& words) { complaints_.add(path_of(key), words); }

void Section::require(bool condition, std::string_view key, const std::string& words) {
  if (!condition) complain(key, words);
}

void Section::expected(std::string_view key, const std::string& what, const Json& got) {
  complain(key, "expected " + what + ", got " + shown(got));
}

int64_t Section::integer(std::string_view key, int64_t low, int64_t high, std::optional<int64_t> otherwise) {
  const Json* found = find(key, !otherwise);
  if (!found) return kept(key, otherwise.value_or(low));
  const int64_t* value = found->as<int64_t>();
  if (value && low <= *value && *value <= high) return kept(key, *value);
  const bool above = value && *value > high;
  expected(key, above ? "an integer <= " + std::to_string(high) : "an integer >= " + std::to_string(low), *found);
  return low;
}

double Section::number(std::string_view key, double above, double high, std::optional<double> otherwise) {
  const Json* found = find(key, !otherwise);
  if (!found) return kept(key, otherwise.value_or(high));
  return kept(key, number_of(key, *found, above, high));
}

std::optional<double> Section::number_or_none(std::string_view key, double above, double high) {
  return find(key) ? std::optional<double>(number(key, above, high)) : std::nullopt;
}

double Section::number_of(std::string_view key, const Json& found, double above, double high) {
  const int64_t* integer = found.as<int64_t>();
  const double* real = found.as<double>();
  const double value = integer ? static_cast<double>(*integer) : real ? *real : above;
  if ((integer || real) && above < value && value <= high) return value;
  expected(key, "a number in (" + text_of(above) + ", " + text_of(high) + "]", found);
  return high;
}

std::vector<double> Section::numbers(std::string_view key, const Json::Array& list, double above, double high) {
  std::vector<double> found;
  for (const Json& one : list) found.push_back(number_of(key, one, above, high));
  keep(key, {Json::Array(list)});
  return found;
}

bool Section::boolean(std::string_view key, bool otherwise) {
  const Json* found = find(key);
  const bool* value = found ? found->as<bool>() : &otherwise;
  if (!value) expected(key, "true or false", *found);
  return kept(key, value ? *value : otherwise);
}

std::string Section::text(std::string_view key, std::optional<std::string> otherwise) {
  const Json* found = find(key, !otherwise);
  const std::string* value = found ? found->as<std::string>() : nullptr;
  if (found && !value) expected(key, "a string", *found);
  return kept(key, value ? *value : otherwise.value_or(""));
}

std::optional<Section> Section::section(std::string_view key, bool needed) {
  const Json* found = find(key, needed);
  if (!found) return std::nullopt;
  if (!found->as<Json::Object>()) {
    expected(key, "an object", *found);
    return std::nullopt;
  }
  const Json* shared = common_.json ? common_.json->find(key) : nullptr;
  const bool both = shared && shared != found && shared->as<Json::Object>();
  Section made(complaints_, {found, path_of(key)}, both ? JsonAt{shared, inside(common_.path, key)} : JsonAt{});
  made.around_ = this;
  made.key_ = key;
  return made;
}

const Json::Array* Section::array(std::string_view key, bool needed) {
  const Json* found = find(key, needed);
  if (!found) return nullptr;
  if (!found->as<Json::Array>()) expected(key, "a list", *found);
  return found->as<Json::Array>();
}

void Section::keep(std::string_view key, Json value) {
  const auto at = std::ranges::lower_bound(values_, key, {}, &Json::Member::key);
  if (at != values_.end() && at->key == key)
    at->value = std::move(value);
  else
    values_.insert(at, {std::string(key), std::move(value)});
}

void Section::finish() {
  for (const JsonAt* source : {&own_, &common_}) {
    if (!source->json) continue;
    for (const auto& [key, value] : *source->json->as<Json::Object>())
      if (!asked_.count(key)) complaints_.add(inside(source->path, key), "unknown key");
  }
  if (around_) around_->keep(key_, {values_});
}

}  // namespace ftbert
